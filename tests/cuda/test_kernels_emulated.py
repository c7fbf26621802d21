"""The Hopper kernels run on a CPU (tests/support/kernel_emulator.py) and compared with the definition.

This is about indices, masks, barriers and the order of things. Speed, and what the hardware makes of an
instruction, are for tests/gpu.
"""

import dataclasses

import agreement
import jax
import numpy as np
import pytest
import rounding
from exhaustive import thinned, thorough
from kernel_emulator import DTYPES, KernelEmulator
from seeds import seed_of

from jax_flash import _dropout, _reference, cuda
from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands, shapes_of
from jax_flash.cuda import dropout, fixed_point, score_mod
from jax_flash.cuda.launch_plan import TensorMap
from jax_flash.cuda.sm90 import backward_plan, backward_scheduler, backward_tiles, forward_plan
from jax_flash.cuda.sm90.backward_plan import plan_backward
from jax_flash.cuda.sm90.forward_plan import plan_forward


@dataclasses.dataclass(frozen=True)
class Case:
    H: int
    T: int
    S: int
    N: int = 1
    K: int = 1
    B: int = 1
    left: int | None = None
    right: int | None = None
    dtype: str = "bfloat16"
    return_residual: bool = False
    deterministic: bool = False
    soft_cap: float | None = None
    bias: str | None = None  # its axes, 1 in place of the letter of one that is broadcast
    bias_dtype: str = "float32"
    mask: str | None = None  # as bias
    alibi: str | None = None  # its axes: BN or 1N
    sinks: str | None = None
    lengths: str = ""  # "q", "k" or "qk": which there are
    segments: str | None = None  # "sorted", as packed sequences have them; or in no order
    packed: int | None = None  # so many sequences to a batch row
    V: int | None = None  # where values have a head dim of their own
    dropout: float = 0.0

    def __str__(self):
        return "-".join(
            f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default
        )


def traits(case: Case | tuple) -> set:
    """What `make test` has at least once of each test: every option, and every tile shape."""
    case = case[0] if isinstance(case, tuple) else case
    options = {field.name for field in dataclasses.fields(case) if getattr(case, field.name) != field.default}
    options -= {"H", "V", "T", "S", "B", "N", "K", "left", "right", "bias", "bias_dtype", "dtype"}
    width = next(width for width in (64, 96, 128, 192, 256) if max(case.H, case.V or 0) <= width)
    window = "causal" if (case.left, case.right) == (None, 0) else (case.left, case.right) != (None, None)
    bias = None if case.bias is None else "1" in case.bias
    return options | {("bias", bias), ("V", case.V is not None), ("window", window), case.dtype, width}


# So few multiprocessors that a persistent CTA has several tiles.
DEVICE = dataclasses.replace(H100, sm_count=2)

