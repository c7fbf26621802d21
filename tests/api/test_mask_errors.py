"""What masks refuse: arguments that make no mask, and calls of other sizes than it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mask_cases import CASES, CONTEXTS, GLOBAL, IDS, LAYOUT, OFFSETS, PARENTS, PREFIXES, B, N, S, T

from jax_flash import masks

ERRORS = {
    "offset is a shape": (lambda: masks.CausalMask((8, 8)), TypeError, "offset must be a Python integer"),
    "huge offset": (
        lambda: masks.CausalMask(2**30),
        ValueError,
        "offset must be from -536870912 to 536870912; got 1073741824 (int)",
    ),
    "offset of floats": (
        lambda: masks.CausalMask(np.zeros(2)),
        TypeError,
        "offset must have an integer dtype; got float64 (2,)",
    ),
    "offset of pairs": (
        lambda: masks.LocalMask(3, np.zeros((2, 2), int)),
        ValueError,
        "offset must have shape () or (B,); got int64 (2, 2)",
    ),
    "window of three": (
        lambda: masks.LocalMask((1, 2, 3)),
        ValueError,
        "window_size must be None, an int or a pair",
    ),
    "window of a float": (lambda: masks.LocalMask(1.5), TypeError, "window_size must be a Python integer"),
    "negative window": (
        lambda: masks.DilatedMask((-2, 0), 2),
        ValueError,
        "window_size must hold sizes of at least 0, or None or -1 for unbounded; got (-2, 0) (tuple)",
    ),
    "no dilation": (lambda: masks.DilatedMask(2, 0), ValueError, "dilation must be at least 1; got 0 (int)"),
    "empty chunks": (lambda: masks.ChunkedCausalMask(0), ValueError, "chunk_size must be at least 1; got 0"),
    "chunks of a half": (
        lambda: masks.ChunkedCausalMask(0.5),
        TypeError,
        "chunk_size must be a Python integer",
    ),
    "negative prefix": (
        lambda: masks.PrefixLMMask(-1),
        ValueError,
        "prefix_length must be from 0 to 536870912; got -1",
    ),
    "prefix is a list": (
        lambda: masks.PrefixLMMask([1, 2]),
        TypeError,
        "prefix_length must be a Python integer, or an integer array of shape () or (B,); got [1, 2]",
    ),
    "a shape, as splash attention's masks have": (
        lambda: masks.CausalMask((4, 4)),
        TypeError,
        "got (4, 4) (tuple); masks have no argument shape, unlike those of splash attention",
    ),
    "a shape beside a window": (
        lambda: masks.LocalMask((4, 4), (2, 0)),
        TypeError,
        "offset must be a Python integer, or an integer array of shape () or (B,); got (2, 0) (tuple); masks",
    ),
    "prefix is a flag": (
        lambda: masks.PrefixLMMask(True),
        TypeError,
        "prefix_length must be a Python integer",
    ),
    "stride": (lambda: masks.StridedMask(0), ValueError, "stride must be at least 1; got 0"),
    "huge stride": (
        lambda: masks.FixedMask(2**30 + 1),
        ValueError,
        "stride must be at most 1073741824; got 1073741825",
    ),
    "summary": (lambda: masks.FixedMask(4, 5), ValueError, "summary must be at most stride = 4; got 5"),
    "negative tokens": (lambda: masks.GlobalMask(-1), ValueError, "tokens must be at least 0; got -1"),
    "tokens by index": (
        lambda: masks.LongformerMask(2, np.array([0, 5])),
        TypeError,
        "tokens must have a bool dtype",
    ),
    "tokens of heads": (
        lambda: masks.GlobalMask(np.zeros((1, 1, 4), bool)),
        ValueError,
        "tokens must have shape (S,) or (B, S); got bool (1, 1, 4)",
    ),
    "even window": (
        lambda: masks.BigBirdMask(9, window_blocks=2),
        ValueError,
        "window_blocks must be odd; got 2",
    ),
    "negative random blocks": (
        lambda: masks.BigBirdMask(9, random_blocks=-1),
        ValueError,
        "random_blocks must be at least 0; got -1",
    ),
    "seed": (
        lambda: masks.BigBirdMask(9, seed=0.5),
        TypeError,
        "seed must be an int or one key, as from jax.random.key; got 0.5 (float)",
    ),
    "several keys": (
        lambda: masks.BigBirdMask(9, seed=jax.random.split(jax.random.key(0))),
        TypeError,
        "one key",
    ),
    "grid": (
        lambda: masks.NeighborhoodMask(9, 3),
        TypeError,
        "shape must be a tuple of ints, as (height, width); got 9 (int)",
    ),
    "huge grid": (lambda: masks.NeighborhoodMask((2**16, 2**16), 3), ValueError, "fewer than 2**31 tokens"),
    "kernel of three axes": (
        lambda: masks.NeighborhoodMask((9, 9), (3, 3, 3)),
        ValueError,
        "kernel_size must be an int or 2 of them; got (3, 3, 3) (tuple)",
    ),
    "kernel": (
        lambda: masks.NeighborhoodMask((9, 9), 0),
        ValueError,
        "kernel_size must be at least 1; got 0",
    ),
    "dilation beyond the grid": (
        lambda: masks.NeighborhoodMask((9, 5), 3, 2),
        ValueError,
        "kernel_size times dilation must be at most shape = (9, 5) along each axis; "
        "got kernel_size (3, 3) and dilation (2, 2)",
    ),
    "a parent behind": (
        lambda: masks.TreeMask([-1, 0, 2]),
        ValueError,
        "parents must hold -1 or the index of an earlier token; got 2 of token 2",
    ),
    "a parent before all": (lambda: masks.TreeMask(jnp.array([-2])), ValueError, "got -2 of token 0"),
    "parents": (lambda: masks.TreeMask([0.5]), TypeError, "parents must have an integer dtype"),
    "context": (
        lambda: masks.TreeMask([-1], -1),
        ValueError,
        "context_length must be from 0 to 536870912; got -1",
    ),
    "a dense mask of numbers": (
        lambda: masks.NumpyMask(np.ones((2, 2))),
        TypeError,
        "array must have a bool dtype",
    ),
    "a dense mask of keys": (
        lambda: masks.NumpyMask(np.ones(2, bool)),
        ValueError,
        "array must have shape (T, S) or (N, T, S) or (B, N, T, S); got bool (2,)",
    ),
    "a dense mask is a list": (
        lambda: masks.NumpyMask([[True]]),
        TypeError,
        "array must be an array; got [[True]]",
    ),
    "ids of floats": (lambda: masks.DocumentMask(jnp.ones(3)), TypeError, "ids must have an integer dtype"),
    "ids of heads": (
        lambda: masks.DocumentMask(jnp.ones((1, 1, 3), int)),
        ValueError,
        "ids must have shape (T,) or (B, T); got int32 (1, 1, 3)",
    ),
    "rows of ids": (
        lambda: masks.DocumentMask(jnp.ones((2, 3), int), jnp.ones(4, int)),
        ValueError,
        "key_ids must have as many batch rows as ids, int32 (2, 3); got int32 (4,)",
    ),
    "layout": (
        lambda: masks.BlockLayoutMask(np.ones(3, bool)),
        ValueError,
        "layout must have shape (T / q, S / k) or (N, T / q, S / k) or (B, N, T / q, S / k); got bool (3,)",
    ),
    "blocks of three axes": (
        lambda: masks.BlockLayoutMask(LAYOUT, (8, 8, 8)),
        ValueError,
        "block_size must be an int or 2 of them; got (8, 8, 8) (tuple)",
    ),
    "blocks beyond int32": (
        lambda: masks.BlockLayoutMask(LAYOUT, (8, 2**31)),
        ValueError,
        "block_size must be at most 2147483647; got (8, 2147483648) (tuple)",
    ),
    "random blocks beyond int32": (
        lambda: masks.BigBirdMask(9, 2**31),
        ValueError,
        "block_size must be at most 2147483647; got 2147483648 (int)",
    ),
    "one mask for heads": (
        lambda: masks.MultiHeadMask(masks.FullMask()),
        TypeError,
        "masks must be a tuple or a list",
    ),
    "no heads": (
        lambda: masks.MultiHeadMask([]),
        ValueError,
        "masks must have a mask for each head; got none",
    ),
    "a head without a mask": (
        lambda: masks.MultiHeadMask([None]),
        TypeError,
        "masks must hold functions; got None",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, kind, message = ERRORS[name]
    with pytest.raises(kind) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_sizes_that_fit(name):
    case = CASES[name]
    case.mask.check_sizes(B, N, case.T, case.S)


SIZES = {  # of B, N, T, S other than those that the mask is for
    "offset": (
        masks.CausalMask(OFFSETS) & masks.FullMask(),
        (3, N, T, S),
        "offset is int32 (2,); its axis -1 must be B = 3",
    ),
    "prefix": (
        ~masks.PrefixLMMask(PREFIXES),
        (3, N, T, S),
        "prefix_length is int32 (2,); its axis -1 must be B = 3",
    ),
    "tokens": (
        masks.LongformerMask(1, GLOBAL),
        (B, N, T, S + 1),
        "tokens is bool (2, 83); its axis -1 must be S = 84",
    ),
    "length": (masks.BigBirdMask(9), (B, N, 9, 8), "length is 9; T and S must be that, and are 9 and 8"),
    "heads": (masks.BigBirdMask(9, heads=2), (B, 3, 9, 9), "heads is 2; it must be 1 or N = 3"),
    "grid": (
        masks.NeighborhoodMask((7, 9), 3),
        (B, N, 7, 9),
        "shape is (7, 9); T and S must be 63, and are 7 and 9",
    ),
    "tree": (masks.TreeMask(PARENTS), (B, N, 8, S), "parents is int32 (2, 9); its axis -1 must be T = 8"),
    "context": (
        masks.TreeMask([-1], CONTEXTS),
        (3, N, 1, S),
        "context_length is int32 (2,); its axis -1 must be B = 3",
    ),
    "queries": (masks.NumpyMask(np.ones((1, 3, T, S), bool)), (B, N, T + 1, S), "axis -2 must be T = 62"),
    "rows": (masks.NumpyMask(np.ones((3, 1, T, S), bool)), (B, N, T, S), "axis -4 must be B = 2"),
    "documents": (masks.DocumentMask(IDS), (B, N, T, S), "ids is int32 (2, 61); its axis -1 must be S = 83"),
    "keys": (
        masks.DocumentMask(IDS, IDS),
        (B, N, T, S),
        "key_ids is int32 (2, 61); its axis -1 must be S = 83",
    ),
    "layout": (masks.BlockLayoutMask(LAYOUT, (16, 8)), (B, N, 65, S), "axis -2 must be ceil(T / q) = 5"),
    "layout's heads": (masks.BlockLayoutMask(LAYOUT, (16, 8)), (B, 4, T, S), "axis -3 must be N = 4"),
    "masks": (masks.MultiHeadMask([masks.FullMask()]), (B, 2, T, S), "masks are 1; there must be N = 2"),
    "a head's": (masks.MultiHeadMask([masks.DocumentMask(IDS)]), (B, 1, 7, S), "must be T = 7"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_fit(name):
    mask, sizes, message = SIZES[name]
    with pytest.raises(ValueError) as error:
        mask.check_sizes(*sizes)
    assert message in str(error.value)
