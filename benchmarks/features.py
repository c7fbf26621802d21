"""What options of a call cost: varlen sequences beside FlashAttention-3's, every other option beside none.

    python benchmarks/features.py --groups packed --out benchmarks/results/features_packed_h200.json
    python benchmarks/features.py --groups options --out benchmarks/results/features_options_h200.json
    PYTHONPATH=FOLDER python benchmarks/features.py --groups before --out FILE

`packed`: 16 documents of uneven length in 16384 tokens, by offsets (`flash_attention_varlen`) and by segment
ids, beside FlashAttention-3's varlen functions, and beside one sequence of as many tokens. Rates count the
visible pairs of query and key; those of our kernels also count all blocks that they visit, masked parts
included. The ratio of that rate to the rate of the one sequence says what packing costs.

`options`: how much longer a call takes with each option than without. All times are kernel times, XLA's own
kernels included; a backward time is both passes less the forward pass. Figures of different runs don't
compare.

`before`: the same, and every time over that of the version that `before.py` installed in FOLDER.
"""

import argparse
import dataclasses
import functools
import importlib
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import before
import jax
import jax.numpy as jnp
import numpy as np
import record
import rounds
import timing

import jax_flash
from jax_flash import cuda
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda.sm90 import backward_tiles, forward_plan, tensor_maps

TOKENS, DOCUMENTS = 16384, 16
DENSE = "one sequence"
SHAPES = ((16, 128), (32, 64))  # heads, head dim


@dataclasses.dataclass(frozen=True)
class Packed:
    heads: int
    head_dim: int
    causal: bool

    def __str__(self):
        return f"{DOCUMENTS} in s{TOKENS} h{self.heads} d{self.head_dim}{' causal' if self.causal else ''}"

    @property
    def offsets(self) -> np.ndarray:
        """Where documents start and end: shares drawn uniformly among all, so that a few are long."""
        shares = np.random.default_rng(0).dirichlet(np.ones(DOCUMENTS))
        return np.concatenate([[0], np.round(np.cumsum(shares) * TOKENS)]).astype(np.int32)

    def flops(self, offsets: np.ndarray) -> int:
        """Forward, of what is attended to."""
        lengths = np.diff(offsets).astype(np.int64)
        pairs = lengths * (lengths + 1) // 2 if self.causal else lengths**2
        return 4 * self.heads * self.head_dim * int(pairs.sum())

    def visited_flops(self, offsets: np.ndarray) -> tuple[int, int]:
        """Forward and backward, of the blocks that our kernels visit."""
        array = jax.ShapeDtypeStruct((1, TOKENS, self.heads, self.head_dim), jnp.bfloat16)
        operands = Operands(array, array, array, query_offsets=offsets[None], key_value_offsets=offsets[None])
        spec = AttentionSpec(
            1.0, right=0 if self.causal else None, max_query_length=TOKENS, max_key_value_length=TOKENS
        )
        chosen = forward_plan.configure(spec, operands)
        blocks = np.asarray(cuda.forward_metadata(spec, operands)["group_blocks"])[0, :, :2]
        groups = blocks.reshape(-1, chosen.tile.consumers, 2)
        seen = groups[..., 1] > groups[..., 0]
        first = np.where(seen, groups[..., 0], TOKENS).min(1)
        visits = np.maximum(groups[..., 1].max(1) - first, 0).sum()
        forward = 4 * chosen.tile.rows * chosen.tile.keys * int(visits) // chosen.pack_gqa
        shape = backward_tiles.tile(tensor_maps.padded_head_dim(self.head_dim))
        tiles = np.asarray(cuda.backward_metadata(spec, operands)["tile_blocks"])[0]
        visits = np.maximum(tiles[:, 1] - tiles[:, 0], 0).sum()
        backward = 10 * shape.queries * shape.keys * int(visits)
        return self.heads * self.head_dim * forward, self.heads * self.head_dim * backward

    def contenders(self) -> dict[str, tuple[Callable, np.ndarray]]:
        """Attention of query, key and value `(TOKENS, N, H)`, each with what it takes besides, as data."""
        longest = int(np.diff(self.offsets).max())
        ids = np.searchsorted(self.offsets, np.arange(TOKENS), side="right").astype(np.int32)

        def varlen(query, key, value, offsets):
            return jax_flash.flash_attention_varlen(
                query,
                key,
                value,
                cu_seqlens_q=offsets,
                cu_seqlens_kv=offsets,
                max_seqlen_q=TOKENS,
                max_seqlen_kv=TOKENS,
                is_causal=self.causal,
                implementation="cuda",
            )

        def dense(query, key, value, ids=None):
            x = (query[None], key[None], value[None])
            ids = None if ids is None else ids[None]
            return jax_flash.flash_attention(
                *x,
                is_causal=self.causal,
                query_segment_ids=ids,
                key_value_segment_ids=ids,
                implementation="cuda",
            )[0]

        def fa3_cu13(query, key, value, offsets):
            import dew_flash_attn

            return dew_flash_attn.flash_mha_varlen(query, key, value, offsets, longest, is_causal=self.causal)

        def fa3_cu12(query, key, value, offsets):
            import flash_attn3_jax

            if query.shape[-1] != 128:
                raise NotImplementedError(f"built for head dim 128, not {query.shape[-1]}")
            return flash_attn3_jax.flash_mha_varlen(
                query,
                key,
                value,
                offsets,
                max_seqlen_q=longest,
                max_seqlen_k=longest,
                is_causal=self.causal,
            )

        by_offsets = {f.__name__: (f, (self.offsets,)) for f in (varlen, fa3_cu13, fa3_cu12)}
        return by_offsets | {"by_segments": (dense, (ids,)), DENSE: (dense, ())}


