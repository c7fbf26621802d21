"""Launch plans of chunks of prompts on key-value caches: which calls get one, and what it has."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from cache_functions import with_function
from exhaustive import thinned

from jax_flash._cache_spec import CacheOperands, CacheSpec
from jax_flash._device import H100, Device, assume
from jax_flash._spec import AttentionSpec
from jax_flash.cuda import decoding, launch_plan, plan_check, sm90
from jax_flash.cuda.compile import compile_kernel
from jax_flash.cuda.launch_plan import Alias, Kernel, Launch, LaunchPlan, Pointer, TensorMap
from jax_flash.cuda.sm90 import prefill_plan

pytestmark = pytest.mark.every_turn


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def call(
    H=128,
    V=None,
    B=1,
    T=512,
    S=16384,
    N=32,
    K=8,
    U=None,
    layers=None,
    page=None,
    packed=None,
    rotary=0,
    soft_cap=None,
    left=None,
    right=0,
    dtype="bfloat16",
    operands=(),
    score_mod=False,
) -> tuple[CacheSpec, CacheOperands]:
    V, U = V or H, T if U is None else U
    rows = (B + 3, S) if page is None else (B * S // page + 3, page)
    optional = {} if page is None else {"page_table": array(B, S // page, dtype="int32")}
    if U:
        optional |= {"new_key": array(B, U, K, H, dtype=dtype), "new_value": array(B, U, K, V, dtype=dtype)}
    if rotary:
        optional |= dict.fromkeys(("rotary_cos", "rotary_sin"), array(S, H // 2, dtype="float32"))
    known = {
        "alibi_slopes": array(1, N, dtype="float32"),
        "sinks": array(1, N, dtype="float32"),
        "left_padding": array(packed or B, dtype="int32"),
        "batch_index": array(B, dtype="int32"),
    }
    if packed:  # so many sequences, in one batch row of T queries
        assert B == 1 and not U
        rows = (packed + 3, S) if page is None else (packed * S // page + 3, page)
        optional["query_offsets"] = array(packed + 1, dtype="int32")
        if page:
            optional["page_table"] = array(packed, S // page, dtype="int32")
    if layers is not None:
        rows, optional = (layers, *rows), optional | {"layer": array(dtype="int32")}
    made = CacheOperands(
        array(B, T, N, H, dtype=dtype),
        array(*rows, K, H, dtype=dtype),
        array(*rows, K, V, dtype=dtype),
        array(packed or B, dtype="int32"),
        **optional,
        **{name: known[name] for name in operands},
    )
    spec = CacheSpec(AttentionSpec(0.1, left, right, logits_soft_cap=soft_cap), rotary == 2)
    if score_mod:
        spec, made = from_positions(*with_function(spec, made))
    assert decoding.supports(spec, made, H100) is None
    return spec, made


def from_positions(spec: CacheSpec, operands: CacheOperands) -> tuple[CacheSpec, CacheOperands]:
    """The call as the forward kernel gets it, whose score_mod takes positions."""
    keys, specs = prefill_plan.keys_of_block(spec, operands), []

    def positioned(operands: CacheOperands) -> CacheOperands:
        of_positions, operands = decoding.from_positions(spec, operands, keys)
        specs.append(of_positions)
        return operands

    operands = jax.eval_shape(positioned, operands)
    return specs[0], operands


def plan(**options) -> LaunchPlan:
    return prefill_plan.plan_prefill(*call(**options), H100)


# Every head dim that models have, and every option.
CALLS = (
    {},
    {"B": 4, "T": 256, "S": 8192, "rotary": 1},
    {"T": 2048, "S": 32768, "rotary": 2, "layers": 32},
    {"H": 64, "left": 1000, "dtype": "float16", "N": 64, "operands": ("sinks",)},
    {"H": 64, "right": None, "U": 0},
    {"H": 72, "V": 40, "operands": ("left_padding", "batch_index")},
    {"H": 96, "operands": ("alibi_slopes",)},
    {"H": 128, "left": 4096, "operands": ("left_padding",)},
    {"H": 128, "N": 28, "K": 4, "soft_cap": 30.0},
    {"H": 128, "soft_cap": 30.0, "left": 100, "operands": ("alibi_slopes", "sinks", "left_padding")},
    {"H": 192, "V": 128},
    {"H": 192, "left": 100, "dtype": "float16"},
    {"H": 256, "soft_cap": 50.0, "left": 4096},
    {"H": 256, "rotary": 1, "dtype": "float16"},
    {"H": 64, "V": 256, "left": 10, "operands": ("alibi_slopes",)},
    {"T": 64, "S": 1000, "B": 40, "N": 8, "K": 1},
    {"T": 1 << 14, "S": 1 << 20, "left": 100},
    {"T": 100, "S": 1, "B": 4096, "N": 64, "K": 64, "H": 8},
    {"T": 256, "B": 8, "score_mod": True},
    {"H": 64, "left": 1000, "operands": ("sinks", "left_padding"), "score_mod": True},
    {"H": 256, "soft_cap": 50.0, "operands": ("alibi_slopes",), "dtype": "float16", "score_mod": True},
    {"page": 16},
    {"page": 64, "T": 2048, "S": 32768, "rotary": 1, "layers": 32},
    {"page": 256, "H": 64, "left": 1000, "operands": ("sinks",)},
    {"page": 8, "H": 96, "V": 80, "dtype": "float16", "U": 0},
    {
        "page": 16,
        "H": 128,
        "soft_cap": 30.0,
        "left": 100,
        "operands": ("alibi_slopes", "sinks", "left_padding"),
    },
    {"page": 128, "H": 192, "V": 128},
    {"page": 16, "H": 256, "right": None},
    {"page": 16, "T": 256, "B": 8, "score_mod": True},
    {"page": 16, "packed": 64, "T": 1024, "U": 0},
    {"page": 64, "packed": 9, "T": 2048, "U": 0, "H": 64, "left": 500, "layers": 32, "operands": ("sinks",)},
    {"page": 256, "packed": 1, "T": 2048, "U": 0, "N": 7, "K": 1, "H": 256, "soft_cap": 30.0, "S": 4096},
    {
        "packed": 300,
        "T": 8192,
        "U": 0,
        "S": 2048,
        "operands": ("alibi_slopes", "batch_index"),
        "dtype": "float16",
    },
)
IDS = ["-".join(f"{k}{v}" for k, v in options.items()) or "usual" for options in CALLS]


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_plan_can_run(options):
    made, (_, operands) = plan(**options), call(**options)
    plan_check.check(made)
    assert launch_plan.load(launch_plan.dump(made)) == made
    assert tuple(b.name for b in made.operands) == tuple(operands.present())
    entries = [launch.kernel.entry for launch in made.launches]
    appends = operands.new_key is not None
    is_packed = operands.query_offsets is not None
    of_short_sequences = ["decode"] * is_packed
    assert entries == ["decode_append"] * appends + ["prefill_preprocess", "forward", *of_short_sequences]
    assert made.steps == made.launches, "a kernel zeroes what has to be zero"
    for launch in made.launches:
        assert launch.overlap_previous, "every kernel waits for those before it itself"


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_caches_are_updated_in_place_and_never_copied(options):
    made, (_, operands) = plan(**options), call(**options)
    appends = operands.new_key is not None
    assert made.aliases == tuple(Alias(name, f"{name}_after") for name in ("key", "value")) * appends
    read = {
        argument.buffer
        for launch in made.launches
        for argument in launch.arguments
        if isinstance(argument, Pointer | TensorMap) and argument.buffer.split("_")[0] in ("key", "value")
    }
    caches = ("key_after", "value_after") if appends else ("key", "value")
    ends = () if operands.page_table is None else ("key_ends",)
    assert read == {"key_places", *ends, *caches}
    maps = forward_launch(made).by_path
    for name in ("key", "value"):
        *rows, S, K, H = getattr(operands, name).shape
        found = maps[f"maps.{name}"]
        rows = (math.prod(rows),) if operands.page_table is None else (rows[-1], math.prod(rows[:-1]))
        assert isinstance(found, TensorMap) and found.sizes == (H, K, S, *rows)
    query = maps["maps.query"]
    rotates = operands.rotary_cos is not None
    assert isinstance(query, TensorMap) and query.buffer == ("rotated_query" if rotates else "query")


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_scratch_memory_is_bounded(options):
    """Rotated queries, and a few numbers for each query and query head.

    Of packed queries, also what the decode kernel's CTAs leave for each other.
    """
    made, (_, operands) = plan(**options), call(**options)
    given = {"out", "lse", "key_after", "value_after", "rotated_query"}
    given |= {"partial_out", "partial_statistics", "arrivals"}  # see test_decode_plan.py
    scratch = sum(b.bytes for b in made.results if b.name not in given)
    B, T, N, _ = operands.query.shape
    sequences = operands.lengths.shape[0]
    places = sequences * (8 if operands.page_table is None else 12)
    if operands.query_offsets is not None:  # a sequence's last slot may not be full
        T += 64 * (sequences + 1)
        places += 4
    assert scratch <= B * (T * 4 + 16 * (T + 256) * min(N, 64)) + places + 4


# Which calls get one.


def main_kernel(spec: CacheSpec, operands: CacheOperands, device: Device = H100) -> str:
    entries = {launch.kernel.entry for launch in sm90.plan_decode(spec, operands, device).launches}
    return "forward" if "forward" in entries else "decode"


def forward_launch(made: LaunchPlan) -> Launch:
    (found,) = (launch for launch in made.launches if launch.kernel.entry == "forward")
    return found


@pytest.mark.parametrize("options", CALLS, ids=IDS)
def test_many_queries_run_in_the_forward_kernel(options):
    assert sm90.plan_decode(*call(**options), H100) == plan(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"T": 1},
        {"T": 8, "N": 64, "K": 1, "B": 64},  # a step that speculates
        {"T": 63, "B": 64},
        {"T": 512, "N": 8, "K": 1},  # tiles for a quarter of the multiprocessors
        {"T": 260, "N": 4, "K": 4, "B": 8},  # for fewer than two thirds, and many rows beyond the last query
        {"T": 64, "N": 32, "K": 32, "B": 64},  # tiles that are half full
        {"T": 1, "B": 8, "score_mod": True},
    ],
)
def test_few_queries_run_in_the_decode_kernel(options):
    assert main_kernel(*call(**options)) == "decode"


@pytest.mark.parametrize("page", (1, 4, 20, 36))
def test_pages_of_part_of_an_atom_run_in_the_decode_kernel(page):
    spec, operands = call(U=0)
    rows = array(1024, page, 8, 128)
    paged = operands.replace(key=rows, value=rows, page_table=array(1, 512, dtype="int32"))
    assert decoding.supports(spec, paged, H100) is None
    assert main_kernel(spec, paged) == "decode"


@pytest.mark.parametrize(
    "options",
    [
        {"packed": 256, "T": 256},  # a step of decoding
        {"packed": 256, "T": 511},
        {"packed": 4, "T": 256},  # tiles for half of the multiprocessors
        {"packed": 4, "T": 63, "N": 128},
        {"packed": 4, "T": 2048, "page": 4},
    ],
)
def test_few_packed_queries_run_in_the_decode_kernel(options):
    assert main_kernel(*call(U=0, **options)) == "decode"


def test_packed_queries_with_operands_of_each_sequence_run_in_the_decode_kernel():
    spec, operands = call(U=0, packed=4, T=2048)
    assert main_kernel(spec, operands) == "forward"
    assert main_kernel(spec, operands.replace(alibi_slopes=array(4, 32, dtype="float32"))) == "decode"
    assert main_kernel(*with_function(spec, operands)) == "decode"


def test_each_sequence_of_packed_queries_is_one_kernels():
    made = plan(packed=64, T=1024, U=0)
    limits = {
        launch.kernel.entry: (launch.by_path["shape.least_queries"], launch.by_path["shape.most_queries"])
        for launch in made.launches
        if launch.kernel.entry != "forward"  # which has the slots that its preprocess finds
    }
    anything = 2**31 - 1
    assert limits == {
        "prefill_preprocess": (64, anything),
        "decode": (0, 63),
    }


@pytest.mark.parametrize(("page", "H", "box"), [(16, 128, 16), (24, 128, 8), (64, 256, 64), (256, 192, 32)])
def test_boxes_are_on_one_page_and_in_one_block(page, H, box):
    maps = forward_launch(plan(page=page, H=H, U=0, S=48 * 256)).by_path
    for name in ("maps.key", "maps.value"):
        found = maps[name]
        assert isinstance(found, TensorMap) and found.box == (64, 1, box, 1, 1) and found.sizes[2] == page


def test_smaller_devices_need_fewer_tiles():
    options = call(T=512, N=8, K=1)
    small = dataclasses.replace(H100, sm_count=60)
    assert [main_kernel(*options, device) for device in (H100, small)] == ["decode", "forward"]


def test_describe():
    assert decoding.describe(*call(), H100) == (
        "sm_90 forward kernel on the cache for head dim 128: tiles of 128 rows (queries × 1 heads) × "
        "128 keys, 2 stages"
    )
    assert "forward kernel on the cache in pages of 16 for head dim 128" in decoding.describe(
        *call(page=16), H100
    )
    assert "decode kernel" in decoding.describe(*call(T=1), H100)


def test_custom_call_has_the_aliases():
    spec, operands = call(layers=2)
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


# What the compiler says.

LAUNCHES = {launch.kernel: launch for options in CALLS for launch in plan(**options).launches}


def of_source(kernel: Kernel) -> set:
    defines = dict(kernel.defines)
    names = (
        "ELEMENT",
        "HEAD_DIM",
        "VALUE_DIM",
        "ROTARY",
        "CACHE",
        "HIDDEN_VALUES",
        "BOX",
        "SOFT_CAP",
        "ALIBI",
        "SINKS",
        "SCORE_MOD",
    )
    return {(kernel.entry, name, defines.get(name)) for name in names}


def log_of(kernel: Kernel, **defines: int) -> str:
    """What ptxas says of the kernel, with some of its defines replaced."""
    changed = tuple((name, defines.get(name, value)) for name, value in kernel.defines)
    return compile_kernel(dataclasses.replace(kernel, defines=changed)).log


def spilled(log: str) -> int:
    return sum(map(int, re.findall(r"(\d+) bytes spill", log)))


@pytest.mark.every_case
@pytest.mark.parametrize(
    "kernel", thinned(LAUNCHES, of_source), ids=lambda k: "-".join(str(v) for _, v in k.defines)
)
def test_compiles_without_warnings_or_more_spills_than_without_a_cache(kernel):
    pytest.importorskip("cuda.bindings.nvrtc")
    log = log_of(kernel)
    assert not re.search(r"warning|C75\d\d|serializ", log, re.IGNORECASE), log
    if spilled(log):  # as score modifications do (test_cuda_kernels.py)
        defines = dict(kernel.defines)
        changed = defines["SOFT_CAP"] or defines["ALIBI"] or defines["SCORE_MOD"]
        assert kernel.entry == "forward" and changed, log
        # Where the cache's keys are takes a few registers more beside a user's function, and two beside a
        # soft cap with ALiBi. A slot takes two.
        both = defines["SOFT_CAP"] and defines["ALIBI"]
        more = 32 if defines["SCORE_MOD"] else 16 * both + 8 * defines["PACKED"]
        without = {"CACHE": 0, "HIDDEN_VALUES": 0, "PAGE": 0, "PACKED": 0}
        assert spilled(log) <= spilled(log_of(kernel, **without)) + more, log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) * LAUNCHES[kernel].block <= 65536
