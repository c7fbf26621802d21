"""Every CUDA kernel as its compiler sees it, and every launch plan against the hardware, with no GPU.

A kernel that spills, or whose wgmma the compiler serialised, is right and slow: nothing but this shows it.
"""

import dataclasses
import functools
import itertools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from exhaustive import thinned

from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, captured_name
from jax_flash.cuda import plan_check, supports
from jax_flash.cuda.compile import compile_kernel, generated_headers, kernels_folder
from jax_flash.cuda.launch_plan import (
    Kernel,
    Launch,
    LaunchPlan,
)
from jax_flash.cuda.sm90 import backward_plan, backward_tiles, forward_plan
from jax_flash.cuda.sm90.backward_call import BackwardCall, Schedule
from jax_flash.cuda.sm90.backward_plan import plan_backward, plan_backward_metadata
from jax_flash.cuda.sm90.backward_units import Units
from jax_flash.cuda.sm90.forward_plan import plan_forward, plan_forward_metadata
from jax_flash.functions.static import static_mask_mod, static_score_mod

pytestmark = pytest.mark.every_turn

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'jax_flash[test]'")

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 80, 96, 128, 160, 192, 256)
OTHER_HEAD_DIMS = (16, 32, 48, 112, 144, 176, 208, 224, 240)  # with those above, all that are compiled for
# Of keys and of values, where these have their own.
HEAD_DIM_PAIRS = ((192, 128), (128, 64), (64, 128), (40, 24), (96, 128), (256, 64), (64, 256), (192, 16))
WINDOWS = ((None, None), (None, 0), (100, None), (100, 30))
# Operands of features that have several.
OF_FEATURES = {
    "dropout": ("dropout_rows", "dropout_columns"),
    "lengths": ("query_seq_lengths", "key_value_seq_lengths"),
    "segments": ("query_segment_ids", "key_value_segment_ids"),
    "varlen": ("query_offsets", "key_value_offsets"),
}

_TABLE, _SLOPES = jnp.zeros((8, 33)), jnp.zeros(8)
# Functions of users: one that looks a score up, one whose derivative is a factor beside gradients, and one
# of gradients that depend on the score.
SCORE_MODS = {
    "score_table": lambda score, b, h, q, k: score + _TABLE[h, jnp.clip(q - k, -16, 16) + 16],
    "score_cap": lambda score, b, h, q, k: 30 * jnp.tanh(score / 30) - _SLOPES[h] * abs(q - k),
    "score_learned": lambda score, b, h, q, k: _SLOPES[h] * jnp.tanh(score / _SLOPES[h]),
}


def _mask_mods():
    """A window with global keys, documents, and blocks without a function."""
    ids = jnp.zeros(1000, jnp.int32)
    return {
        "mask_window": lambda b, h, q, k: ((k <= q) & (q - k < 128)) | (k < 4),
        "mask_documents": lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q + h),
        "mask_blocks": None,
    }


MASK_MODS = _mask_mods()

# Compute capability 9.0, from the tables of the CUDA programming guide.
THREADS_PER_CTA = 1024
REGISTERS_PER_SM = 65536
REGISTERS_PER_THREAD = 255
SHARED_BYTES_PER_CTA = 232448  # 227 KB, of which 1 KB is the system's in what a multiprocessor has
NAMED_BARRIERS = 16


@functools.cache
def traced_score_mod(name):
    return static_score_mod(SCORE_MODS[name])


@functools.cache
def traced_mask_mod(name):
    return static_mask_mod(MASK_MODS[name])