# Score modifications and sinks, one by one and together.
SCORES = (
    Case(H=64, T=130, S=200, right=0, N=4, K=2, soft_cap=2.0, return_residual=True),
    Case(H=128, T=70, S=300, N=2, bias="BNTS", B=2),
    Case(H=256, T=100, S=65, right=0, bias="1N1S", bias_dtype="bfloat16", B=2),
    Case(H=80, T=65, S=129, N=2, bias="B1T1", bias_dtype="float16", dtype="float16", left=50, right=9),
    Case(H=192, T=100, S=70, N=2, bias="11TS"),
    Case(H=96, T=3, S=90, N=2, bias="1N11", K=2),
    Case(H=128, T=300, S=130, N=2, mask="BNTS", B=2, return_residual=True),
    Case(H=64, T=70, S=140, N=4, K=1, mask="B11S", B=2, right=0),
    Case(H=32, T=140, S=140, mask="1NT1", dtype="float16"),
    Case(H=128, T=140, S=100, N=2, alibi="1N", right=0),
    Case(H=256, T=70, S=140, N=2, B=2, alibi="BN", return_residual=True),
    Case(H=16, T=64, S=300, N=4, K=2, B=2, sinks="BN", right=0),
    Case(H=128, T=130, S=64, N=2, sinks="1N", return_residual=True),
    Case(H=128, T=9, S=200, N=8, K=2, soft_cap=3.0, bias="BN1S", mask="B1TS", alibi="1N", sinks="1N", B=2),
    Case(
        H=192, T=150, S=200, N=4, K=2, right=0, soft_cap=3.0, bias="1NTS", mask="1N1S", alibi="BN", sinks="BN"
    ),
    Case(H=256, T=150, S=200, N=2, right=0, soft_cap=2.0, bias="BN1S", return_residual=True),
    Case(H=200, T=65, S=140, N=2, soft_cap=1.0, alibi="1N", dtype="float16"),
)
# Mask metadata: batch rows shorter than the arrays, or with nothing at all; segments; packed sequences.
MASK_METADATA = (
    Case(H=64, T=200, S=300, N=2, B=3, lengths="qk", return_residual=True),
    Case(H=128, T=300, S=200, N=4, K=2, B=3, lengths="qk", right=0),
    Case(H=128, T=130, S=300, B=3, lengths="k"),
    Case(H=80, T=300, S=70, N=2, B=3, lengths="q", right=0, dtype="float16"),
    Case(H=256, T=150, S=300, N=2, B=3, lengths="qk", left=60, right=20),
    Case(H=192, T=100, S=200, N=4, K=1, B=3, lengths="qk"),
    Case(H=128, T=10, S=300, N=8, K=2, B=4, lengths="k", right=0),  # whose heads share a tile
    Case(H=96, T=129, S=200, N=2, B=3, lengths="qk", alibi="BN", mask="B11S", right=0),
    Case(H=128, T=400, S=400, N=2, segments="sorted", right=0, B=2),
    Case(H=64, T=300, S=700, N=2, segments="sorted", return_residual=True),
    Case(H=64, T=500, S=200, N=4, K=2, segments="mixed", left=90, B=2),
    Case(H=256, T=200, S=260, segments="sorted", right=0, dtype="float16"),
    Case(H=192, T=300, S=200, N=2, segments="sorted", lengths="qk", B=2, soft_cap=3.0, sinks="BN"),
    Case(H=64, T=13, S=300, N=8, K=2, segments="mixed", B=2, right=0),  # heads share a tile here, too
    Case(H=128, T=500, S=600, N=4, K=2, packed=5, right=0, return_residual=True),
    Case(H=64, T=300, S=300, N=2, packed=9, B=2, left=70, right=-3),
    Case(H=256, T=200, S=300, N=2, packed=3),
    Case(H=96, T=200, S=100, N=2, packed=4, right=0, alibi="BN"),
    Case(H=128, T=9, S=400, N=8, K=1, packed=3, right=0),
    Case(H=192, V=128, T=200, S=300, N=2, packed=4, right=0),
)
# Values that have a head dim of their own.
VALUE_DIMS = (
    Case(H=192, V=128, T=130, S=200, right=0, N=2, return_residual=True),
    Case(H=192, V=128, T=100, S=150, N=4, K=2, left=70, right=20),
    Case(H=128, V=64, T=129, S=300, right=0, N=4, K=2),
    Case(H=64, V=128, T=200, S=130, N=4, K=1, right=3, dtype="float16"),
    Case(H=40, V=24, T=65, S=129, N=2, B=2, right=0),
    Case(H=96, V=128, T=65, S=70, N=2),
    Case(H=16, V=208, T=70, S=130, right=0),
    Case(H=256, V=64, T=130, S=100, N=2, right=0),
    Case(H=64, V=256, T=70, S=140, N=2, K=2, left=100),
    Case(H=192, V=16, T=70, S=70, return_residual=True),
    Case(H=24, V=80, T=65, S=65, N=2, bias="BNTS", mask="11TS", soft_cap=3.0, right=0),
    Case(H=192, V=128, T=65, S=129, N=2, alibi="1N", sinks="BN", right=0),
)
DROPOUT = (
    Case(H=128, T=300, S=500, N=4, K=2, B=2, right=0, dropout=0.2, return_residual=True),
    Case(H=64, T=200, S=333, N=2, B=2, dropout=0.5, dtype="float16"),  # keys are no multiple of four
    Case(H=80, T=65, S=129, B=2, left=30, right=10, dropout=0.1),
    Case(H=256, T=130, S=65, N=2, dropout=0.9, dtype="float16"),
    Case(H=192, T=70, S=200, N=4, K=2, B=2, dropout=0.3, right=0),
    Case(H=128, T=3, S=700, N=8, K=2, dropout=0.25),  # heads that share a tile
    Case(H=128, T=70, S=140, N=2, B=2, soft_cap=2.0, dropout=0.4, right=0),
    Case(H=64, T=70, S=90, N=2, B=2, bias="1N1S", alibi="1N", soft_cap=3.0, sinks="1N", dropout=0.3),
    Case(H=192, T=130, S=70, N=2, bias="BNTS", mask="1N1S", sinks="BN", dropout=0.15, return_residual=True),
    Case(H=64, T=200, S=300, N=2, B=3, lengths="qk", dropout=0.3, right=0, return_residual=True),
    Case(H=128, T=10, S=300, N=8, K=2, B=3, lengths="k", dropout=0.5),  # whose heads share a tile
    Case(H=128, T=200, S=260, N=2, segments="sorted", dropout=0.2, right=0),
    Case(H=128, T=300, S=400, N=4, K=2, packed=5, right=0, dropout=0.3),
    Case(H=256, T=150, S=200, N=2, packed=3, dropout=0.4, bias="1N1S", soft_cap=2.0),
    Case(H=192, V=128, T=130, S=200, N=2, right=0, dropout=0.3, return_residual=True),
    Case(H=40, V=80, T=70, S=129, N=2, B=2, lengths="qk", mask="B11S", sinks="1N", dropout=0.3),
)
# A case for each variant of the kernels, and between them for whatever runs through it.
BACKWARD = (
    *SCORES,
    *MASK_METADATA,
    *VALUE_DIMS,
    *DROPOUT,
    Case(H=64, T=200, S=130, right=0, N=2, return_residual=True),  # 70 queries see no key
    Case(H=40, T=1, S=1, dtype="float16"),
    Case(H=80, T=65, S=129, B=2, left=30, right=10),
    Case(H=96, T=129, S=64, dtype="float16"),
    Case(H=128, T=130, S=200, right=0, N=4, K=2, return_residual=True),  # 200 keys are not whole tiles
    Case(H=128, T=140, S=300, right=-150),  # the last keys are seen by no query
    Case(H=128, T=300, S=300, right=0, N=4, K=2),  # a CTA has several tiles, of unequal length,
    Case(H=96, T=129, S=300, N=2, K=2),  # or of one
    Case(H=64, T=60, S=900, left=70, N=2, K=2),  # most of which no query sees
    # Above 128 two CTAs may share a tile of 128 keys.
    Case(H=160, T=100, S=70, right=0),
    Case(H=192, T=70, S=130, left=20, right=0, N=3, return_residual=True),  # the last CTA has no keys
    Case(H=208, T=100, S=290, left=150, right=40, B=2),  # half of the last panel of dQ is not there
    Case(H=256, T=150, S=200, right=0, N=4, K=2),
    Case(H=256, T=130, S=65, N=2, dtype="float16", return_residual=True),
    Case(H=256, T=64, S=130, left=-3),
)
# Calls that add to dQ in a fixed order, and the multiprocessors of their device.
IN_ORDER = (
    (Case(H=128, T=300, S=300, right=0, N=4, K=2), 3),
    (Case(H=128, T=200, S=500, N=4, K=2), 3),  # more tiles of a head than blocks
    (Case(H=128, T=70, S=700), 5),
    (Case(H=64, T=600, S=500, N=3), 4),
    (Case(H=64, T=500, S=900, left=200, right=10, N=2), 4),
    (Case(H=96, T=129, S=300, left=70, N=2, K=2, B=2), 5),
    (Case(H=128, T=100, S=300, right=-150, N=2), 3),  # the last keys are seen by no query
    (Case(H=64, T=200, S=129, left=-3, right=1), 2),  # none is seen by any, and the last tile is of one key
    (Case(H=192, T=200, S=400, N=4, K=2), 6),
    (Case(H=192, T=200, S=450, left=90, right=30, N=2), 6),
    (Case(H=256, T=130, S=500, N=2, dtype="float16"), 8),
    (Case(H=256, T=300, S=300, right=0), 4),
    (Case(H=64, T=200, S=300, right=0, N=4, K=2, alibi="BN", mask="1NTS"), 5),
    (Case(H=192, T=150, S=200, N=2, bias="BNTS", soft_cap=3.0), 6),
    (Case(H=64, T=300, S=400, N=2, B=3, lengths="qk"), 4),
    (Case(H=128, T=300, S=300, N=2, B=3, lengths="qk", right=0), 4),
    (Case(H=256, T=200, S=300, B=3, lengths="qk", right=0), 6),
    (Case(H=128, T=500, S=500, N=2, segments="sorted", right=0), 4),
    (Case(H=64, T=300, S=400, N=3, segments="mixed"), 4),
    (Case(H=192, T=300, S=400, N=3, segments="sorted"), 6),
    (Case(H=128, T=700, S=900, N=2, packed=7, right=0), 4),
    (Case(H=192, V=128, T=200, S=300, right=0, N=2), 6),
    (Case(H=80, V=128, T=200, S=300, N=2, K=2), 3),
    (Case(H=64, T=200, S=300, N=4, K=2, B=2, bias="1NTS", right=0, return_residual=True), 5),
    (Case(H=128, T=130, S=300, N=2, bias="1N1S", alibi="1N"), 4),
    (Case(H=192, T=150, S=200, N=2, B=2, bias="B1T1", soft_cap=3.0, dtype="float16"), 6),
    (Case(H=256, T=100, S=300, N=2, B=2, bias="1111", left=90, right=9), 6),
    (Case(H=256, T=150, S=200, N=2, bias="1N1S", soft_cap=2.0, right=0), 6),
    (Case(H=128, T=200, S=500, N=4, K=2, dropout=0.3), 3),
    (Case(H=256, T=130, S=300, N=2, dropout=0.3, alibi="1N"), 4),
    (Case(H=64, V=128, T=200, S=300, N=2, B=2, lengths="qk", bias="1NTS", dropout=0.3), 4),
    (Case(H=192, T=150, S=200, N=2, packed=3, bias="11T1", dropout=0.9, right=0, return_residual=True), 6),
    # The last of two sections goes the other way.
    (Case(H=256, T=300, S=300, right=0, N=2), 4),
    (Case(H=64, T=500, S=300, right=0, N=6, K=3), 3),  # queries that see no key
    (Case(H=128, T=300, S=700, right=0, N=3), 4),
)
FORWARD = (
    *SCORES,
    *MASK_METADATA,
    *VALUE_DIMS,
    *DROPOUT,
    Case(H=64, T=300, S=130, N=2),
    Case(H=64, T=200, S=300, right=0, dtype="float16"),
    Case(H=80, T=65, S=129, B=2, left=30, right=10),
    Case(H=128, T=130, S=300, right=0, N=4, K=2, B=2),
    Case(H=256, T=200, S=130, right=0),  # 70 queries see no key
    Case(H=128, T=500, S=130, right=0, N=2, B=2),  # whole tiles of queries see no key
    Case(H=64, T=400, S=100, left=50, right=-60, N=4, K=1),
    Case(H=128, T=130, S=257),  # its blocks have 144 keys
    # Query heads of one key head share a tile.
    Case(H=128, T=10, S=200, right=0, N=8, B=2),
    Case(H=64, T=65, S=300, left=90, right=3, N=16, K=2, return_residual=True),
    Case(H=64, T=3, S=30, N=64),
)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return KernelEmulator(tmp_path_factory.mktemp("emulator"))


