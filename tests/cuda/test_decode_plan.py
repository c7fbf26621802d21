"""Launch plans of attention on key-value caches: aliases, scratch memory, kernels, and the schedule."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_functions import with_function
from decode_schedule import Work, parts
from exhaustive import thinned
from seeds import seed_of

import jax_flash
from jax_flash._cache_spec import CacheOperands, CacheSpec
from jax_flash._device import CPU, H100, Device, assume
from jax_flash._spec import AttentionSpec
from jax_flash.cuda import decoding, launch_plan, plan_check
from jax_flash.cuda.compile import compile_kernel
from jax_flash.cuda.launch_plan import Alias, Kernel, Launch, LaunchPlan, Pointer, TensorMap
from jax_flash.cuda.sm90 import decode_division, decode_plan
from jax_flash.cuda.sm90.decode_tiles import choose_tile

pytestmark = pytest.mark.every_turn


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def call(
    H=128,
    V=None,
    B=4,
    T=1,
    S=1024,
    N=8,
    K=2,
    U=0,
    page=None,
    interleaved=False,
    layers=None,
    packed=False,
    rotary=0,
    soft_cap=None,
    alibi=False,
    left=None,
    right=0,
    dtype="bfloat16",
    cache_dtype=None,
    num_splits=None,
    query_positions="own",
    score_mod=False,
) -> tuple[CacheSpec, CacheOperands]:
    V = V or H
    rows = (B, S) if page is None else (B * S // page, page)
    rows = rows if layers is None else (layers, *rows)
    optional = {}
    if page is not None:
        optional["page_table"] = array(B, S // page, dtype="int32")
    if layers is not None:
        optional["layer"] = array(dtype="int32")
    if U:
        optional |= {"new_key": array(B, U, K, H, dtype=dtype), "new_value": array(B, U, K, V, dtype=dtype)}
    if rotary:
        tables = array(S, H // 2, dtype="float32")
        optional |= {"rotary_cos": tables, "rotary_sin": tables}
    if alibi:
        optional["alibi_slopes"] = array(1, N, dtype="float32")
    if packed:
        optional["query_offsets"] = array(B + 1, dtype="int32")
    operands = CacheOperands(
        array(1 if packed else B, T, N, H, dtype=dtype),
        array(*rows, K * (1 + interleaved), H, dtype=cache_dtype or dtype),
        None if interleaved else array(*rows, K, V, dtype=cache_dtype or dtype),
        array(B, dtype="int32"),
        **optional,
    )
    spec = CacheSpec(
        AttentionSpec(0.1, left, right, logits_soft_cap=soft_cap), rotary == 2, query_positions, num_splits
    )
    if score_mod:
        spec, operands = with_function(spec, operands)
    assert decoding.supports(spec, operands, H100) is None
    return spec, operands


def plan(device: Device = H100, **options) -> LaunchPlan:
    return decode_plan.plan_decode(*call(**options), device)


# One kernel, or several, of each way to load, head dim and option.
CALLS = (
    {},
    {"H": 64, "T": 4, "dtype": "float16"},
    {"H": 96, "U": 1, "rotary": 1},
    {"H": 192, "V": 128, "left": 100},
    {"H": 192, "B": 1, "K": 1, "S": 1 << 20},
    {"H": 256, "soft_cap": 30.0, "rotary": 2, "U": 4, "T": 4},
    {"H": 256, "soft_cap": 30.0, "alibi": True, "page": 3, "S": 1023, "rotary": 1, "U": 1},
    {"H": 64, "V": 256, "page": 1},
    {"H": 64, "page": 3, "S": 1023, "soft_cap": 30.0},
    {"H": 8, "V": 16, "page": 8, "interleaved": False},
    {"page": 16, "interleaved": True, "packed": True, "T": 100, "layers": 3},
    {"page": 64, "H": 256, "U": 1},
    {"page": 128, "num_splits": 1, "S": 4096},
    {"page": 256, "num_splits": 4, "S": 4096, "alibi": True},
    {"page": 17, "S": 1700, "H": 128, "dtype": "float16"},
    {"page": 192, "S": 1920, "H": 72, "V": 40, "U": 9, "rotary": 1},
    {"soft_cap": 30.0, "alibi": True, "H": 128},
    {"S": 64, "U": 1},
    {"B": 65536, "S": 1024, "K": 1, "N": 1, "H": 8},
    {"B": 2, "T": 4096, "S": 1 << 17, "H": 128, "N": 32, "K": 8},
    {"T": 8, "U": 8},
    {"T": 8, "score_mod": True, "soft_cap": 30.0, "alibi": True, "H": 64},
    {"cache_dtype": "float8_e4m3fn", "U": 1, "rotary": 1},
    {"cache_dtype": "float8_e4m3fn", "H": 64, "page": 16, "S": 640, "dtype": "float16", "U": 2, "K": 1},
    {"cache_dtype": "float8_e4m3fn", "H": 256, "soft_cap": 30.0, "alibi": True, "page": 3, "S": 1023, "T": 4},
    {"cache_dtype": "float8_e4m3fn", "H": 16, "V": 80, "num_splits": 1, "T": 100},
    {"score_mod": True, "U": 1, "rotary": 1},
    {"score_mod": True, "H": 64, "page": 16, "soft_cap": 30.0, "alibi": True, "dtype": "float16"},
    {"score_mod": True, "H": 256, "page": 3, "S": 1023, "T": 4},
    {"score_mod": True, "H": 64, "V": 256, "interleaved": False, "packed": True, "T": 100},
    {"score_mod": True, "cache_dtype": "float8_e4m3fn", "U": 1, "page": 16},
    {
        "score_mod": True,
        "cache_dtype": "float8_e4m3fn",
        "H": 256,
        "page": 3,
        "S": 1023,
        "T": 4,
        "alibi": True,
    },
)
IDS = ["-".join(f"{k}{v}" for k, v in options.items()) or "usual" for options in CALLS]


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_plan_can_run(options):
    made = plan(**options)
    plan_check.check(made)
    loaded = launch_plan.load(launch_plan.dump(made))
    assert loaded == made
    operands = call(**options)[1]
    assert tuple(b.name for b in made.operands) == tuple(operands.present())
    for launch in made.launches:
        assert launch.overlap_previous, "every kernel waits for those before it itself"


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_caches_are_updated_in_place(options):
    made, (_, operands) = plan(**options), call(**options)
    caches = [name for name in ("key", "value") if getattr(operands, name) is not None]
    appends = operands.new_key is not None
    assert made.aliases == tuple(Alias(name, f"{name}_after") for name in caches) * appends
    for launch in made.launches:
        for path, argument in launch.by_path.items():
            if isinstance(argument, Pointer | TensorMap) and argument.buffer.split("_")[0] in (
                "key",
                "value",
            ):
                assert argument.buffer.endswith("_after") == appends, path


def test_aliases_are_checked():
    made = plan(U=1)
    for changed in (
        (Alias("key", "out"),),
        (Alias("key", "absent"),),
        (Alias("out", "key_after"),),
        (Alias("key", "key_after"), Alias("key", "value_after")),
    ):
        with pytest.raises(ValueError, match="can't have the memory of operand"):
            plan_check.check(dataclasses.replace(made, aliases=changed))


def test_custom_call_has_the_aliases():
    spec, operands = call(U=1, page=16)
    with assume(H100):
        exported = jax.export.export(
            jax.jit(lambda operands: decoding.forward(spec, operands)),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jax_flash_decode")],
        )(operands)
    pairs = re.findall(
        r"output_tuple_indices = \[(\d)\], operand_index = (\d)", exported.mlir_module().split("decode(")[1]
    )
    assert pairs == [("2", "1"), ("3", "2")]


@pytest.mark.parametrize("dtype", ("bfloat16", "float8_e4m3fn"))
@pytest.mark.parametrize("layers", ((), (3,)), ids=("one layer", "layers"))
@pytest.mark.parametrize("is_paged", (False, True))
def test_the_program_is_the_custom_call_alone(is_paged, layers, dtype):
    """The kernels clip lengths and page tables as they read them. Of lengths and descales they read those of
    the layer that they use. No kernel ahead of them does."""
    lengths = array(*layers, 4, dtype="int32")
    descales = [array(*layers, 2, dtype="float32")] * 2 if dtype == "float8_e4m3fn" else []
    if is_paged:
        pages = [array(*layers, 40, 16, 2, 128, dtype=dtype)] * 2
        cache = jax_flash.PagedKVCache(*pages, array(4, 8, dtype="int32"), lengths, *descales)
    else:
        cache = jax_flash.KVCache(*[array(*layers, 4, 1024, 2, 128, dtype=dtype)] * 2, lengths, *descales)
    given = {"layer": array(dtype="int32")} if layers else {}
    attend = functools.partial(jax_flash.flash_attention_with_cache, implementation="cuda")
    with assume(H100):
        exported = jax.export.export(
            jax.jit(lambda *x, **given: attend(*x, **given)[0]),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jax_flash_decode")],
        )(array(4, 1, 8, 128), cache, **given)
    assert re.findall(r"stablehlo\.(\w+)", exported.mlir_module()) == ["custom_call"]


def test_lengths_of_all_layers_are_counted_element_by_element():
    """XLA makes one kernel of those of all layers; with indices it makes several of each."""
    cache = jax_flash.KVCache(*[array(3, 4, 1024, 2, 128)] * 2, array(3, 4, dtype="int32"))

    def step(query, new, cache):
        for layer in range(3):
            query, cache = jax_flash.flash_attention_with_cache(
                query, cache, new, new, layer=layer, implementation="cuda"
            )
        return cache.lengths

    with assume(H100):
        program = str(jax.make_jaxpr(step)(array(4, 1, 8, 128), array(4, 1, 2, 128), cache))
    assert "select_n" in program
    assert not re.findall(r"\b(?:dynamic_slice|dynamic_update_slice|gather|scatter)\[", program)


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_scratch_memory_is_bounded(options, monkeypatch):
    """Two partials a CTA, whatever the lengths are."""
    monkeypatch.setattr(decode_division, "CLUSTER_SIZES", ())
    monkeypatch.setattr(decode_division, "MOST_WHOLE_BLOCKS", 1)
    made = plan(**options)
    given = {"out", "lse", "key_after", "value_after"}
    scratch = {b.name: b for b in made.results if b.name not in given}
    assert sum(b.bytes for b in scratch.values()) <= 4 * H100.sm_count * (64 * (256 + 6) * 4 + 24)
    splits = options.get("num_splits") != 1 and options.get("S", 1024) > 128
    assert bool(scratch) == splits
    shared = options.get("page") is not None or options.get("batch_index", False)
    kernels = ["decode_append"] * ("U" in options and shared) + ["decode"]
    assert [launch.kernel.entry for launch in made.launches] == kernels


def test_few_blocks_take_few_ctas(monkeypatch):
    monkeypatch.setattr(decode_division, "CLUSTER_SIZES", ())
    assert plan(B=1, S=300, K=2).launches[0].grid == (5, 1, 1)  # of 2 · 5 blocks, two each
    assert plan(B=1, S=4200, K=1).launches[0].grid == (34, 1, 1)  # 33 for 66 blocks; pairs are whole
    assert plan(B=64, S=4096).launches[0].grid == (2 * H100.sm_count, 1, 1)


def test_short_tiles_are_whole():
    """So no CTA combines what several leave, where no clusters have the tiles."""

    def are_shared(**options) -> bool:
        made = plan(**{"B": 128, "K": 4, "H": 128, **options})
        assert [launch.kernel.entry for launch in made.launches] == ["decode"]
        shares = "arrivals" in {buffer.name for buffer in made.results}
        assert dict(made.launches[0].kernel.defines)["SPLIT"] == shares
        return shares

    assert not are_shared(S=512) and not are_shared(S=512, packed=True, page=64)
    assert are_shared(S=512, num_splits=4) and are_shared(S=513)
    assert not are_shared(S=256, H=256) and not are_shared(S=512, num_splits=1)
    assert are_shared(S=257, H=256)
    assert plan(S=512, B=1, K=4, H=128).launches[0].cluster > 1


@pytest.mark.parametrize("options", ({}, {"layers": 2}, {"T": 4, "U": 4}, {"cache_dtype": "float8_e4m3fn"}))
def test_few_keys_are_appended_without_a_kernel_ahead(options):
    def entries(**changes):
        return [launch.kernel.entry for launch in plan(**{"U": 1, **options, **changes}).launches]

    assert entries() == entries(U=0)
    assert entries(U=16, T=16) == entries(U=0, T=16)
    for more in ({"U": 17}, {"page": 16}, {"T": 17}):
        assert entries(**more)[0] == "decode_append"


# Tiles.


@pytest.mark.parametrize("page", (None, 1, 3, 8, 16, 24, 64, 100, 128, 192, 256))
def test_tiles_fit(page):
    for H in range(8, 257, 8):
        for V in {H, 64, 128, 256}:
            tile = choose_tile(call(H=H, V=V, page=page, S=page * 3 if page else 1000)[1])
            assert tile.stages >= 2 and tile.shared_bytes <= 227 << 10
            in_flight = tile.ctas_of_sm * tile.stages * tile.keys * (H + V) * 2
            assert in_flight >= min(64 << 10, 6 * tile.keys * (H + V) * 2)
            if page is None or (page % 8 == 0 and (page % 64 == 0 or 128 % page == 0)):
                assert tile.box
            assert not tile.box or tile.keys % tile.box == 0


# The schedule.


@dataclasses.dataclass(frozen=True)
class Workload:
    seed: int
    B: int
    longest: int
    queries: int
    key_heads: int
    group: int
    ctas: int
    max_parts: int | None = None
    left: int | None = None
    right: int | None = None
    team: int = 1

    @property
    def work(self) -> Work:
        random = np.random.default_rng(seed_of(self))
        lengths = random.integers(0, self.longest + 1, self.B)
        queries = random.integers(0, self.queries + 1, self.B)
        first = random.integers(0, 2, self.B) * random.integers(0, self.longest + 1, self.B) // 2
        numbers = ([int(x) for x in numbers] for numbers in (lengths, queries, first))
        return Work(*numbers, self.key_heads, self.group, 64, self.left, self.right)


WORKLOADS = [
    Workload(seed, *numbers)
    for seed, numbers in enumerate(
        (
            (1, 5000, 1, 1, 4, 132, None, None, None),
            (64, 2000, 1, 2, 8, 264, None, None, 0),
            (64, 2000, 30, 2, 8, 132, None, None, 0),
            (7, 900, 60, 3, 5, 7, None, 200, 0),
            (7, 900, 60, 3, 5, 7, 1, 200, 0),
            (5, 3000, 1, 1, 16, 20, 2, None, None),
            (5, 3000, 9, 2, 16, 20, 3, 1000, -5),
            (300, 64, 1, 1, 1, 132, None, None, None),
            (3, 0, 2, 1, 1, 5, None, None, 0),
            (64, 2000, 1, 8, 4, 264, None, None, 0, 8),
            (5, 3000, 9, 6, 16, 20, 3, 1000, -5, 2),
            (7, 900, 60, 3, 5, 9, None, 200, 0, 3),
            (1, 100, 1, 8, 1, 4, None, None, None, 4),
        )
    )
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: str(w.seed))
def test_each_block_is_one_ctas(workload):
    work, ctas = workload.work, workload.ctas
    visits, partials, of_tile = collections.Counter(), collections.Counter(), collections.defaultdict(list)
    load = collections.Counter()
    for cta, part in parts(work, ctas, workload.max_parts, team=workload.team):
        tile = (part.batch, part.head, part.tile)
        visits.update((*tile, block) for block in range(part.begin, part.end))
        load[cta] += part.end - part.begin
        of_tile[tile].append(part)
        if part.sharers > 1:
            partials[part.partial] += 1
    expected = collections.Counter()
    for batch in range(len(work.lengths)):
        for tile in range(work.tiles(batch)):
            rows = range(64 * tile, min(64 * (tile + 1), work.queries[batch] * work.group))
            seen = [work.visible(batch, row // work.group) for row in rows]
            blocks = {key // work.keys for begin, end in seen for key in range(begin, end)}
            for head in range(work.key_heads):
                expected.update((batch, head, tile, block) for block in range(max(len(blocks), 1)))
    assert visits == expected
    assert max(partials.values(), default=1) == 1 and max(partials, default=0) < 2 * ctas
    # A CTA has the first part of one shared tile at most: slot 1.
    shared = [of for of in of_tile.values() if len(of) > 1]
    assert len({of[0].partial // 2 for of in shared}) == len(shared)
    assert all([part.index for part in of] == list(range(of[0].sharers)) for of in of_tile.values())
    longest = max((part.counted_blocks for of in of_tile.values() for part in of), default=0)
    if workload.max_parts is None:
        assert max(load.values(), default=0) <= -(-sum(load.values()) // ctas)
    else:
        most = max((sum(part.begin < part.end for part in of) for of in of_tile.values()), default=0)
        assert most <= workload.max_parts
        assert max(load.values(), default=0) <= -(-sum(load.values()) // ctas) + longest


@pytest.mark.parametrize(
    "key_heads, ctas, size",
    [
        (8, 264, 8),
        (8, 132, 4),
        (8, 4, 4),
        (32, 264, 8),
        (12, 264, 6),
        (7, 264, 7),
        (5, 264, 5),
        (1, 264, 1),
        (17, 264, 1),
    ],
)
def test_teams(key_heads, ctas, size):
    """A team's CTAs have as many heads, and few CTAs are left over."""
    assert decode_division.team_size(key_heads, ctas) == size