def spec_and_operands(
    head_dim=128,
    dtype="bfloat16",
    window=(None, None),
    scale=0.1,
    return_residual=True,
    deterministic=False,
    features=(),
    B=2,
    T=1000,
    S=777,
    N=8,
    K=2,
    value_dim=None,
) -> tuple[AttentionSpec, Operands]:
    query = jax.ShapeDtypeStruct((B, T, N, head_dim), jnp.dtype(dtype))
    key = jax.ShapeDtypeStruct((B, S, K, head_dim), jnp.dtype(dtype))
    value = jax.ShapeDtypeStruct((B, S, K, value_dim or head_dim), jnp.dtype(dtype))
    left, right = window
    cap = 30.0 if "soft_cap" in features else None
    spec = AttentionSpec(
        scale,
        left,
        right,
        wide_results=next((x.removeprefix("wide_") for x in features if x.startswith("wide_")), None),
        logits_soft_cap=cap,
        dropout_rate=0.1 if "dropout" in features else 0.0,
        return_residual=return_residual,
        deterministic=deterministic,
        max_query_length=T if "varlen" in features else None,
        max_key_value_length=S if "varlen" in features else None,
    )
    for feature, names in OF_FEATURES.items():
        features = (*features, *names) if feature in features else features
    others = {
        "bias": jax.ShapeDtypeStruct((1 if "broadcast" in features else B, N, T, S), jnp.float32),
        "mask": jax.ShapeDtypeStruct((B, 1, T, S), jnp.bool_),
        "alibi_slopes": jax.ShapeDtypeStruct((1, N), jnp.float32),
        "sinks": jax.ShapeDtypeStruct((1, N), jnp.float32),
        "dropout_rows": jax.ShapeDtypeStruct((B, N, T), jnp.uint32),
        "dropout_columns": jax.ShapeDtypeStruct((B, S), jnp.uint32),
        "query_seq_lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
        "key_value_seq_lengths": jax.ShapeDtypeStruct((B,), jnp.int32),
        "query_segment_ids": jax.ShapeDtypeStruct((B, T), jnp.int32),
        "key_value_segment_ids": jax.ShapeDtypeStruct((B, S), jnp.int32),
        "query_offsets": jax.ShapeDtypeStruct((B, 17), jnp.int32),
        "key_value_offsets": jax.ShapeDtypeStruct((B, 17), jnp.int32),
    }
    operands = Operands(query, key, value, **{name: x for name, x in others.items() if name in features})
    for name in SCORE_MODS.keys() & set(features):
        score_mod, captured = traced_score_mod(name)
        spec = dataclasses.replace(spec, score_mod=score_mod)
        operands = operands.replace(
            batch_indices=jax.ShapeDtypeStruct((B,), jnp.int32),
            head_indices=jax.ShapeDtypeStruct((1, N), jnp.int32),
            **{
                captured_name("score_mod", i): jax.ShapeDtypeStruct((1, x.size), x.dtype)
                for i, x in enumerate(captured)
            },
        )
    for name in MASK_MODS.keys() & set(features):
        spec, operands = with_block_mask(name, spec, operands)
    assert supports(spec, operands, H100) is None
    return spec, operands