def check_forward(case, device, emulator):
    spec, operands, _, _, seed = draw(case)
    plan = plan_forward(spec, shapes_of(operands), device)
    arrays = arrays_of(
        operands, forward_plan.plan_forward_metadata(spec, shapes_of(operands), device), emulator, seed
    )
    results = emulator.run(plan, dropout.arranged(plan, arrays), seed)
    d_out = np.zeros(results["out"].shape)
    out, lse, gradients = _reference.reference_with_gradients(spec, operands, d_out)
    references = {"out": out, "lse": lse, **agreement.by_name(gradients)}
    got = {name: results[name] for name in ("out", "lse")}
    check_results(case, got, *expected(case, spec, operands, d_out, None, references, got["out"]))
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", thinned(FORWARD, traits), ids=str)
def test_forward(case, emulator):
    check_forward(case, DEVICE, emulator)


@pytest.mark.parametrize(
    "case,ctas,sharers",
    thinned(
        [
            (Case(H=128, T=300, S=700, N=3, B=2), 4, 4),  # two tiles of 18, of 6 blocks each
            (Case(H=128, T=300, S=700, N=3, B=2), 4, 3),  # shares of both tiles, and a CTA with none
            (Case(H=64, T=200, S=900, N=5, K=1, return_residual=True), 3, 2),
            (Case(H=96, T=65, S=500, N=3), 2, 2),
            (Case(H=160, T=100, S=480, N=4, K=4, dtype="float16"), 3, 3),
            (Case(H=192, V=128, T=100, S=700, N=3), 2, 2),
            (Case(H=128, T=3, S=1500, N=8), 5, 5),  # fewer tiles than CTAs
            (Case(H=64, T=200, S=900, N=5, K=1, dropout=0.3), 3, 2),
        ],
        traits,
    ),
    ids=str,
)
def test_partials_of_split_tiles(case, ctas, sharers, emulator, monkeypatch):
    monkeypatch.setattr(
        forward_plan, "split_last_wave", lambda tiles, ctas, blocks: (tiles - tiles % ctas, sharers)
    )
    check_forward(case, dataclasses.replace(H100, sm_count=ctas), emulator)


