"""The Hopper kernels run on a CPU (tests/support/kernel_emulator.py) and compared with the definition.

This is about indices, masks, barriers and the order of things. Speed, and what the hardware makes of an
instruction, are for tests/gpu.
"""

import dataclasses
import itertools

import agreement
import jax
import numpy as np
import pytest
from emulated_case import (
    DEVICE,
    Case,
    arrays_of,
    check_backward,
    check_forward,
    check_results,
    draw,
    expected,
    roundoff,
    tile,
    traits,
)
from exhaustive import one_in, thinned, thorough
from kernel_emulator import KernelEmulator

from jax_flash import _reference, cuda
from jax_flash._device import H100
from jax_flash._spec import Operands, shapes_of
from jax_flash.cuda.launch_plan import TensorMap
from jax_flash.cuda.sm90 import (
    backward_plan,
    backward_scheduler,
    backward_tiles,
    backward_units,
    forward_plan,
)
from jax_flash.cuda.sm90.backward_units import Units

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
    Case(H=128, T=150, S=200, N=2, right=0, soft_cap=30.0, return_residual=True),
    Case(H=128, T=150, S=200, N=2, soft_cap=6.0, dtype="float16"),
    Case(H=96, T=130, S=200, N=4, K=2, left=60, right=9, soft_cap=2.0, return_residual=True),
    Case(H=64, V=128, T=70, S=300, N=2, B=2, soft_cap=2.0, deterministic=True),
    Case(H=200, T=65, S=140, N=2, soft_cap=1.0, alibi="1N", dtype="float16"),
)
# Functions of users, alone and with all else; rows and keys that aren't there.
FUNCTIONS = (
    Case(H=64, T=70, S=130, N=2, B=2, score_mod="relative_position", right=0),
    Case(H=128, T=130, S=70, N=2, score_mod="capped", return_residual=True),
    Case(H=64, T=80, S=130, N=2, score_mod="mildly_capped", return_residual=True),
    Case(H=128, T=130, S=200, N=4, K=2, score_mod="capped", left=60, right=9, dropout=0.2),
    Case(H=64, T=200, S=300, N=2, B=2, score_mod="mildly_capped", block_mask="causal_and_sinks"),
    Case(H=96, T=150, S=200, N=4, K=2, packed=3, score_mod="mildly_capped", right=0),
    Case(H=256, T=65, S=100, N=2, B=2, score_mod="hides", right=0),
    Case(H=192, T=70, S=90, N=2, K=1, B=2, score_mod="scaled", dtype="float16"),
    Case(
        H=128, T=70, S=140, N=2, B=2, score_mod="scaled", soft_cap=2.0, bias="1N1S", alibi="1N", mask="B11S"
    ),
    Case(H=64, T=100, S=140, N=4, K=2, B=2, score_mod="hides", lengths="qk", sinks="1N", dropout=0.2),
    Case(H=128, T=9, S=200, N=8, K=2, B=2, score_mod="relative_position", left=70, right=3),
    Case(H=256, T=70, S=70, N=2, score_mod="scaled", return_residual=True, right=0),
    Case(H=96, T=130, S=140, score_mod="capped", deterministic=True, segments="sorted"),
    Case(H=64, T=70, S=130, N=2, B=2, score_mod="learned", right=0, return_residual=True),
    Case(
        H=128, T=130, S=100, N=4, K=2, score_mod="learned", soft_cap=3.0, bias="1N1S", alibi="1N", dropout=0.2
    ),
    Case(H=192, T=70, S=90, N=2, K=1, B=2, score_mod="learned", lengths="qk", dtype="float16"),
    Case(H=256, T=100, S=90, N=2, B=2, score_mod="learned", soft_cap=2.0, mask="B11S"),
    Case(H=64, T=150, S=200, N=2, B=2, packed=4, score_mod="hides", right=0, return_residual=True),
    Case(H=128, T=200, S=180, N=4, K=2, B=2, packed=3, score_mod="learned", alibi="1N"),
    Case(H=192, T=150, S=150, N=2, packed=3, score_mod="scaled", deterministic=True, right=0),
    Case(H=256, T=90, S=150, N=2, packed=2, score_mod="relative_position", left=40),
)
# Block masks: of functions and of layouts, alike for all heads or not, with all that hides keys besides.
BLOCK_MASKS = (
    Case(H=64, T=200, S=300, N=2, B=2, block_mask="causal_and_sinks", return_residual=True),
    Case(H=128, T=300, S=200, N=4, K=2, B=2, block_mask="of_own_heads"),
    Case(H=128, T=150, S=270, N=4, K=2, block_mask="layout", right=0),
    Case(H=256, T=150, S=200, N=2, B=2, block_mask="own_layouts", dtype="float16"),
    Case(H=192, T=130, S=210, N=2, block_mask="causal_and_sinks", soft_cap=2.0, bias="1N1S", sinks="1N"),
    Case(H=64, T=200, S=300, N=2, B=2, block_mask="causal_and_sinks", soft_cap=2.0),
    Case(H=64, T=140, S=260, N=4, K=2, B=2, block_mask="of_own_heads", lengths="qk", dropout=0.2),
    Case(H=128, T=9, S=200, N=8, K=2, block_mask="layout", left=120),  # whose heads share a tile
    Case(H=128, T=200, S=200, N=2, block_mask="causal_and_sinks", segments="sorted", B=2),
    Case(H=128, T=200, S=300, N=2, B=2, block_mask="of_own_heads", deterministic=True),
    Case(H=96, T=130, S=140, N=2, block_mask="layout", score_mod="relative_position", mask="B11S"),
)
# Mask metadata: batch rows shorter than the arrays, or with nothing at all; segments; varlen sequences.
MASK_METADATA = (
    Case(H=64, T=200, S=300, N=2, B=3, lengths="qk", return_residual=True),
    Case(H=128, T=300, S=200, N=4, K=2, B=3, lengths="qk", right=0),
    Case(H=128, T=130, S=300, B=3, lengths="k"),
    Case(H=80, T=300, S=70, N=2, B=3, lengths="q", right=0, dtype="float16"),
    Case(H=256, T=150, S=300, N=2, B=3, lengths="qk", left=60, right=20),
    Case(H=192, T=100, S=200, N=4, K=1, B=3, lengths="qk"),
    Case(H=128, T=10, S=300, N=8, K=2, B=4, lengths="k", right=0),  # whose heads share a tile
    Case(H=96, T=129, S=200, N=2, B=3, lengths="qk", alibi="BN", mask="B11S", right=0),
    # Parts of longer sequences: nothing visible, a diagonal in the middle, everything visible.
    Case(H=64, T=200, S=200, N=2, B=3, right=0, diagonal=(-200, -70, 200), return_residual=True),
    Case(H=128, T=300, S=200, N=4, K=2, B=2, left=150, right=0, diagonal=(250, 40), alibi="1N"),
    Case(H=256, T=100, S=130, B=3, right=0, lengths="qk", diagonal=(-60, 30, 90)),
    # An early and a late part in a call.
    Case(H=128, T=260, S=520, N=4, K=2, right=0, diagonal=((-130, 130),), deterministic=True),
    Case(H=64, T=300, S=400, N=2, B=2, left=90, right=20, diagonal=((-200, 0), (-250, -20)), alibi="1N"),
    Case(H=128, T=400, S=400, N=2, segments="sorted", right=0, B=2),
    Case(H=64, T=300, S=700, N=2, segments="sorted", return_residual=True),
    Case(H=64, T=500, S=200, N=4, K=2, segments="mixed", left=90, B=2),
    Case(H=256, T=200, S=260, segments="sorted", right=0, dtype="float16"),
    Case(H=192, T=300, S=200, N=2, segments="sorted", lengths="qk", B=2, soft_cap=3.0, sinks="BN"),
    Case(H=128, T=300, S=300, N=2, segments="sorted", right=0, soft_cap=2.0),
    Case(H=64, T=200, S=300, N=4, K=2, packed=4, right=0, soft_cap=3.0, dropout=0.2),
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
    *FUNCTIONS,
    *BLOCK_MASKS,
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
    (Case(H=128, T=200, S=300, right=0, N=4, K=2), 3),
    (Case(H=128, T=200, S=500, N=4, K=2), 3),  # more tiles of a head than blocks
    (Case(H=128, T=70, S=700), 5),
    (Case(H=64, T=300, S=500, N=3), 4),
    (Case(H=64, T=500, S=900, left=200, right=10, N=2), 4),
    (Case(H=96, T=129, S=300, left=70, N=2, K=2, B=2), 5),
    (Case(H=128, T=100, S=300, right=-150, N=2), 3),  # the last keys are seen by no query
    (Case(H=64, T=200, S=129, left=-3, right=1), 2),  # none is seen by any, and the last tile is of one key
    (Case(H=192, T=130, S=400, N=4, K=2), 6),
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
    *FUNCTIONS,
    *BLOCK_MASKS,
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
            (Case(H=64, T=200, S=900, N=5, K=1, bias="1NTS"), 3, 2),  # natural logits
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


@pytest.mark.parametrize(
    "case,cluster",
    thinned(
        itertools.product(
            [
                Case(H=160, T=130, S=70, return_residual=True),
                Case(H=192, T=200, S=300, N=2, K=2, deterministic=True),
                Case(H=144, T=65, S=300, left=-3, N=2),
                Case(H=192, T=300, S=200, right=0, N=2),
            ],
            (1, 2),
        ),
        lambda both: {both[1], both[0].deterministic},
    ),
    ids=str,
)
def test_ctas_that_share_a_tile(case, cluster, emulator, monkeypatch):
    shape = dataclasses.replace(backward_tiles.tile(case.H), cluster=cluster)
    monkeypatch.setattr(backward_tiles, "tile", lambda *_: shape)
    check_backward(case, emulator, multiprocessors=6)


@pytest.mark.parametrize(
    "case",
    (
        Case(H=64, T=1100, S=77, N=2, return_residual=True),
        *thorough(
            Case(H=128, T=700, S=128, N=2),
            Case(H=64, T=1100, S=77, N=2, right=0),  # blocks that no key sees
            Case(H=128, T=700, S=50, N=2, mask="BNTS"),
            Case(H=64, T=1100, S=100, N=2, B=2, lengths="qk"),
            Case(H=128, T=700, S=128, N=2, deterministic=True),
        ),
    ),
    ids=str,
)
def test_heads_with_one_key_tile(case, emulator, monkeypatch):
    """Nothing else adds to its dQ: it stores. Parts of its blocks go to several units."""
    if not case.deterministic:
        monkeypatch.setattr(backward_units, "choose", lambda *_: Units(parts=2))
    check_backward(case, emulator, multiprocessors=3)


@pytest.mark.parametrize(
    "case,multiprocessors,slots",
    thinned(
        [
            (Case(H=128, T=300, S=300, N=5, K=5, B=2, right=0), 2, 2),
            (Case(H=128, T=200, S=500, N=6, K=3), 3, 2),  # several tiles of a head to a CTA
            (Case(H=64, T=700, S=300, N=4, K=4, left=200, right=10), 1, 1),  # blocks that no key tile sees
            (Case(H=128, T=700, S=200, N=8, K=8, right=0), 3, 2),
            (Case(H=80, T=300, S=77, N=4, K=4), 3, 2),  # a tile for each head
        ],
        tile,
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
        lambda case: tile(case) | {case.deterministic, case.packed},
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
def test_kernels_for_racecheck(case, tmp_path):
    """Each barrier counts as many arrivals as there are, and nobody waits in vain."""
    emulator = KernelEmulator(tmp_path, FOR_RACECHECK=1)
    check_forward(dataclasses.replace(case, deterministic=False), DEVICE, emulator)
    check_backward(case, emulator)


@pytest.mark.parametrize("case,multiprocessors", one_in(2, thinned(IN_ORDER, tile)), ids=str)
def test_deterministic_backward(case, multiprocessors, emulator):
    case = dataclasses.replace(case, deterministic=True)
    first, *others = check_backward(case, emulator, multiprocessors, runs=3)
    for other in others:
        for name in first.keys() & {"dq_accum", "d_query", "d_key", "d_value", "d_bias", "d_slopes"}:
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)


@pytest.mark.parametrize(
    "case",
    (
        Case(H=64, T=70, S=300, N=4, K=2, B=2, score_mod="learned", right=0),
        *thorough(
            Case(H=128, T=130, S=200, N=2, B=2, score_mod="relative_position", dropout=0.2),
            Case(H=256, T=70, S=200, N=2, B=2, score_mod="learned", soft_cap=2.0, alibi="1N"),
            Case(H=192, T=70, S=130, N=2, B=2, score_mod="scaled", lengths="qk", dtype="float16"),
        ),
    ),
    ids=str,
)
def test_deterministic_gradients_of_captured_arrays(case, emulator):
    """Exact sums of CTAs' terms: whoever comes first."""
    case = dataclasses.replace(case, deterministic=True)
    first, *others = check_backward(case, emulator, runs=3)
    captured = {name for name in first if name.startswith("d_score_mod")}
    assert captured
    for other in others:
        for name in captured:
            np.testing.assert_array_equal(other[name], first[name], err_msg=name)


@pytest.mark.parametrize("bias", ("1N1S", "11T1"))
@pytest.mark.parametrize("magnitude", (2.0**100, *thorough(2.0**-100, 2.0**-9)))
def test_deterministic_gradients_of_a_bias_of_any_magnitude(magnitude, bias, emulator):
    case = Case(H=64, T=130, S=200, N=2, B=2, bias=bias, deterministic=True)
    check_backward(case, emulator, magnitude=magnitude)


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


def test_backward_passes_of_chunks_add_up(emulator):
    """As in a ring: with lse and output of whole rows, also where these see no key of the chunk."""
    case, rows, keys = Case(H=64, T=192, S=192, N=2, right=0), 96, 64
    spec, operands, d_out, _, seed = draw(case)
    out, lse, gradients = _reference.reference_with_gradients(spec, operands, d_out)
    sums = {name: np.zeros(x.shape) for name, x in agreement.by_name(gradients).items()}
    for i, j in itertools.product(range(0, case.T, rows), range(0, case.S, keys)):
        own, of_keys = slice(i, i + rows), slice(j, j + keys)
        chunks = Operands(
            operands.query[:, own],
            operands.key[:, of_keys],
            operands.value[:, of_keys],
            diagonal=np.array([[i - j - (keys - rows)]], np.int32),
        )
        metadata = backward_plan.plan_backward_metadata(spec, shapes_of(chunks), DEVICE)
        arrays = arrays_of(chunks, metadata, emulator, seed)
        arrays |= dict(out=out[:, own], lse=lse[:, :, own], d_out=d_out[:, own])
        results = emulator.run(backward_plan.plan_backward(spec, shapes_of(chunks), DEVICE), arrays, seed)
        for name, tokens in (("d_query", own), ("d_key", of_keys), ("d_value", of_keys)):
            sums[name][:, tokens] += results[name].astype(np.float64)
    for name, expected_sum in agreement.by_name(gradients).items():
        error = np.linalg.norm(sums[name] - expected_sum)
        assert error <= 2 * roundoff(case) * np.linalg.norm(expected_sum), name


def _tensor_maps(plan):
    return [p for launch in plan.launches for p in launch.arguments if isinstance(p, TensorMap)]