@pytest.mark.parametrize(
    "B, blocks, teams, loads",
    [
        (32, 64, 33, [64] * 32),  # a tile each
        (64, 32, 33, [64] * 32),  # two
        (16, 128, 33, [64] * 32),  # half a tile
        (8, 256, 33, [64] * 32),  # a quarter
        (16, 131, 33, [64] * 32 + [48]),  # no half
        (8, 262, 33, [64] * 32 + [48]),  # no quarter
        (
            1,
            2048,
            33,
            [63] * 32 + [32],
        ),  # a 32nd of a tile would be 64, but only halves and quarters are tried
        (16, 512, 33, [249] * 32 + [224]),  # halves would be 256
        (3, 70, 7, [30] * 7),  # halves would be 35
        (33, 64, 33, [64] * 33),
    ],
)
def test_shares_have_whole_tiles_halves_or_quarters(B, blocks, teams, loads):
    """If tiles are alike, and shares become little larger."""
    work = Work([64 * blocks] * B, [1] * B, [0] * B, 8, 4, 64, right=0, packed=False)
    found, sharers = collections.Counter(), collections.Counter()
    for cta, part in parts(work, 8 * teams, None, team=8):
        found[cta] += part.end - part.begin
        sharers[part.batch, part.head] += 1
    assert sorted(found.values(), reverse=True) == sorted(8 * loads, reverse=True)
    if set(loads) == {64}:
        assert set(sharers.values()) == {max(blocks // 64, 1)}


# Which calls are refused.


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"query": array(4, 1, 8, 128, dtype="float32")}, "query's dtype is float32"),
        ({"key": array(4, 1024, 2, 128, dtype="float16")}, "key's dtype is float16; it must be query's"),
        ({"value": array(4, 1024, 2, 132)}, "value's head dim is 132"),
        ({"value": array(4, 1024, 2, 264)}, "value's head dim is 264"),
        ({"key": array(4, 0, 2, 128), "value": array(4, 0, 2, 128)}, "the call has an empty array"),
        ({"query": array(4, 1 << 28, 8, 128)}, "limited to"),
        ({"query": array(4, 1 << 20, 8, 128), "key": array(4, 1 << 20, 2, 128)}, "are too many"),
        (
            {
                "query": array(4, 1, 8, 8),
                "key": array(1 << 15, 1 << 16, 1, 2, 8),
                "value": array(1 << 15, 1 << 16, 1, 2, 8),
                "layer": array(dtype="int32"),
            },
            "times its layers, are limited to",
        ),
    ],
)
def test_refusals(change, reason):
    spec, operands = call()
    assert reason in decoding.supports(spec, operands.replace(**change), H100)