@pytest.mark.parametrize("case", thinned(BACKWARD, traits), ids=str)
def test_backward(case, emulator):
    check_backward(case, emulator)


@pytest.mark.parametrize("cluster", (1, 2))
@pytest.mark.parametrize(
    "case",
    thinned(
        [
            Case(H=144, T=65, S=300, left=-3, N=2),
            Case(H=160, T=130, S=70, return_residual=True),
            Case(H=192, T=300, S=200, right=0, N=2),
            Case(H=192, T=200, S=300, N=2, K=2, deterministic=True),
        ],
        traits,
    ),
    ids=str,
)
def test_ctas_that_share_a_tile(case, cluster, emulator, monkeypatch):
    shape = dataclasses.replace(backward_tiles.tile(case.H), cluster=cluster)
    monkeypatch.setattr(backward_tiles, "tile", lambda *_: shape)
    check_backward(case, emulator, multiprocessors=6)


@pytest.mark.parametrize(
    "case,multiprocessors,slots",
    thinned(
        [
            (Case(H=128, T=300, S=300, N=5, K=5, B=2, right=0), 2, 2),
            (Case(H=128, T=200, S=500, N=6, K=3), 3, 2),  # several tiles of a head to a CTA
            (Case(H=64, T=700, S=300, N=4, K=4, left=200, right=10), 1, 1),  # blocks that no key tile sees
            (Case(H=128, T=700, S=200, N=8, K=8, right=0), 3, 2),
        ],
        traits,
    ),
    ids=str,
)
def test_heads_whose_dq_gets_the_slot_of_an_earlier_head(case, multiprocessors, slots, emulator, monkeypatch):
    monkeypatch.setattr(backward_scheduler, "l2_head_group", lambda *_: 1)
    monkeypatch.setattr(backward_scheduler, "dq_accum_slots", lambda *_: slots)
    check_backward(case, emulator, multiprocessors)