def measure_packed(case: Packed) -> list[dict]:
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (TOKENS, case.heads, case.head_dim)
    *inputs, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    contenders = case.contenders()

    def prepare(name: str) -> tuple[Any, Any]:
        attend, data = contenders[name]
        data = tuple(map(jnp.asarray, data))
        gradients = jax.jit(both(attend))(*inputs, *data, d_out)
        results.append(gradients)
        # The one sequence, which comes last, has nobody to agree with.
        return (attend, (*inputs, *data)), results[0] if name == DENSE else gradients

    results: list[Any] = []
    found = rounds.measure(list(contenders), prepare, lambda run: figures(*run, d_out))
    rows = []
    for name, result in found.items():
        row = {"group": "packed", "case": str(case), "peer": name} | result
        if "forward_milliseconds" in row:
            offsets = np.array([0, TOKENS], np.int32) if name == DENSE else case.offsets
            flops = case.flops(offsets)
            visited = case.visited_flops(offsets)
            for key, factor, blocks in (("forward", 1, visited[0]), ("backward", 2.5, visited[1])):
                row[key] = factor * flops / row[f"{key}_milliseconds"] / 1e9
                if not name.startswith("fa3"):
                    row[f"{key}_visited"] = blocks / row[f"{key}_milliseconds"] / 1e9
        rows.append(row)
    return rows


BATCH, LENGTH = 4, 4096


def options(heads: int) -> dict[str, tuple[dict[str, Any], dict[str, jax.Array]]]:
    """Keyword arguments of a causal call: static ones, and arrays."""
    lengths = jnp.full((BATCH,), LENGTH, jnp.int32)
    ids = jnp.zeros((BATCH, LENGTH), jnp.int32)
    bias = jax.random.normal(jax.random.key(5), (1, heads, LENGTH, LENGTH), jnp.bfloat16)
    return {
        "none": ({}, {}),
        "lengths": ({}, {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}),
        "segments": ({}, {"query_segment_ids": ids, "key_value_segment_ids": ids}),
        "sinks": ({}, {"sinks": jnp.zeros((heads,), jnp.float32)}),
        "soft cap": ({"logits_soft_cap": 30.0}, {}),
        "ALiBi": ({}, {"alibi_slopes": jnp.full((heads,), 0.01, jnp.float32)}),
        "mask of keys": ({}, {"mask": jnp.ones((BATCH, 1, 1, LENGTH), bool)}),
        "bias of a head": ({}, {"bias": bias}),
        "dropout": ({"dropout_rate": 0.1}, {"dropout_key": jax.random.key(6)}),
    }