def test_other_devices_are_refused():
    assert "it needs a CUDA GPU" in decoding.supports(*call(), CPU)
    assert "it needs a Hopper GPU" in decoding.supports(*call(), Device("cuda", "A100", (8, 0), 108))


def test_describe():
    assert decoding.describe(*call(page=16), H100).endswith(
        "2 stages, 2 CTAs on a multiprocessor, pages of 16 keys loaded by TMA"
    )
    assert decoding.describe(*call(page=1), H100).endswith("loaded row by row")


# What the compiler says.


def launches() -> Iterator[Launch]:
    """Of all calls, by clusters that have a tile each where calls are so small, and without them."""
    for sizes in (decode_division.CLUSTER_SIZES, ()):
        with mock.patch.multiple(decode_division, CLUSTER_SIZES=sizes, MOST_WHOLE_BLOCKS=1):
            for options in CALLS:
                yield from plan(**options).launches


THREADS = {launch.kernel: launch.block for launch in launches()}


def of_source(kernel: Kernel) -> set:
    defines = dict(kernel.defines)
    if kernel.entry != "decode":
        return {(kernel.entry, *define) for define in defines.items()}
    return {
        (name, defines[name])
        for name in (
            "ELEMENT",
            "CACHE_ELEMENT",
            "KEYS",
            "CTAS_OF_SM",
            "PAGED",
            "SPLIT",
            "PAIRS",
            "QUERY_ROWS",
            "SOFT_CAP",
            "ALIBI",
            "ROTARY",
        )
    }


def bytes_spilled(defines: dict) -> int:
    """The most that a thread may spill. With 128 keys and all that changes logits, that is six registers."""
    has_all = all(defines.get(name) for name in ("SOFT_CAP", "ALIBI", "SCORE_MOD"))
    return 24 if has_all and defines["KEYS"] == 128 else 0


@pytest.mark.every_case
@pytest.mark.parametrize(
    "kernel", thinned(list(THREADS), of_source), ids=lambda k: "-".join(str(v) for _, v in k.defines)
)
def test_compiles_without_spills_or_warnings(kernel):
    pytest.importorskip("cuda.bindings.nvrtc")
    log = compile_kernel(kernel).log
    assert not re.search(r"warning|C75\d\d|serializ", log, re.IGNORECASE), log
    bytes_of_stack = [int(x) for x in re.findall(r"(\d+) bytes (?:stack|spill)", log)]
    assert len(bytes_of_stack) == 3 and max(bytes_of_stack) <= bytes_spilled(dict(kernel.defines)), log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    ctas = dict(kernel.defines).get("CTAS_OF_SM", 1)
    assert int(registers) * THREADS[kernel] * ctas <= 65536