@pytest.mark.parametrize(
    "case",
    thinned(
        [
            Case(H=128, T=200, S=700, N=4, K=2, B=2, right=0, return_residual=True),
            Case(H=128, T=60, S=900, N=4, K=2, left=70),  # tiles that no query sees come between others
            Case(H=128, T=60, S=900, N=2, left=70, deterministic=True),
            Case(H=64, T=700, S=500, N=2, right=-300),
            Case(H=96, T=1, S=400, N=3),  # tiles of one block
            Case(H=128, V=64, T=129, S=500, B=3, lengths="qk", right=0),
            Case(H=64, V=128, T=300, S=500, B=2, packed=12),
            Case(H=128, T=200, S=700, N=4, K=2, packed=9, dropout=0.3, right=0),
            Case(H=128, T=300, S=500, N=2, segments="mixed", deterministic=True),
        ],
        traits,
    ),
    ids=str,
)
def test_all_tiles_on_one_multiprocessor(case, emulator):
    """K of a tile comes, and gradients of the one before it leave, beside others' products."""
    check_backward(case, emulator, multiprocessors=1, runs=2)


@pytest.mark.parametrize(
    "case",
    (
        Case(H=64, T=70, S=140, lengths="k"),
        *thorough(
            Case(H=64, T=200, S=300, N=2, B=2, right=0, lengths="qk", dropout=0.3),
            Case(H=192, T=130, S=300, N=2, right=0),
            Case(H=256, T=130, S=130, bias="1N1S", soft_cap=2.0),
            Case(H=64, T=100, S=300, deterministic=True),
        ),
    ),
    ids=str,
)
def test_every_lane_may_arrive(case, tmp_path):
    """As the sanitizer has it: each barrier counts as many arrivals as there are."""
    emulator = KernelEmulator(tmp_path, EVERY_LANE_ARRIVES=1)
    check_forward(dataclasses.replace(case, deterministic=False), DEVICE, emulator)
    check_backward(case, emulator)


