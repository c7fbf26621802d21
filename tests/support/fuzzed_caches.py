"""Calls on key-value caches as a fuzz draws them, and how an implementation runs one.

A list that is drawn has calls of one kernel. Several of them have the same shapes too, and differ in lengths,
page tables and masks alone: nearly all time goes into compiling, the definition's operations too.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any
from unittest import mock

import jax
import numpy as np
from cache_case import CacheCase, Draw, as_jax, check
from hypothesis import strategies

from jax_flash import _device, _dispatch
from jax_flash._cache_spec import CacheOperands
from jax_flash._spec import shapes_of
from jax_flash.transforms import decoding
from jax_flash.xla import decoding as xla_decoding

# Of each, the one first that failures shrink to.
LENGTHS = ("any", "full", "empty", "one long", "edges")
TABLES = ("permuted", "in order", "shared prefix", "small pool")
SHAPES_OF_A_LIST, CASES_OF_A_SHAPE = 3, 6


@dataclasses.dataclass(frozen=True)
class FuzzedCache(CacheCase):
    lengths: str = LENGTHS[0]
    table: str = TABLES[0]
    seed: int = 0


class FuzzedDraw(Draw):
    """The operands of a `FuzzedCache`."""

    case: FuzzedCache

    def __post_init__(self):
        self.random = np.random.default_rng(self.case.seed)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        c, random = self.case, self.random
        most = max(c.S - c.U, 0)
        if c.lengths == "full":
            lengths = np.full(c.B, most)
        elif c.lengths == "empty":
            lengths = np.zeros(c.B)
        elif c.lengths == "one long":
            lengths = random.integers(0, min(most, 5) + 1, c.B)
            lengths[random.integers(c.B)] = most
        elif c.lengths == "edges":  # of blocks and pages
            lengths = random.choice([8, 64, 128, 192, 256], c.B) * random.integers(0, 9, c.B)
            lengths = np.clip(lengths + random.integers(-1, 2, c.B) - c.U, 0, c.S)
        else:  # an append may not fit
            lengths = random.integers(0, c.S + 1, c.B)
        return lengths.astype(np.int32)

    @functools.cached_property
    def page_table(self) -> np.ndarray:
        c = self.case
        if c.table == "permuted":  # some entries are no page
            return super().page_table
        pages = c.S // c.page
        table = np.arange(c.B * pages).reshape(c.B, pages)
        if c.table == "shared prefix":  # whole pages, that nobody appends to
            whole = int(self.lengths.min()) // c.page
            table[:, :whole] = table[0, :whole]
        return table.astype(np.int32)

    @functools.cached_property
    def operands(self) -> CacheOperands:
        operands = super().operands
        if self.case.page is None or self.case.table != "small pool":
            return operands
        return self._in_small_pool(operands)

    def _in_small_pool(self, operands: CacheOperands) -> CacheOperands:
        """Only the pages in use, in any order, and one more. Unused entries are any page, or none."""
        c = self.case
        used = -(-np.minimum(self.lengths + c.U, c.S) // c.page)
        is_used = np.arange(operands.page_table.shape[1]) < used[:, None]
        old = self.random.permutation(np.append(np.unique(operands.page_table[is_used]), c.B * c.S // c.page))
        new = np.full(operands.key.shape[-4], -1, np.int32)
        new[old] = np.arange(len(old))
        stale = self.random.integers(-1, len(old) + 1, is_used.shape)
        table = np.where(is_used, new[operands.page_table], stale).astype(np.int32)
        pools = {
            name: np.take(x, old, -4)
            for name in ("key", "value")
            if (x := getattr(operands, name)) is not None
        }
        return operands.replace(page_table=table, **pools)


PROMPT_QUERIES, PROMPT_GROUP = 900, 16
"""Queries, and query heads of a key head, of prompts: enough for the forward kernel of `cuda`."""


class FuzzedDecoding:
    """An implementation, and what of its calls is drawn."""

    implementation: str
    compiler_options: dict[str, Any] | None = None
    keys: int = 2500  # of a sequence, at most
    head_dims: tuple[int, ...] = (64, 8, 16, 72, 128, 192, 256)
    pages: tuple[int | None, ...] = (None, 16, 1, 3, 8, 24, 40, 64, 96, 128, 192, 256)
    are_prompts: tuple[bool, ...] = (False,)  # whether the calls of a list have very many queries
    case_type = FuzzedCache

    def environment(self):
        return contextlib.nullcontext()

    def lists(self, report: object) -> strategies.SearchStrategy[list[FuzzedCache]]:
        """Lists of calls that have the same kernel."""
        several = strategies.lists(self._data(), min_size=1, max_size=CASES_OF_A_SHAPE)
        sizes = strategies.lists(
            strategies.tuples(self._sizes(), several), min_size=1, max_size=SHAPES_OF_A_LIST
        )
        return strategies.builds(self._cases, self._kernels(), sizes)

    def _cases(self, kernel: dict[str, Any], sizes: list[tuple[dict, list[dict]]]) -> list[FuzzedCache]:
        return [self._case(kernel | size | data) for size, several in sizes for data in several]

    def _kernels(self):
        one_of = strategies.sampled_from
        return strategies.fixed_dictionaries(
            {
                "dtype": one_of(("bfloat16", "float16")),
                "float8": one_of((False, False, True)),
                "descales": strategies.booleans(),
                "H": one_of(self.head_dims),
                "V": one_of((None, None, *self.head_dims)),
                "page": one_of(self.pages),
                "rotary": one_of((None, None, "all", 8)),
                "rotary_interleaved": strategies.booleans(),
                "soft_cap": one_of((None, None, 2.0)),
                "alibi": one_of((None, None, "1N", "BN")),
                "score_mod": one_of((False, False, True)),
                "mask_mod": one_of((False, False, True)),
                "are_prompts": one_of(self.are_prompts),
            }
        )

    def _sizes(self):
        one_of, flag = strategies.sampled_from, strategies.booleans()
        return strategies.fixed_dictionaries(
            {
                "T": one_of((1, 1, 1, 2, 4, 7, 30, 70)),
                "U": one_of((0, 1, 1, 2, 8, 40)),
                "keys": strategies.floats(0, 1),  # of the most, as a logarithm
                "B": one_of((1, 2, 5, 3, 16, 40)),
                "group": one_of((1, 2, 3, 4, 8, 16)),
                "K": one_of((1, 2, 1, 3)),
                "packed": flag,
                "interleaved": flag,
            }
        )

    def _data(self):
        one_of, flag = strategies.sampled_from, strategies.booleans()
        return strategies.fixed_dictionaries(
            {
                "left": one_of((None, None, 0, 30, 200)),
                "right": one_of((None, 0, 0, 5, -2)),
                "layers": one_of((None, None, 2)),
                "batch_index": flag,
                "left_padding": flag,
                "sinks": flag,
                "query_positions": one_of(("own", "own", "appended", "first")),
                "num_splits": one_of((None, None, None, 1, 2, 3)),
                "lengths": one_of(LENGTHS),
                "table": one_of(TABLES),
                "seed": strategies.integers(0, 2**32 - 1),
            }
        )

    def _case(self, fields: dict[str, Any]) -> FuzzedCache:
        """The call that has these values, but for those that don't go together."""
        if fields.pop("are_prompts"):  # so many rows that a GPU's multiprocessors all have tiles
            fields |= {"T": PROMPT_QUERIES, "group": PROMPT_GROUP}
            fields["B"] = min(fields["B"], 5 if fields["packed"] else 2)
            if fields["packed"]:  # without what the forward kernel doesn't take then
                fields |= dict.fromkeys(("float8", "score_mod", "mask_mod"), False) | {"rotary": None}
                fields["alibi"] = fields["alibi"] and "1N"
        page, rotary = fields["page"], fields["rotary"]
        capacity = round(math.exp(fields.pop("keys") * math.log(self.keys)))
        fields["S"] = max(capacity // page, 1) * page if page else capacity
        fields["N"] = fields.pop("group") * fields["K"]
        fields["rotary"] = fields["H"] if rotary == "all" else rotary
        # Queries before the first key are rotated by NaN, and must see nothing.
        if rotary and fields["query_positions"] == "own" and fields["right"] != -2:
            fields["right"] = 0
        if page is None:
            fields |= {"interleaved": False, "table": TABLES[0]}
        else:
            fields["batch_index"] = False
        if fields["V"] is not None:
            fields["interleaved"] = False
        if fields["packed"]:
            fields["U"] = 0
        if any(x is not None and x % 16 for x in (fields["H"], fields["V"])):
            fields["float8"] = False
        fields["descales"] &= fields["float8"]
        if fields["float8"] and fields["U"]:  # nothing is appended to pages of both in 8 bits
            fields["interleaved"] = False
        return self.case_type(**fields)

    def refusal(self, case: FuzzedCache) -> None:
        """None: every call that is drawn has to run."""

    def check(self, case: FuzzedCache) -> None:
        """Run a call, and compare its results with the definition."""
        operands = FuzzedDraw(case).operands
        with self.environment():
            why_not = _dispatch.reason(self.implementation, case.spec, shapes_of(operands), _device.current())
            if why_not is not None:
                raise NotImplementedError(why_not)
            attend = functools.partial(decoding.attend, case.spec, (self.implementation,))
            results = jax.jit(attend, compiler_options=self.compiler_options)(as_jax(operands))
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # it compiles the definition sooner
            check(case, operands, results)


class CudaDecoding(FuzzedDecoding):
    implementation = "cuda"
    are_prompts = (False, False, True)


class PallasDecoding(FuzzedDecoding):
    implementation = "pallas"


class XlaDecoding(FuzzedDecoding):
    implementation = "xla"
    keys = 250

    def __init__(self):
        if jax.default_backend() == "cpu":  # half the time to compile
            self.compiler_options = {"xla_backend_optimization_level": 0}

    def environment(self):
        return mock.patch.multiple(xla_decoding, KEYS_PER_BLOCK=48, QUERIES_PER_TILE=16)