def with_block_mask(name, spec, operands) -> tuple[AttentionSpec, Operands]:
    (B, T, N, _), S = operands.query.shape, operands.key.shape[1]
    heads = N if name == "mask_documents" else 1
    arrays = {
        "batch_indices": jax.ShapeDtypeStruct((B,), jnp.int32),
        "head_indices": jax.ShapeDtypeStruct((1, N), jnp.int32),
        "block_kinds": jax.ShapeDtypeStruct((1, heads, -(-T // 128), -(-S // 128)), jnp.int8),
    }
    function = None
    if MASK_MODS[name] is not None:
        function, captured = traced_mask_mod(name)
        arrays |= {
            captured_name("mask_mod", i): jax.ShapeDtypeStruct((1, x.size), x.dtype)
            for i, x in enumerate(captured)
        }
    static = BlockMaskSpec((128, 128), function, False, heads > 1)
    return dataclasses.replace(spec, block_mask=static), operands.replace(**arrays)


def plans(**call) -> tuple[LaunchPlan, LaunchPlan]:
    """Forward and backward of one call on an H100."""
    return plan_forward(*spec_and_operands(**call), H100), plan_backward(*spec_and_operands(**call), H100)


def all_plans(**call) -> list[LaunchPlan]:
    """The same, and the plans that compute their mask metadata, if any."""
    metadata = (
        plan(*spec_and_operands(**call), H100) for plan in (plan_forward_metadata, plan_backward_metadata)
    )
    return [*plans(**call), *(plan for plan in metadata if plan is not None)]


def launches(schedule: Schedule | None = None, **call) -> list[Launch]:
    """Of all plans. The backward pass's follow a schedule, where one is given."""
    with mock.patch.object(backward_plan, "BackwardCall", functools.partial(BackwardCall, chosen=schedule)):
        return [launch for plan in all_plans(**call) for launch in plan.launches]


# Undivided tiles, and shared ones beside which another kernel writes dQ.
UNDIVIDED, SHARED = Schedule(Units(), True), Schedule(Units(parts=2), False)


def variants() -> dict[Kernel, Launch]:
    """Every kernel of the head dims that models have, and each code path at all other head dims."""
    calls = [
        dict(zip(("head_dim", "dtype", "window"), call, strict=True))
        for call in itertools.product(HEAD_DIMS, DTYPES, WINDOWS)
    ]
    for i, head_dim in enumerate(OTHER_HEAD_DIMS):
        for j, window in enumerate(WINDOWS):
            calls.append({"head_dim": head_dim, "dtype": DTYPES[(i + j) % 2], "window": window})
    for i, head_dim in enumerate(HEAD_DIMS):  # the sign of the scale is compiled in
        calls.append({"head_dim": head_dim, "scale": -0.1, "window": WINDOWS[i % 4]})
    calls.append({"scale": 0.0})
    calls += [{"head_dim": head_dim, "deterministic": True} for head_dim in (*HEAD_DIMS, *OTHER_HEAD_DIMS)]
    # Several sums of dQ where heads are few, and one where they are many.
    for i, head_dim in enumerate((*HEAD_DIMS, 32, 112)):
        fixed = {"head_dim": head_dim, "dtype": DTYPES[i % 2], "deterministic": True}
        calls += [fixed | {"B": 1, "T": 4096, "S": 4096, "N": heads, "K": heads} for heads in (1, 8, 128)]
    # Float32 results, as steps of a ring have, and devices that share keys.
    for i, head_dim in enumerate((*HEAD_DIMS, 80)):
        wide = {"head_dim": head_dim, "dtype": DTYPES[i % 2]}
        calls += [wide | {"features": ("wide_all",), "window": x} for x in ((None, None), (None, 0))]
        calls += [
            wide | {"features": ("wide_all", "bias", "dropout", "lengths"), "deterministic": i % 2 == 1}
        ]
        calls += [wide | {"features": ("wide_shared",), "window": (None, 0)}]
    # Score modifications and sinks, one by one and all at once.
    features = ("soft_cap", "bias", "mask", "alibi_slopes", "sinks")
    for head_dim in (64, 128, 192, 256):
        calls += [{"head_dim": head_dim, "features": (feature,)} for feature in features]
        calls += [{"head_dim": head_dim, "features": features, "window": (None, 0)}]
        for several in (features[1:], features, (*features, "broadcast")):
            calls += [{"head_dim": head_dim, "features": several, "window": (100, 0), "deterministic": True}]
        few = {"B": 1, "T": 4096, "S": 4096, "N": 1, "K": 1, "deterministic": True}
        calls += [{"head_dim": head_dim, "features": features} | few]
    calls += [{"head_dim": head_dim, "features": features} for head_dim in (16, 32, 80, 96, 160, 208)]
    calls += [{"features": features, "dtype": "float16", "K": 8}]
    for i, (head_dim, name) in enumerate(itertools.product((64, 128, 192, 256), SCORE_MODS)):
        function = {"head_dim": head_dim, "dtype": DTYPES[i % 2]}
        calls += [function | {"features": (name,), "window": window} for window in ((None, None), (None, 0))]
        calls += [function | {"features": (name, *features[1:], "dropout"), "window": (100, 0)}]
        calls += [function | {"features": (name, "lengths"), "deterministic": i % 2 == 1}]
        calls += [function | {"features": (name,), "deterministic": True}]
    for i, (head_dim, name) in enumerate(itertools.product((64, 96, 128, 192, 256), MASK_MODS)):
        masked = {"head_dim": head_dim, "dtype": DTYPES[i % 2]}
        calls.append(masked | {"features": (name,)})
        if head_dim in (96, 192):
            continue
        for others in (("soft_cap", "bias", "dropout"), ("lengths",)):
            calls.append(masked | {"features": (name, *others)})
        calls.append(masked | {"features": (name,), "window": (None, 0)})
        calls.append(masked | {"features": (name,), "deterministic": True})
    for i, (head_dim, value_dim) in enumerate(HEAD_DIM_PAIRS):
        pair = {"head_dim": head_dim, "value_dim": value_dim, "dtype": DTYPES[i % 2]}
        calls += [{**pair, "window": window} for window in ((None, None), (None, 0), (100, 30))]
        calls += [{**pair, "deterministic": True}]
        calls += [{**pair, "features": features[max(head_dim, value_dim) > 192 :]}]
    calls += [{"head_dim": head_dim, "features": ("dropout",)} for head_dim in (16, 48, *HEAD_DIMS)]
    calls += [{"head_dim": H, "value_dim": V, "features": ("dropout",)} for H, V in ((192, 128), (64, 128))]
    for i, head_dim in enumerate((64, 128, 192, 256)):
        dropout = {"head_dim": head_dim, "dtype": DTYPES[i % 2]}
        calls.append(dropout | {"features": ("dropout",), "window": (100 * (i % 2) or None, 0)})
        calls.append(dropout | {"features": ("dropout",), "deterministic": True})
        calls.append(dropout | {"features": ("dropout", *features)})
    # Mask metadata. Varlen sequences have the kernels of lengths.
    for i, head_dim in enumerate((64, 96, 128, 192, 256)):
        data = {"head_dim": head_dim, "dtype": DTYPES[i % 2]}
        for feature in ("lengths", "segments"):
            calls += [data | {"features": (feature,)}, data | {"features": (feature, "dropout")}]
            calls += [data | {"features": (feature,), "deterministic": True}]
            few = {"B": 1, "T": 16384, "S": 16384, "N": 1, "K": 1, "deterministic": True}
            calls += [data | few | {"features": (feature,)}]
        calls.append(data | {"features": ("varlen", "alibi_slopes", "soft_cap"), "window": (None, 0)})
    calls += [{"head_dim": 192, "value_dim": 128, "features": (x,)} for x in ("varlen", "segments")]
    calls += [{"head_dim": 128, "T": 16, "N": 16, "features": (x,)} for x in ("lengths", "segments")]
    found = {launch.kernel: launch for call in calls for launch in launches(UNDIVIDED, **call)}
    found |= {launch.kernel: launch for call in calls[::4] for launch in launches(SHARED, **call)}
    # Kernels of the forward pass at other lengths, and with PackGQA; a launch differs in nothing else.
    calls = [{"head_dim": head_dim, "dtype": dtype, "K": 8} for head_dim in HEAD_DIMS for dtype in DTYPES]
    calls += [{"head_dim": head_dim, "window": window} for head_dim in (64, 128) for window in WINDOWS]
    calls += [{"head_dim": head_dim, "value_dim": value_dim} for head_dim, value_dim in HEAD_DIM_PAIRS]
    calls += [{"head_dim": head_dim, "features": ("dropout",)} for head_dim in (64, 128)]
    for call in calls:
        launch = next(launch for launch in launches(**call) if launch.kernel.entry == "forward")
        for kernel in forward_plan.kernels(*spec_and_operands(**call), H100):
            shared = dict(kernel.defines)["SHARED_BYTES"]
            threads = 128 * (1 + dict(kernel.defines)["CONSUMERS"])
            found[kernel] = dataclasses.replace(launch, kernel=kernel, shared_bytes=shared, block=threads)
    return found


VARIANTS = variants()


def of_source(kernel: Kernel) -> set[tuple]:
    """What is compiled in, but for the numbers that a tile is made of: head dims and options decide these."""
    of_tiles = ("SHARED_BYTES", "KEYS", "QUERIES", "STAGES", "QUERY_STAGES", "SPLIT", "CONSUMERS", "CLUSTER")
    return {(kernel.entry, name, value) for name, value in kernel.defines if name not in of_tiles}


def kernel_id(kernel: Kernel) -> str:
    values = "-".join(str(value) for name, value in kernel.defines if name != "SHARED_BYTES")
    return f"{kernel.entry}-{values}"


@dataclasses.dataclass(frozen=True)
class Report:
    """ptxas's account of one entry point."""

    registers: int
    barriers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_bytes: int


def read_report(log: str, entry: str) -> Report:
    """Raises AssertionError where the log doesn't give each figure exactly once for `entry`."""

    def number(pattern, default=None):
        found = re.findall(pattern, log)
        if not found and default is not None:
            return default
        assert len(found) == 1, f"{pattern!r} is {len(found)} times in:\n{log}"
        return int(found[0])

    assert re.findall(r"Compiling entry function '(\w+)'", log) == [entry], log
    return Report(
        registers=number(r"Used (\d+) registers"),
        barriers=number(r"used (\d+) barriers"),
        static_shared_bytes=number(r"(\d+) bytes smem", default=0),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )


COMPILED = thinned(VARIANTS, of_source)


@pytest.mark.every_case
@pytest.mark.parametrize("kernel", [case for case in COMPILED if case.marks], ids=kernel_id)
def test_compiles_to_ptx(kernel):
    """Half of what the machine's code takes, so that continuous integration has time for all variants."""
    assert f".entry {kernel.entry}(" in compile_to_ptx(kernel)


@pytest.mark.parametrize("kernel", COMPILED, ids=kernel_id)
def test_compiles_without_spills_or_warnings(kernel):
    defines = dict(kernel.defines)
    log = compile_kernel(kernel).log
    score_mods = [defines.get(name, 0) not in (0, "void") for name in ("SOFT_CAP", "BIAS", "ALIBI", "MASK")]
    # C7510 and its kin (wgmma serialised), C7508 (setmaxnreg ignored), and whatever else may come.
    assert not re.search(r"warning|C75\d\d|serializ", log, re.IGNORECASE), log
    report = read_report(log, kernel.entry)
    # Beside the products, in warps of 32 registers that load, add to sums and write, a few are, once a tile.
    beside = kernel.entry == "backward" and (defines["DETERMINISTIC"] or not defines["SPLIT_PRODUCTS"])
    spilled = (288 if defines["DETERMINISTIC"] else 64) if beside else 0
    # Dropout hashes of the keys, and the tile's first key: reloaded long before they are needed. Forward,
    # what a tile's end needs. NVRTC 13.0 spills less than 13.5 here.
    spilled += (128 if beside else 16) * defines.get("DROPOUT", 0)
    # Segments of a thread's rows, or keys, and what these see, once a tile: the most forward at head dim 256,
    # and at 128 with dropout.
    ahead = 240 + 192 * defines.get("DROPOUT", 0)
    spilled += defines.get("SEGMENTS", 0) * (ahead if kernel.entry == "forward" else 96)
    spilled += (0, 64, 320, 320, 320)[sum(score_mods)]  # what operands are read by
    # Once a tile, at head dim 192: what a tile is known by, as the soft cap by itself has three forms.
    has_cap_alone = kernel.entry == "forward" and score_mods == [True, False, False, False]
    spilled += 64 * (has_cap_alone and defines["HEAD_DIM"] == 192)
    # A user's function takes what it takes: these little, and twice as much beside all other options.
    if defines.get("SCORE_MOD"):
        spilled += 256 if any(score_mods) else 128
    # What a mask function reads by, in partial blocks: nothing, if it looks nothing up.
    spilled += 320 * (defines.get("BLOCK_MASK", 0) > 0)
    assert report.spill_bytes <= spilled, log
    assert report.stack_bytes <= spilled, log
    launch = VARIANTS[kernel]
    assert report.registers <= REGISTERS_PER_THREAD, log
    assert _allocated(report.registers) * launch.block <= REGISTERS_PER_SM, log
    assert report.barriers <= NAMED_BARRIERS, log
    assert report.static_shared_bytes + launch.shared_bytes <= SHARED_BYTES_PER_CTA, log


@pytest.mark.parametrize("cluster", (1, 2))
@pytest.mark.parametrize("head_dim", (144, 160, 176, 192))
def test_either_number_of_ctas_may_share_a_tile(head_dim, cluster, monkeypatch):
    shape = dataclasses.replace(backward_tiles.tile(head_dim), cluster=cluster)
    monkeypatch.setattr(backward_tiles, "tile", lambda *_: shape)
    (kernel,) = (x.kernel for x in launches(head_dim=head_dim) if x.kernel.entry == "backward")
    log = compile_kernel(kernel).log
    assert not re.search(r"warning|C75\d\d|serializ", log, re.IGNORECASE), log
    assert read_report(log, "backward").spill_bytes == 0, log


def _allocated(registers: int) -> int:
    """Registers are given out to warps in units of 256, eight a thread."""
    return math.ceil(registers / 8) * 8


# One of each tile shape: the sides of a window and the dtype don't change it.
SPECIALISED = {
    launch.kernel: launch
    for head_dim, window, deterministic in itertools.product(HEAD_DIMS, WINDOWS[::3], (False, True))
    for launch in launches(UNDIVIDED, head_dim=head_dim, window=window, deterministic=deterministic)
    if launch.kernel.entry in ("forward", "backward")
}


@pytest.mark.parametrize("kernel", thinned(SPECIALISED, of_source), ids=kernel_id)
def test_register_pool_covers_what_warpgroups_ask_for(kernel):
    """A setmaxnreg.inc that asks for more than the pool has waits for ever."""
    ptx = compile_to_ptx(kernel)
    released = [int(n) for n in re.findall(r"setmaxnreg\.dec\.sync\.aligned\.u32\s+(\d+)", ptx)]
    taken = [int(n) for n in re.findall(r"setmaxnreg\.inc\.sync\.aligned\.u32\s+(\d+)", ptx)]
    threads = SPECIALISED[kernel].block
    at_launch = _allocated(read_report(compile_kernel(kernel).log, kernel.entry).registers)
    if not released and not taken:
        return
    assert 1 <= len(released) <= 2 and len(taken) == 1, "loading, perhaps dQ, and the consumers"
    (consumer,) = taken
    for count in (*released, consumer):
        assert count % 8 == 0 and 24 <= count <= 256
    assert max(released) <= at_launch <= consumer
    warpgroups = threads // 128
    assert threads % 128 == 0
    assert sum(released) + (warpgroups - len(released)) * consumer <= warpgroups * at_launch


@pytest.mark.parametrize("head_dim", (64, 256))
def test_tensor_maps_are_used_where_the_parameters_lie(head_dim):
    """TMA reads them there. A copy in local memory would be read late, or not at all."""
    for features in ((), ("bias", "mask", "alibi_slopes"), ("segments", "dropout")):
        for launch in launches(head_dim=head_dim, features=features):
            assert ".local" not in compile_to_ptx(launch.kernel), (launch.kernel.entry, features)


def compile_to_ptx(kernel: Kernel) -> str:
    from cuda.bindings import nvrtc

    folder = kernels_folder()
    path = folder / kernel.source
    options = [
        "--std=c++17",
        f"--gpu-architecture={kernel.arch.replace('sm_', 'compute_')}",
        f"--include-path={folder}",
        *(f"-D{name}={value}" for name, value in kernel.defines),
    ]
    generated = generated_headers(kernel)
    names, headers = ([x.encode() for x in column] for column in zip(*generated.items(), strict=True))
    source = path.read_bytes(), kernel.source.encode()
    _, program = nvrtc.nvrtcCreateProgram(*source, len(names), headers, names)
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [x.encode() for x in options])
        assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS
        _, size = nvrtc.nvrtcGetPTXSize(program)
        ptx = bytearray(size)
        nvrtc.nvrtcGetPTX(program, ptx)
        return ptx.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


# Launch plans.

CALLS = [
    *({"head_dim": head_dim} for head_dim in range(8, 257, 8)),
    *(
        {"head_dim": head_dim, "value_dim": value_dim}
        for head_dim, value_dim in itertools.product((8, 64, 80, 96, 128, 160, 192, 208, 256), repeat=2)
        if head_dim != value_dim
    ),
    *({"head_dim": head_dim, "value_dim": 128, "deterministic": True} for head_dim in (16, 80, 96, 192)),
    *({"head_dim": 64, "T": T, "S": S} for T, S in itertools.product((1, 127, 129, 4096), repeat=2)),
    *({"window": window, "head_dim": 256, "dtype": "float16"} for window in WINDOWS),
    {"B": 1, "T": 1, "S": 1, "N": 1, "K": 1, "head_dim": 8},
    {"B": 1, "T": 1 << 20, "S": 1 << 20, "N": 32, "K": 8},
    {"B": 1, "T": 1, "S": 1 << 24, "N": 64, "K": 1},
    {"B": 4096, "T": 128, "S": 128, "N": 64, "K": 64},
    {"return_residual": False},
    *(
        {"features": (feature, "alibi_slopes"), "window": (100, 0)}
        for feature in ("lengths", "segments", "varlen")
    ),
    {"B": 1, "T": 1, "S": 1, "features": ("segments",)},
    {"B": 1, "T": 1 << 20, "S": 1 << 20, "features": ("varlen", "dropout")},
    {"B": 65535, "T": 100, "S": 70, "features": ("lengths",)},
    *({"B": 1, "K": 1, "T": 333, "S": 259, "features": (name,)} for name in (*SCORE_MODS, *MASK_MODS)),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(f"{k}{v}" for k, v in call.items()))
def test_plan_is_within_hardware_limits(call):
    for plan in all_plans(**call):
        plan_check.check(plan)
        for launch in plan.launches:
            assert launch.kernel.arch == "sm_90a"
            assert launch.block % 32 == 0 and launch.cluster <= 8
            assert all(abs(x) < 3.4e38 for x in launch.arguments if isinstance(x, float))


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_scratch_memory_is_linear_in_the_sequence(head_dim):
    def scratch(T, S):
        """Bytes that are not results of the call."""
        forward, backward = plans(head_dim=head_dim, T=T, S=S)
        results = ("out", "lse", "d_query", "d_key", "d_value")
        return [sum(b.bytes for b in plan.results if b.name not in results) for plan in (forward, backward)]

    base, queries, keys, both = (
        scratch(T, S) for T, S in ((4096, 4096), (8192, 4096), (4096, 8192), (8192, 8192))
    )
    # Each axis adds what the other doesn't change: no term of their product.
    assert both[1] - keys[1] == queries[1] - base[1]
    assert both[1] <= 2 * base[1]
    # Partials of split tiles: two a CTA at most, whatever the lengths.
    rows_of_all_ctas = H100.sm_count * 192 * (head_dim + 8) * 4
    assert all(lengths[0] <= 2 * rows_of_all_ctas for lengths in (base, queries, keys, both))


def test_kernels_are_shared_between_calls():
    """Sizes, scale and residual don't compile anything beyond what was found for calls of a kind."""
    kind = spec_and_operands(N=8, K=1)
    kernels = {*forward_plan.kernels(*kind, H100), *backward_plan.kernels(*kind, H100)}
    for call in (
        {"B": 7, "T": 3, "S": 9000},
        {"T": 8192, "S": 8192},
        {"scale": 3.0},
        {"return_residual": False},
    ):
        assert {launch.kernel for launch in launches(**{"N": 8, "K": 1} | call)} <= kernels
    # One compilation serves lengths that are much alike.
    one, other = ({launch.kernel for launch in launches(T=T, S=T, N=2, K=2)} for T in (2040, 2048))
    assert one == other