@pytest.mark.parametrize("case,multiprocessors", thinned(IN_ORDER, traits), ids=str)
def test_deterministic_backward(case, multiprocessors, emulator):
    case = dataclasses.replace(case, deterministic=True)
    first, *others = check_backward(case, emulator, multiprocessors, runs=3)
    for other in others:
        for name in first.keys() & {"dq_accum", "d_query", "d_key", "d_value", "d_bias", "d_slopes"}:
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)


@pytest.mark.parametrize("bias", ("1N1S", "11T1"))
@pytest.mark.parametrize("magnitude", (2.0**100, *thorough(2.0**-100, 2.0**-9)))
def test_deterministic_gradients_of_a_bias_of_any_magnitude(magnitude, bias, emulator):
    case = Case(H=64, T=130, S=200, N=2, B=2, bias=bias, deterministic=True)
    check_backward(case, emulator, magnitude=magnitude)


def check_backward(case, emulator, multiprocessors=2, runs=1, magnitude=1.0, resident=()):
    """Compares with the definition; returns the results of each run.

    The plan is for a device of so many `multiprocessors`. `resident` says how many CTAs run together, in one
    run after the other: by default in each of `runs` as many as there are multiprocessors.
    """
    device = dataclasses.replace(H100, sm_count=multiprocessors)
    spec, operands, d_out, d_lse, seed = draw(case)
    d_out = (magnitude * d_out.astype(np.float32)).astype(d_out.dtype)
    out, lse, gradients = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    bounds = backward_plan.plan_backward_metadata(spec, shapes_of(operands), device)
    arrays = arrays_of(operands, bounds, emulator, seed)
    arrays |= dict(out=out, lse=lse, d_out=d_out, d_lse=d_lse)
    bias_factor = None
    if fixed_point.adds_bias_up(spec, shapes_of(operands)):
        arrays["bias_factor"] = bias_factor = fixed_point.factor(spec, operands, lse, d_out, d_lse)
    plan = plan_backward(spec, shapes_of(operands), device)
    resident = resident or (multiprocessors,) * runs
    of_runs = [emulator.run(plan, arrays, seed + i, count) for i, count in enumerate(resident)]
    references = {"out": out, "lse": lse, **agreement.by_name(gradients)}
    rounded_out = out.astype(DTYPES[case.dtype])
    references, deviations = expected(case, spec, operands, d_out, d_lse, references, rounded_out)
    for results in of_runs:
        gradients = {name: results[name] for name in ("d_query", "d_key", "d_value")}
        of_scores = score_mod.gradients(spec, operands, results, bias_factor)
        gradients |= {f"d_{name}": x for name, x in of_scores.items()}
        check_results(case, gradients, references, deviations)
    return of_runs


def expected(case, spec, operands, d_out, d_lse, references, out):
    """What kernels are to give where the output is `out`, and how far rounding takes it: two dicts by name.

    The latter has the standard deviation of each number.
    """
    heads_last = {name: x.transpose(0, 2, 1) if name == "lse" else x for name, x in references.items()}
    d_lse = None if d_lse is None else d_lse.transpose(0, 2, 1)
    terms = rounding.terms_of(case.dtype, spec, operands, heads_last, d_out, d_lse)
    deviations = rounding.deviations(terms, heads_last)
    deviations["lse"] = deviations["lse"].transpose(0, 2, 1)
    return rounding.with_delta_of(out, terms, references), deviations


def check_results(case, got, references, deviations):
    """Compares results by name, `d_query` say, with the definition's: each as a whole, and each row."""
    few_keys = case.S == 1 or "k" in case.lengths or case.segments or case.packed
    for name, x in got.items():
        x, reference = np.asarray(x), references[name]
        assert x.shape == reference.shape, name
        complaint = agreement.complaint_of_values(name, x, reference)
        assert complaint is None, complaint
        result = agreement.Result(
            name, agreement.finite(x), agreement.finite(reference), deviations[name], reference.size
        )
        # With a few keys dS is a difference of equals, and what is left of it is noise.
        is_noisy = (few_keys and name in ("d_query", "d_key")) or name in agreement.SUMS_OVER_ROWS
        noise = (4 if is_noisy else 0) * np.linalg.norm(result.deviation)
        assert result.error <= max(roundoff(case) * np.linalg.norm(result.reference), noise), name
        complaint = result.complaint_of_rows()
        assert complaint is None, complaint