def measure_options(heads: int, head_dim: int, packages: Sequence[str] = ("jax_flash",)) -> list[dict]:
    """Times of every option; of several packages, each one's ratio to the last."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (BATCH, LENGTH, heads, head_dim)
    *inputs, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    calls = options(heads)

    def prepare(contender: tuple[str, str]) -> tuple[Any, Any]:
        package, option = contender
        static, arrays = calls[option]
        attention = importlib.import_module(package).flash_attention

        def attend(query, key, value, arrays):
            return attention(query, key, value, is_causal=True, implementation="cuda", **static, **arrays)

        jax.block_until_ready(jax.jit(both(attend))(*inputs, arrays, d_out))
        return (attend, (*inputs, arrays)), ()

    contenders = [(package, option) for option in calls for package in packages]
    found = rounds.measure(contenders, prepare, lambda run: figures(*run, d_out))
    case = f"b{BATCH} s{LENGTH} h{heads} d{head_dim} causal"
    rows = []
    for (package, option), result in found.items():
        row = {"group": "options", "case": case, "option": option} | result
        if len(packages) > 1:
            row["package"] = package
        for direction in ("forward", "backward"):
            time = f"{direction}_milliseconds"
            for name, other in (("longer", (package, "none")), ("times_before", (packages[-1], option))):
                if (package, option) != other and time in row and time in found[other]:
                    row[f"{direction}_{name}"] = row[time] / found[other][time]
        rows.append(row)
    return rows


def both(attend: Callable) -> Callable:
    """Gradients of `attend` for a cotangent, its last argument."""

    def run(query, key, value, *rest):
        *data, d_out = rest
        return jax.vjp(lambda *inputs: attend(*inputs, *data), query, key, value)[1](d_out)

    return run


def figures(attend: Callable, inputs: Sequence[jax.Array], d_out: jax.Array) -> dict[str, float]:
    forward = timing.milliseconds(attend, *inputs)
    together = timing.milliseconds(both(attend), *inputs, d_out)
    return {"forward_milliseconds": forward, "backward_milliseconds": together - forward}


GROUPS: dict[str, list[Callable[[], list[dict]]]] = {
    "packed": [
        functools.partial(measure_packed, Packed(*shape, causal))
        for shape in SHAPES
        for causal in (True, False)
    ],
    "options": [functools.partial(measure_options, *shape) for shape in SHAPES],
    "before": [functools.partial(measure_options, *shape, ("jax_flash", before.NAME)) for shape in SHAPES],
}
DEFAULT_GROUPS = ("packed", "options")


def show(row: dict) -> None:
    name = row.get("peer") or " ".join(filter(None, (row["option"], row.get("package"))))
    cells = "".join(
        f"  {key.replace('_', ' ')} {value:.3g}" for key, value in row.items() if isinstance(value, float)
    )
    print(f"{row['case']:32} {name:30}{cells}{row.get('error', '')[:160]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--groups", default=",".join(DEFAULT_GROUPS), help="by default %(default)s")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    groups = chosen.groups.split(",")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"--groups: {', '.join(sorted(unknown))}; may be {', '.join(GROUPS)}")
    warnings.filterwarnings("ignore")  # peers warn of their own affairs
    logging.disable(logging.WARNING)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    print(rounds.method(result["timing"]))
    for group in groups:
        for measure in GROUPS[group]:
            rows = measure()
            result["rows"] += rows
            for row in rows:
                show(row)
            if chosen.out:
                record.write(result, chosen.out)


if __name__ == "__main__":
    main()
