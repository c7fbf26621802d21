import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

from jax_flash._device import H100
from jax_flash._mask import Window
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands, sizes
from jax_flash.cuda import dropout, launch_plan
from jax_flash.cuda.launch_plan import Launch, Pointer, TensorMap, Zero
from jax_flash.cuda.sm90.forward_plan import plan_forward
from jax_flash.cuda.sm90.forward_tiles import (
    ForwardTile,
    TileRequirements,
    choose_pack_gqa,
    choose_tile,
    split_last_wave,
    tile_options,
)

pytestmark = pytest.mark.every_turn


def shapes(B=2, T=1000, S=777, N=8, K=2, H=128, dtype=jnp.bfloat16, V=None):
    query = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    value = jax.ShapeDtypeStruct((B, S, K, V or H), dtype)
    return Operands(query, key, value)


def defines(plan):
    return dict(plan.launches[0].kernel.defines)


def test_buffers_are_those_of_the_call():
    plan = plan_forward(AttentionSpec(0.1), shapes(), H100)
    assert [(b.name, b.shape, b.dtype) for b in plan.operands] == [
        ("query", (2, 1000, 8, 128), "bfloat16"),
        ("key", (2, 777, 2, 128), "bfloat16"),
        ("value", (2, 777, 2, 128), "bfloat16"),
    ]
    assert [(b.name, b.shape, b.dtype) for b in plan.results] == [
        ("out", (2, 1000, 8, 128), "bfloat16"),
        ("lse", (2, 8, 1000), "float32"),
    ]