@pytest.mark.parametrize(
    "case",
    [
        Case(H=20, V=12, T=70, S=130, N=4, K=2, right=0),
        Case(H=100, T=65, S=129, N=2, bias="BN1S", sinks="1N", dtype="float16"),
        Case(H=64, V=7, T=129, S=65, return_residual=True),
        Case(H=12, V=33, T=65, S=70),
    ],
    ids=str,
)
def test_head_dims_that_are_no_multiples_of_8(case, emulator, monkeypatch):
    """Padded around the custom calls, so these are what runs in the emulator."""
    spec, operands, d_out, d_lse, seed = draw(case)

    def call(target, plan, *arrays):
        assert all(map_.strides[0] % 16 == 0 for map_ in _tensor_maps(plan))
        named = {b.name: np.asarray(x) for b, x in zip(plan.operands, arrays, strict=True)}
        results = emulator.run(plan, named, seed, DEVICE.sm_count)
        return tuple(jax.numpy.asarray(results[b.name]) for b in plan.results)

    monkeypatch.setattr(cuda, "current", lambda: DEVICE)
    monkeypatch.setattr(cuda.call, "call", call)
    right_out, right_lse, right = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    out, lse = cuda.forward(spec, operands)
    gradients = cuda.backward(spec, operands, out, lse, jax.numpy.asarray(d_out), d_lse)
    got = {"out": out, "lse": lse, **agreement.by_name(gradients)}
    references = {"out": right_out, "lse": right_lse, **agreement.by_name(right)}
    check_results(case, got, *expected(case, spec, operands, d_out, d_lse, references, np.asarray(out)))


def _tensor_maps(plan):
    return [p for launch in plan.launches for p in launch.arguments if isinstance(p, TensorMap)]


@pytest.mark.parametrize("magnitude", (1e4, *thorough(1e3, 1e5, 1e15)))
@pytest.mark.parametrize("head_dim", (64, 256))
def test_huge_logits_give_no_nan(magnitude, head_dim, emulator):
    """Logits whose own rounding is far more than 1: there is no number to compare with."""
    case = Case(H=head_dim, T=130, S=130, right=0)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    for name in ("query", "key"):
        arrays[name] = (arrays[name].astype(np.float32) * magnitude).astype(arrays[name].dtype)
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    arrays |= dict(out=results["out"], lse=results["lse"], d_out=d_out)
    plan = plan_backward(spec, shapes_of(operands), DEVICE)
    results |= emulator.run(plan, arrays, seed, resident=DEVICE.sm_count)
    for name in ("out", "d_query", "d_key", "d_value"):
        assert np.isfinite(results[name].astype(np.float64)).all(), name
    huge = operands.replace(query=arrays["query"], key=arrays["key"])
    _, lse, _ = _reference.reference_with_gradients(spec, huge, d_out)
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5)


@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("name", ("query", "key"))
def test_log_sum_exp_is_nan_where_a_logit_is_not_finite(name, value, emulator):
    """But for -inf, which hides a key."""
    case = Case(H=64, T=130, S=130, right=0)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    arrays[name][:, 70, :, 3] = value
    lse = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)["lse"]
    _, expected, _ = _reference.reference_with_gradients(spec, operands.replace(**arrays), d_out)
    assert np.isnan(expected).sum() >= (1 if name == "query" else 20)
    np.testing.assert_allclose(lse, expected, rtol=1e-4)


@pytest.mark.parametrize("low", (-1e38, float(np.finfo(np.float32).min)))
def test_rows_whose_bias_is_very_low_have_a_mean(low, emulator):
    """The lowest number, which users add to hide keys, hides none where all keys have it."""
    case = Case(H=128, T=70, S=300, N=2, bias="BNTS", B=2)
    spec, operands, d_out, _, seed = draw(case)
    arrays = {name: np.array(x) for name, x in operands.present().items()}
    arrays["bias"][:, 0, 20:] = low
    arrays["bias"][:, 0, 30, 100:] = 0
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    lowered = operands.replace(bias=arrays["bias"])
    out, lse, _ = _reference.reference_with_gradients(spec, lowered, d_out)
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5)
    np.testing.assert_allclose(results["out"].astype(np.float64), out, rtol=0.02, atol=0.02)
    arrays |= dict(out=results["out"], lse=results["lse"], d_out=d_out)
    results = emulator.run(plan_backward(spec, shapes_of(lowered), DEVICE), arrays, seed, DEVICE.sm_count)
    for name in ("d_query", "d_key", "d_value", "d_bias"):
        assert np.isfinite(results[name].astype(np.float64)).all(), name


@pytest.mark.parametrize("magnitude", (1e3, *thorough(1e4)))
def test_huge_logits_overflow_no_float16(magnitude, emulator):
    """Probabilities are relative to a maximum that lags: by no more than 2^8, however logits are rounded."""
    case = Case(H=256, T=130, S=500, dtype="float16")
    spec, operands, _, _, seed = draw(case)
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    for name in ("query", "key"):
        arrays[name] = (arrays[name].astype(np.float32) * magnitude).astype(np.float16)
    results = emulator.run(plan_forward(spec, shapes_of(operands), DEVICE), arrays, seed)
    assert np.isfinite(results["out"].astype(np.float64)).all()


def arrays_of(operands, metadata_plan, emulator, seed):
    """Operands by name, and the results of the mask metadata's plan, if there is one."""
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    if metadata_plan is None:
        return arrays
    return arrays | emulator.run(metadata_plan, arrays, seed)


def draw(case):
    """A case's spec, random operands and cotangents, and the seed that they came from."""
    seed = seed_of(case)
    random = np.random.default_rng(seed)

    def normal(length, heads, columns=case.V or case.H):
        return random.standard_normal((case.B, length, heads, columns)).astype(DTYPES[case.dtype])

    query, key = normal(case.T, case.N, case.H), normal(case.S, case.K, case.H)
    value = normal(case.S, case.K)

    def of_axes(axes):
        sizes = (1 if letter == "1" else getattr(case, letter) for letter in axes)
        return random.standard_normal(tuple(sizes), np.float32)

    others = {}
    if case.bias is not None:
        others["bias"] = of_axes(case.bias).astype(DTYPES[case.bias_dtype])
    if case.mask is not None:
        others["mask"] = of_axes(case.mask) < 0.5
    if case.alibi is not None:
        others["alibi_slopes"] = of_axes(case.alibi) / 20
    if case.sinks is not None:
        others["sinks"] = of_axes(case.sinks)
    for letter, name, length in (("q", "query", case.T), ("k", "key_value", case.S)):
        if letter in case.lengths:
            rows = random.integers(1, length, size=case.B, endpoint=True)
            rows[random.integers(case.B)] = random.choice((0, length))
            others[f"{name}_seq_lengths"] = rows.astype(np.int32)
        if case.segments is not None:
            ids = random.integers(-2, 4, size=(case.B, length)).astype(np.int32)
            others[f"{name}_segment_ids"] = np.sort(ids) if case.segments == "sorted" else ids
        if case.packed is not None:
            ends = np.sort(random.integers(length, size=(case.B, case.packed + 1), endpoint=True))
            others[f"{name}_offsets"] = ends.astype(np.int32)
    # Shorter than some sequences may be.
    longest = (case.T - case.T // 3, case.S - case.S // 3) if case.packed is not None else (None, None)
    d_lse = random.standard_normal((case.B, case.N, case.T)).astype(np.float32)
    spec = AttentionSpec(
        case.H**-0.5,
        case.left,
        case.right,
        logits_soft_cap=case.soft_cap,
        dropout_rate=case.dropout,
        return_residual=case.return_residual,
        deterministic=case.deterministic,
        max_query_length=longest[0],
        max_key_value_length=longest[1],
    )
    if case.dropout:
        dropout_key = jax.random.key(int(random.integers(2**31)))
        rows, columns = _dropout.hashes(dropout_key, case.B, case.N, case.T, case.S)
        others |= {"dropout_rows": rows, "dropout_columns": columns}
    operands = Operands(
        *map(jax.numpy.asarray, (query, key, value)), **jax.tree.map(jax.numpy.asarray, others)
    )
    return spec, operands, normal(case.T, case.N), d_lse if case.return_residual else None, seed


def roundoff(case):
    return 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