def test_dropout():
    hashes = dict(
        dropout_rows=jax.ShapeDtypeStruct((2, 8, 1000), jnp.uint32),
        dropout_columns=jax.ShapeDtypeStruct((2, 777), jnp.uint32),
    )
    plan = plan_forward(AttentionSpec(0.1, dropout_rate=0.25), shapes().replace(**hashes), H100)
    without = plan_forward(AttentionSpec(0.1), shapes(), H100)
    keys = defines(plan)["KEYS"]
    # A CTA copies the hashes of whole blocks.
    blocks = -(-777 // keys)
    assert [(b.name, b.shape, b.dtype) for b in plan.operands[3:]] == [
        ("dropout_rows", (2, 8, 1000), "uint32"),
        ("dropout_columns", (2, blocks, keys), "uint32"),
    ]
    assert plan.launches[0].shared_bytes - without.launches[0].shared_bytes == 3 * keys * 4
    assert (defines(plan)["DROPOUT"], defines(without)["DROPOUT"]) == (1, 0)
    arguments = plan.launches[0].by_path
    assert arguments["dropout.rows"] == Pointer("dropout_rows")
    assert arguments["dropout.columns"] == Pointer("dropout_columns")
    assert arguments["dropout.threshold"] == 0x20002000
    assert arguments["dropout.factor"] == 1 / 0.75


def test_kept_probabilities_are_divided_by_the_rate_in_force():
    """0.96 is not a multiple of 2**-15: 31457 / 2**15 of the probabilities are dropped."""
    rows = jax.ShapeDtypeStruct((2, 8, 1000), jnp.uint32)
    columns = jax.ShapeDtypeStruct((2, 777), jnp.uint32)
    operands = shapes().replace(dropout_rows=rows, dropout_columns=columns)
    plan = plan_forward(AttentionSpec(0.1, dropout_rate=0.96), operands, H100)
    arguments = plan.launches[0].by_path
    assert arguments["dropout.threshold"] == 31457 * 0x10001
    assert arguments["dropout.factor"] == 2**15 / (2**15 - 31457)


def test_hashes_of_keys_are_in_the_order_of_accumulators():
    hashes = dict(
        dropout_rows=jax.ShapeDtypeStruct((2, 8, 1000), jnp.uint32),
        dropout_columns=jax.ShapeDtypeStruct((2, 777), jnp.uint32),
    )
    plan = plan_forward(AttentionSpec(0.1, dropout_rate=0.25), shapes().replace(**hashes), H100)
    columns = jnp.arange(2 * 777, dtype=jnp.uint32).reshape(2, 777) + 1
    arranged = dropout.arranged(plan, {"dropout_columns": columns})["dropout_columns"].reshape(2, -1)
    assert arranged[1, 16:32].tolist() == [
        777 + 17 + key for key in (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    ]
    assert sorted(arranged[0].tolist()) == [0] * (arranged.shape[1] - 777) + list(range(1, 778))


def test_survives_the_attribute():
    plan = plan_forward(AttentionSpec(0.1, 5, 0), shapes(H=80, dtype=jnp.float16), H100)
    assert launch_plan.load(launch_plan.dump(plan)) == plan


def test_kernels_do_not_depend_on_batch_heads_or_scale():
    # One compilation serves every batch, head count and scale, and lengths alike.
    kernels = {
        plan_forward(AttentionSpec(scale), shapes(B=B, T=T, N=N), H100).launches[0].kernel
        for scale, B, T, N in [(0.1, 1, 1, 2), (2.0, 3, 4097, 16)]
    }
    assert len(kernels) == 1


def test_a_side_that_hides_nothing_costs_nothing():
    full = defines(plan_forward(AttentionSpec(0.1), shapes(T=64, S=64), H100))
    assert defines(plan_forward(AttentionSpec(0.1, 63, 63), shapes(T=64, S=64), H100)) == full
    assert defines(plan_forward(AttentionSpec(0.1, 62, 63), shapes(T=64, S=64), H100))["HAS_LEFT"] == 1
    assert defines(plan_forward(AttentionSpec(0.1, None, 0), shapes(T=64, S=64), H100))["HAS_RIGHT"] == 1
    # A single query sees every key of a causal call, as when decoding.
    assert defines(plan_forward(AttentionSpec(0.1, None, 0), shapes(T=1, S=64), H100))["HAS_RIGHT"] == 0


@pytest.mark.parametrize("scale,sign,factor", [(2.0, 1, 2.0), (-2.0, -1, 2.0), (0.0, 0, None)])
def test_the_sign_of_the_scale_is_the_kernels_and_its_size_a_parameter(scale, sign, factor):
    plan = plan_forward(AttentionSpec(scale), shapes(), H100)
    assert defines(plan)["SCORE_SIGN"] == sign
    scale_log2 = plan.launches[0].by_path["scale_log2"]
    assert scale_log2 > 0
    assert factor is None or scale_log2 == pytest.approx(factor / jnp.log(2.0))


def test_the_grid_has_a_cta_for_each_tile_up_to_one_a_multiprocessor():
    def grid(**sizes):
        return plan_forward(AttentionSpec(0.1), shapes(**sizes), H100).launches[0].grid

    assert grid(B=1, T=129, N=2) == (4, 1, 1)
    assert grid(B=8, T=4096, N=16) == (H100.sm_count, 1, 1)


@pytest.mark.parametrize("head_dim,columns", [(8, 8), (64, 64), (80, 80), (200, 200)])
def test_tensor_maps_cover_the_arrays_and_not_the_padding(head_dim, columns):
    plan = plan_forward(AttentionSpec(0.1), shapes(H=head_dim, N=2), H100)
    maps = [p for p in plan.launches[0].arguments if isinstance(p, TensorMap)]
    assert [m.buffer for m in maps] == ["query", "key", "value"]
    for m in maps:
        B, rows, heads, H = next(b.shape for b in plan.operands + plan.results if b.name == m.buffer)
        assert m.sizes == (columns, heads, rows, B)
        assert m.strides == (2 * H, 2 * H * heads, 2 * H * heads * rows)
        assert m.box[0] == 64 and m.box[1] == m.box[3] == 1
    assert defines(plan)["HEAD_DIM"] % 16 == 0


def test_values_may_have_a_head_dim_of_their_own():
    plan = plan_forward(AttentionSpec(0.1), shapes(H=192, V=120), H100)
    maps = [p for p in plan.launches[0].arguments if isinstance(p, TensorMap)]
    assert [m.sizes[0] for m in maps] == [192, 192, 120]
    assert (defines(plan)["HEAD_DIM"], defines(plan)["VALUE_DIM"]) == (192, 128)
    assert plan.results[0].shape == (2, 1000, 8, 120)
    # Partials of split tiles are of the output.
    plan = plan_forward(AttentionSpec(0.1), shapes(B=1, T=16384, S=16384, N=16, K=16, H=64, V=128), H100)
    assert plan.results[2].name == "partials" and plan.results[2].shape[2] == 32 * (64 + 4)


@pytest.mark.parametrize(
    "dims,expected",
    [
        ((128, 128), ForwardTile(2, 128, 2, True, 2, 6)),
        ((64, 128), ForwardTile(2, 128, 2, True, 2, 6)),
        ((192, 128), ForwardTile(2, 128, 2, True, 1, 6)),  # one stage for Q
        ((256, 128), ForwardTile(2, 96, 2, True, 1, 5)),  # and fewer keys
        ((128, 64), ForwardTile(3, 128, 2, True, 2, 6)),
    ],
)
def test_registers_go_by_the_values_and_shared_memory_by_both(dims, expected):
    found = tile_options(TileRequirements(*dims, Window(None, 0)))
    assert found[0].tile == expected
    assert len({option.tile for option in found}) == len(found)


@pytest.mark.parametrize("mask_metadata", (False, True))
@pytest.mark.parametrize("dropout", (False, True))
@pytest.mark.parametrize("loaded_operand", (None, "mask", "bias"))
@pytest.mark.parametrize("score_mods", (0, 1, 3))
def test_tiles_fit_shared_memory(score_mods, loaded_operand, dropout, mask_metadata):
    dims = range(16, 257, 16)
    for H, V, window in itertools.product(dims, dims, (Window(None, None), Window(None, 0))):
        needs = TileRequirements(
            H, V, window, score_mods, loaded_operand, mask_metadata, segments=mask_metadata, dropout=dropout
        )
        found = tile_options(needs)
        assert all(option.tile.shared_bytes(needs) <= 227 * 1024 for option in found)
        assert all(1 <= option.tile.early_pv_steps <= option.tile.keys // 16 for option in found)
        if H == V:  # the table's are as they are
            without = dataclasses.replace(needs, segments=False, dropout=False)
            assert found == tile_options(without)
            assert all(option.tile.fitted(without) == option.tile for option in found)


def test_unequal_tiles_are_counted_out_where_there_are_more_than_ctas():
    def results(spec, **sizes):
        plan = plan_forward(spec, shapes(**sizes), H100)
        return "next_tile" in [b.name for b in plan.results], [type(step) for step in plan.steps]

    causal, full = AttentionSpec(0.1, None, 0), AttentionSpec(0.1)
    assert results(causal, B=8) == (True, [Zero, Launch])
    assert results(causal, B=1, T=128) == (False, [Launch])
    assert results(full, B=8) == (False, [Launch])


@pytest.mark.parametrize(
    "keys,block", [(128, 128), (257, 144), (512, 128), (1000, 144), (4096, 128), (16384, 176)]
)
def test_blocks_of_keys_fit_their_number(keys, block):
    assert (
        choose_tile(TileRequirements(128, 128, Window(None, None)), sizes(shapes(T=keys, S=keys))).keys
        == block
    )


@pytest.mark.parametrize("window", [Window(None, None), Window(None, 0)], ids=["full", "causal"])
def test_tiles_of_queries_fit_their_number(window):
    needs = TileRequirements(64, 64, window)
    rows = [choose_tile(needs, sizes(shapes(T=T, S=T, N=8, K=8, H=64))).rows for T in (128, 256, 4096)]
    assert rows == [128, 128, 192]  # a third of a tile of 192 would be empty, and two thirds of the second


@pytest.mark.parametrize(
    "queries,heads,key_heads,pack_gqa",
    [
        (1, 8, 1, 8),
        (1, 8, 8, 1),
        (16, 64, 4, 8),  # 8 · 16 rows fill a tile
        (64, 32, 4, 2),
        (257, 8, 1, 8),  # 3 tiles a head, or 17 for all eight
        (4096, 32, 8, 1),
        (1, 5, 1, 1),  # a tile of 128 rows can't hold 5 heads alike
    ],
)
def test_heads_share_tiles_where_that_makes_fewer_tiles(queries, heads, key_heads, pack_gqa):
    assert choose_pack_gqa(sizes(shapes(T=queries, N=heads, K=key_heads)), 128) == pack_gqa


def test_heads_that_share_a_tile_lie_together_in_the_query_map():
    plan = plan_forward(AttentionSpec(0.1), shapes(T=16, N=64, K=4), H100)
    query = next(p for p in plan.launches[0].arguments if isinstance(p, TensorMap))
    assert query.box == (64, 8, 16, 1)
    assert defines(plan)["PACK_GQA"] == 8
    assert plan.launches[0].grid == (2 * 8, 1, 1)


def test_a_ragged_last_wave_is_split_where_that_pays():
    assert split_last_wave(2048, 132, 94) == (15 * 132, 132)  # 68 tiles would leave 64 CTAs idle
    assert split_last_wave(4096, 132, 32) == (31 * 132, 4 * 8)  # 4 tiles, each split 8 ways
    assert split_last_wave(2 * 132, 132, 94) == (2 * 132, 0)
    assert split_last_wave(131, 132, 94) == (131, 0)
    assert split_last_wave(2048, 132, 8) == (2048, 0)  # a CTA's second tile would cost as much as it spares
    assert split_last_wave(3, 132, 512) == (0, 3 * 8)  # one query, many keys
    assert split_last_wave(100, 132, 10**6) == (100, 0)  # beyond what the kernel counts with
    for tiles in range(1, 300):
        for blocks in (1, 2, 3, 50):
            whole, sharers = split_last_wave(tiles, 132, blocks)
            assert whole == tiles or sharers <= (tiles - whole) * blocks  # nobody without a block


def test_cut_tiles_have_places_for_all_pieces():
    plan = plan_forward(AttentionSpec(0.1), shapes(B=1, T=16384, S=16384, N=16, K=16), H100)
    assert [b.name for b in plan.results] == ["out", "lse", "partials", "arrived"]
    assert [type(step) for step in plan.steps] == [Zero, Launch]
    partials, arrived = plan.results[2:]
    assert partials.shape == (132 + 68, 8, 32 * (64 + 4))
    assert arrived.shape == (68, 8)
    assert defines(plan)["SPLIT_KV"] == 1
    # Tiles under a window are not alike, and at head dim 256 the kernel has no registers for it.
    for spec, H in ((AttentionSpec(0.1, None, 0), 128), (AttentionSpec(0.1), 256)):
        plan = plan_forward(spec, shapes(B=1, T=16384, S=16384, N=16, K=16, H=H), H100)
        assert defines(plan)["SPLIT_KV"] == 0


def test_tiles_that_may_be_repeated_have_an_element_each():
    """Where a row may see some keys of a block and not others: a window, mask metadata, a mask."""
    lengths = dict(key_value_seq_lengths=jax.ShapeDtypeStruct((2,), jnp.int32))
    mask = dict(mask=jax.ShapeDtypeStruct((2, 1, 1000, 777), jnp.bool_))
    bias = dict(bias=jax.ShapeDtypeStruct((2, 1, 1000, 777), jnp.float32))
    for window, others, isolates in (
        ((None, None), {}, False),
        ((None, None), bias, False),
        ((None, 0), {}, True),
        ((None, None), lengths, True),
        ((None, None), mask, True),
        ((None, None), mask | bias, True),
    ):
        plan = plan_forward(AttentionSpec(0.1, *window), shapes().replace(**others), H100)
        found = [b.shape for b in plan.results if b.name == "next_repeat"]
        assert found == ([(2 * 8 * 8,)] if isolates else [])  # tiles of 128 of the 1000 rows
        assert (plan.launches[0].by_path["next_repeat"] is not None) == isolates


def test_fewer_heads_are_interleaved_in_a_smaller_l2():
    def group(l2_bytes):
        device = dataclasses.replace(H100, l2_bytes=l2_bytes)
        call = shapes(B=2, T=8192, S=8192, N=32, K=32)
        return plan_forward(AttentionSpec(0.1, None, 0), call, device).launches[0].by_path["l2_head_group"]

    # Keys and values of a head take 4 MiB, and those of a group 32 MiB of the 50.
    assert H100.l2_bytes == 50 << 20
    assert group(H100.l2_bytes) == 8
    assert group(25 << 20) == 4


@pytest.mark.parametrize("bytes_of_element", (1, 2, 4))
def test_shared_memory_goes_by_the_size_of_elements(bytes_of_element):
    tile = ForwardTile(2, 128, 2, True, 2, 6)
    requirements = TileRequirements(128, 128, Window(None, None), element_bytes=bytes_of_element)
    # Two tiles of 128 queries, and two blocks of 128 keys and of 128 values.
    inputs = 6 * 128 * 128 * bytes_of_element
    rest = tile.shared_bytes(requirements) - inputs
    assert rest == tile.shared_bytes(dataclasses.replace(requirements, element_bytes=2)) - 6 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("batch", "length", "head_dim", "expected"),
    [(2, 32768, 128, 1), (8, 8192, 128, 4), (16, 4096, 64, 7), (4, 4096, 128, 16)],  # the last one is short
)
def test_long_calls_with_lists_of_blocks_have_few_heads_at_work(batch, length, head_dim, expected):
    """A group has 1.5 tiles for each multiprocessor; that of a short call has what fits into L2."""
    x, blocks = jax.ShapeDtypeStruct((batch, length, 16, head_dim), jnp.bfloat16), length // 128
    operands = Operands(
        *(x, x, x),
        batch_indices=jax.ShapeDtypeStruct((batch,), jnp.int32),
        head_indices=jax.ShapeDtypeStruct((1, 16), jnp.int32),
        block_kinds=jax.ShapeDtypeStruct((1, 1, blocks, blocks), jnp.int8),
    )
    plan = plan_forward(AttentionSpec(0.1, block_mask=BlockMaskSpec((128, 128), None)), operands, H100)
    launches = [launch for launch in plan.launches if isinstance(launch, Launch)]
    assert launches[-1].by_path["l2_head_group"] == expected
