import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _function_arguments
from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import launch_plan
from jax_flash.cuda.launch_plan import Pointer, TensorMap
from jax_flash.cuda.sm90 import backward_tiles
from jax_flash.cuda.sm90.backward_plan import kernels, plan_backward

pytestmark = pytest.mark.every_turn

HEAD_DIMS = range(8, 257, 8)


def shapes(B=2, T=1000, S=777, N=8, K=2, H=128, dtype=jnp.bfloat16, V=None):
    query = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    value = jax.ShapeDtypeStruct((B, S, K, V or H), dtype)
    return Operands(query, key, value)


def main_launch(plan):
    (launch,) = (launch for launch in plan.launches if launch.kernel.entry == "backward")
    return launch


def test_buffers_are_those_of_the_call_and_scratch_comes_last():
    plan = plan_backward(AttentionSpec(0.1), shapes(), H100)
    assert [(b.name, b.shape, b.dtype) for b in plan.operands] == [
        ("query", (2, 1000, 8, 128), "bfloat16"),
        ("key", (2, 777, 2, 128), "bfloat16"),
        ("value", (2, 777, 2, 128), "bfloat16"),
        ("out", (2, 1000, 8, 128), "bfloat16"),
        ("lse", (2, 8, 1000), "float32"),
        ("d_out", (2, 1000, 8, 128), "bfloat16"),
    ]
    assert [(b.name, b.shape, b.dtype) for b in plan.results] == [
        ("d_query", (2, 1000, 8, 128), "bfloat16"),
        ("d_key", (2, 777, 2, 128), "bfloat16"),
        ("d_value", (2, 777, 2, 128), "bfloat16"),
        ("lse_delta", (2, 8, 16, 2, 64), "float32"),
        ("dq_accum", (16, 16, 64 * 128), "float32"),
        ("next_tile", (1,), "int32"),
        ("d_key_sums", (2, 2, 14, 64 * 128), "float32"),
        ("d_value_sums", (2, 2, 14, 64 * 128), "float32"),
    ]


def test_scratch_of_many_heads_has_counters_of_finished_sums_of_dq():
    plan = plan_backward(AttentionSpec(0.1), shapes(B=64), H100)
    (slots,) = (b.shape[0] for b in plan.results if b.name == "dq_accum")
    assert slots < 64 * 8
    assert [(b.name, b.shape, b.dtype) for b in plan.results[3:]] == [
        ("lse_delta", (64, 8, 16, 2, 64), "float32"),
        ("dq_accum", (slots, 16, 64 * 128), "float32"),
        ("arrived", (64, 8, 4), "int32"),
        ("written", (64, 8), "int32"),
        ("next_job", (1,), "int32"),
        ("next_tile", (1,), "int32"),
    ]


def test_d_lse_is_an_operand_only_of_calls_that_return_lse():
    without = plan_backward(AttentionSpec(0.1), shapes(), H100)
    with_lse = plan_backward(AttentionSpec(0.1, return_residual=True), shapes(), H100)
    assert [b.name for b in with_lse.operands] == [b.name for b in without.operands] + ["d_lse"]
    assert with_lse.launches[0].by_path["d_lse"] == Pointer("d_lse")
    assert without.launches[0].by_path["d_lse"] is None


def test_survives_the_attribute():
    plan = plan_backward(AttentionSpec(0.1, 5, 0), shapes(H=80, dtype=jnp.float16), H100)
    assert launch_plan.load(launch_plan.dump(plan)) == plan


def test_kernels_depend_on_head_dim_dtype_and_whether_pairs_may_be_hidden():
    """And on the schedule, which depends on lengths and heads."""

    def kernels_of(spec, **sizes):
        return kernels(spec, shapes(**sizes), H100)

    full = kernels_of(AttentionSpec(0.1), B=1, T=1, N=2)
    assert kernels_of(AttentionSpec(-2.0, return_residual=True), B=3, T=4097, N=16) == full
    windowed = kernels_of(AttentionSpec(0.1, None, 0), B=1, T=1, N=2)
    assert kernels_of(AttentionSpec(-2.0, 7, 0, return_residual=True), B=3, T=4097, N=16) == windowed
    assert windowed[0] == full[0]  # the kernel ahead serves both
    assert [dict(kernel.defines)["ISOLATES"] for kernel in (full[1], windowed[1])] == [0, 1]


def test_rows_that_are_not_finite_are_looked_for_only_where_pairs_may_be_hidden():
    mask = jax.ShapeDtypeStruct((2, 1, 1, 777), jnp.bool_)
    bias = jax.ShapeDtypeStruct((2, 8, 1000, 777), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    full, window = AttentionSpec(0.1), AttentionSpec(0.1, 10, None)
    for spec, others, isolates in (
        (full, {}, False),
        (full, {"bias": bias}, False),
        (AttentionSpec(0.1, logits_soft_cap=3.0), {}, False),
        (window, {}, True),
        (AttentionSpec(0.1, 5000, 5000), {}, True),  # at other lengths it hides some
        (full, {"mask": mask}, True),
        (full, {"key_value_seq_lengths": lengths}, True),
    ):
        plan = plan_backward(spec, dataclasses.replace(shapes(), **others), H100)
        flags = [b.shape for b in plan.results if b.name == "spoiled"]
        assert flags == [(2, 8, 16)] * isolates
        preprocess, main = plan.launches[:2]
        assert preprocess.by_path["query"] == (Pointer("query") if isolates else None)
        assert [x.by_path["spoiled"] for x in (preprocess, main)] == [
            Pointer("spoiled") if isolates else None
        ] * 2


def test_additions_have_a_fixed_order_where_gradients_have_to_be_the_same_bits():
    def plan(right, deterministic, **sizes):
        return plan_backward(
            AttentionSpec(0.1, None, right, deterministic=deterministic), shapes(**sizes), H100
        )

    for right, head_dim in itertools.product((None, 0), (128, 256)):
        many = {"B": 32, "H": head_dim}
        default, fixed = plan(right, False, **many), plan(right, True, **many)
        buffers = {b.name: b for b in fixed.results}
        assert buffers["dq_semaphore"].shape == (32, 8, 16)
        assert buffers["dq_accum"].shape[0] == 32 * 8  # every head has its slot
        assert all(Pointer("dq_semaphore") in launch.arguments for launch in fixed.launches[:2])
        # The kernel ahead serves both.
        assert fixed.launches[0].kernel == default.launches[0].kernel
        assert fixed.launches[2].kernel.entry == "backward_postprocess"
        assert ("DETERMINISTIC", 1) in main_launch(fixed).kernel.defines
        assert ("DETERMINISTIC", 0) in main_launch(default).kernel.defines
        assert main_launch(fixed).grid == main_launch(default).grid

    def head_group(right, **sizes):
        return main_launch(plan(right, True, **sizes)).by_path["l2_head_group"]

    assert head_group(None, S=50_000) == head_group(None, S=20_000) == head_group(None, S=50_000, H=256) == 4
    # Two groups, of 64 heads or of 16 head shares, the last of which goes the other way.
    assert head_group(0, B=8, K=8) == 32
    assert head_group(0) == 8
    assert head_group(0, T=1 << 20, S=1 << 20) == 1


@pytest.mark.parametrize("right", (None, 0))
def test_lengths_leave_the_order_of_tiles(right):
    """They shorten all tiles of a head alike, or leave them empty. Segments make tiles differ."""
    given = shapes(B=16, T=512, S=512, N=16, K=16, H=64)
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    with_lengths = given.replace(query_seq_lengths=rows, key_value_seq_lengths=rows)
    ids = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    with_segments = given.replace(query_segment_ids=ids, key_value_segment_ids=ids)
    groups = [
        main_launch(plan_backward(AttentionSpec(0.1, None, right), x, H100)).by_path["l2_head_group"]
        for x in (given, with_lengths, with_segments)
    ]
    assert groups[0] == groups[1]
    assert groups[2] > 1


def test_sequences_of_a_row_stay_in_l2():
    """On an H100 groups of 4 to 8 heads took 0.87 to 0.89 of the time of 16 (docs/tuning/backward.md)."""
    given = shapes(B=2, T=8192, S=8192, N=32, K=8)
    ids = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    with_segments = given.replace(query_segment_ids=ids, key_value_segment_ids=ids)
    launched = main_launch(plan_backward(AttentionSpec(0.1, None, 0), with_segments, H100))
    assert 4 <= launched.by_path["l2_head_group"] <= 8
    # However long, or many, they are: some heads at a time.
    longer = shapes(T=1 << 20, S=1 << 20, N=8, K=8)
    ids = jax.ShapeDtypeStruct((1, 1 << 20), jnp.int32)
    longer = longer.replace(query_segment_ids=ids, key_value_segment_ids=ids)
    launched = main_launch(plan_backward(AttentionSpec(0.1, None, 0), longer, H100))
    assert 1 <= launched.by_path["l2_head_group"] <= 8


@pytest.mark.parametrize("head_dim", (64, 128))
def test_lists_are_scheduled_as_if_causal(head_dim):
    """In their order the longest come first, so that the last wave ends evenly, whatever heads it has."""
    given = shapes(B=4, T=4096, S=4096, N=16, K=16, H=head_dim)
    mask = jax_flash.BlockMask.from_blocks(jnp.tri(32, dtype=bool)[None, None], lengths=(4096, 4096))
    _, static, arrays = _function_arguments.operands(None, mask, (4,), (4096, 4096, 16))
    rows = {"query": given.query, "key": given.key, "value": given.value}
    masked = Operands.of(rows | {name: jax.typeof(x) for name, x in arrays.items()})
    launched = main_launch(plan_backward(AttentionSpec(0.1, block_mask=static), masked, H100))
    causal = main_launch(plan_backward(AttentionSpec(0.1, None, 0), given, H100))
    assert launched.by_path["l2_head_group"] == causal.by_path["l2_head_group"] > 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rate", (0.0, 0.1))
def test_tiles_fit_the_hardware(head_dim, rate):
    plan = plan_backward(AttentionSpec(0.1, dropout_rate=rate), shapes(H=head_dim), H100)
    main = main_launch(plan)
    assert main.shared_bytes <= 227 * 1024
    assert main.block == (512 if head_dim <= 128 else 384)
    for p in main.arguments:
        if isinstance(p, TensorMap):
            assert all(stride % 16 == 0 for stride in p.strides)
            assert all(0 < extent <= 256 for extent in p.box)
            assert p.box[0] * 2 == p.swizzle == 128
            assert p.sizes[0] == head_dim  # the padding is TMA's, not the array's


def test_kept_probabilities_are_divided_by_the_rate_in_force():
    """0.96 is not a multiple of 2**-15: 31457 / 2**15 of the probabilities are dropped."""
    preprocess, main, postprocess, postprocess_keys = plan_backward(
        AttentionSpec(0.1, dropout_rate=0.96), shapes(H=256), H100
    ).launches
    probability = 1 - 31457 / 2**15
    assert preprocess.by_path["kept"] == probability
    assert main.by_path["dropout.factor"] == 1 / probability
    assert postprocess.by_path["scale"] == postprocess_keys.by_path["scale"] == 0.1 * (1 / probability)
    assert postprocess_keys.by_path["value_scale"] == 1 / probability


@pytest.mark.parametrize("dims", list(itertools.product((8, 64, 96, 128, 192, 256), repeat=2)))
@pytest.mark.parametrize("deterministic", (False, True))
def test_values_may_have_a_head_dim_of_their_own(dims, deterministic):
    H, V = dims
    plan = plan_backward(AttentionSpec(0.1, deterministic=deterministic), shapes(H=H, V=V), H100)
    buffers = {b.name: b for b in (*plan.operands, *plan.results)}
    for name in ("value", "out", "d_out", "d_value"):
        assert buffers[name].shape[3] == V
    for name in ("query", "key", "d_query", "d_key"):
        assert buffers[name].shape[3] == H
    preprocess, main, *postprocess = plan.launches
    # Rows of out and dO; of dQ.
    assert preprocess.by_path["columns"] == V and all(
        launch.by_path["head_dim"] == H for launch in postprocess
    )
    maps = {p.buffer: p for p in main.arguments if isinstance(p, TensorMap)}
    assert {name for name, m in maps.items() if m.sizes[0] == V} >= {"value", "d_out", "d_value"}
    assert {name for name, m in maps.items() if m.sizes[0] == H} >= {"query", "key", "d_key"}
    assert main.shared_bytes <= 227 * 1024
    # The larger one decides on the tile.
    larger = plan_backward(
        AttentionSpec(0.1, deterministic=deterministic), shapes(H=max(dims), V=max(dims)), H100
    )
    assert main.block == main_launch(larger).block and main.grid == main_launch(larger).grid


def counts_tiles(plan):
    """Whether CTAs take tiles from a counter, which the kernel ahead sets to zero."""
    counter = any(b.name == "next_tile" for b in plan.results)
    assert all((Pointer("next_tile") in launch.arguments) == counter for launch in plan.launches[:2])
    return counter


def test_ctas_take_several_tiles_where_the_next_ones_can_be_loaded_meanwhile():
    many = shapes(S=50_000)
    for right in (None, 0):
        plan = plan_backward(AttentionSpec(0.1, None, right), many, H100)
        assert main_launch(plan).grid == (H100.sm_count, 1, 1)
    large = plan_backward(AttentionSpec(0.1, None, 0), shapes(S=50_000, H=256), H100)
    assert main_launch(large).grid == (math.ceil(50_000 / 128) * 2 * 2 * 2, 1, 1)


@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("right", (None, 0))
@pytest.mark.parametrize("S", (100, 50_000))  # fewer tiles than multiprocessors, and more
def test_tiles_that_wait_for_others_come_from_a_counter(S, right, head_dim):
    """Without it a kernel could wait for a CTA that isn't resident. Only split products that need no order
    don't wait."""
    for deterministic in (False, True):
        spec = AttentionSpec(0.1, None, right, deterministic=deterministic)
        assert counts_tiles(plan_backward(spec, shapes(S=S, H=head_dim), H100)) == (
            deterministic or head_dim <= 128
        )


@pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
@pytest.mark.parametrize("right", (None, 0))
def test_deterministic_sums_do_not_depend_on_how_many_multiprocessors_there_are(right, head_dim):
    """Persistent kernels start more CTAs on more of them: nothing else differs."""
    spec = AttentionSpec(0.1, None, right, deterministic=True)
    few, many = (
        plan_backward(spec, shapes(S=50_000, H=head_dim), dataclasses.replace(H100, sm_count=count))
        for count in (1, 132)
    )
    assert few.operands == many.operands and few.results == many.results

    def without_grid(plan):
        return [dataclasses.replace(launch, grid=()) for launch in plan.launches]

    assert without_grid(few) == without_grid(many)


def in_order(right=None, **sizes):
    return plan_backward(AttentionSpec(0.1, None, right, deterministic=True), shapes(**sizes), H100)


def sums_of(plan):
    """Sums of each block of dQ, which all kernels and scratch arrays of a plan agree on."""
    launches = [launch for launch in plan.launches if launch.kernel.entry != "backward_postprocess_keys"]
    (sums,) = {dict(launch.kernel.defines)["DQ_SUMS"] for launch in launches}
    semaphores, accum = (next(b for b in plan.results if b.name == x) for x in ("dq_semaphore", "dq_accum"))
    heads, T, head_dim = plan.results[0].shape[0] * plan.results[0].shape[2], *plan.results[0].shape[1::2]
    defines = dict(main_launch(plan).kernel.defines)
    blocks = sums * heads * math.ceil(T / defines["QUERIES"])
    assert math.prod(semaphores.shape) == blocks
    assert math.prod(accum.shape) == blocks * defines["QUERIES"] * math.ceil(head_dim / 16) * 16
    return sums


FEW = {"B": 1, "T": 4096, "S": 4096, "N": 2, "K": 2}


def test_blocks_of_dq_have_several_sums_where_few_heads_are_in_order():
    assert sums_of(in_order(**FEW)) == 8
    assert sums_of(in_order(**FEW | {"N": 8, "K": 8})) == 2
    assert sums_of(in_order(**FEW | {"B": 4, "N": 16, "K": 16})) == 1
    assert sums_of(in_order(right=0, **FEW)) == 1  # tiles start two blocks apart
    assert sums_of(in_order(right=4095, **FEW)) == 8  # as without a window
    assert sums_of(in_order(right=0, **FEW | {"T": 64, "S": 8192})) > 1  # all tiles start at the same block
    unordered = plan_backward(AttentionSpec(0.1), shapes(**FEW), H100)
    assert {dict(x.kernel.defines)["DQ_SUMS"] for x in unordered.launches} == {1}


@pytest.mark.parametrize("head_dim", (64, 80, 128, 256))
@pytest.mark.parametrize("heads", (1, 3, 8, 40))
@pytest.mark.parametrize("T", (64, 1000, 4096, 16384))
def test_sums_of_dq_take_no_more_than_gradients_or_32_mib(T, heads, head_dim):
    sizes = {"B": 1, "T": T, "S": 16384, "N": 2 * heads, "K": heads, "H": head_dim}
    plan = in_order(**sizes)
    (accum,) = (b for b in plan.results if b.name == "dq_accum")
    gradients = sum(2 * b.bytes for b in plan.results if b.name in ("d_query", "d_key", "d_value"))
    assert sums_of(plan) == 1 or accum.bytes <= max(gradients, 32 << 20)


def test_only_sums_that_no_tile_stores_first_are_zeroed():
    """A tile stores where every sum has one. So zeros are written only where a block may have fewer tiles."""

    def zeroed_heads(plan):
        return plan.launches[0].by_path["zeroed_heads"]

    assert sums_of(in_order(**FEW)) > 1 and zeroed_heads(in_order(**FEW)) == 0
    # The last block sees the last key tile alone.
    spec = AttentionSpec(0.1, left=0, deterministic=True)
    few_tiles = plan_backward(spec, shapes(**FEW), H100)
    assert sums_of(few_tiles) > 1 and zeroed_heads(few_tiles) == 2
    # Consumers of split products only add.
    assert zeroed_heads(in_order(**FEW | {"H": 256})) == 2
    # A head's only tile stores, where it visits every block.
    one_tile = FEW | {"S": 77}
    assert zeroed_heads(plan_backward(AttentionSpec(0.1), shapes(**one_tile), H100)) == 0
    assert zeroed_heads(plan_backward(AttentionSpec(0.1), shapes(**FEW), H100)) == 2
    assert zeroed_heads(plan_backward(AttentionSpec(0.1, right=0), shapes(**one_tile), H100)) == 2
    assert zeroed_heads(plan_backward(AttentionSpec(0.1), shapes(**one_tile | {"H": 256}), H100)) == 2


def test_kernels_of_a_kind_are_those_of_any_length_and_number_of_heads():
    spec = AttentionSpec(0.1, deterministic=True)
    found = set(kernels(spec, shapes(B=1, T=128, S=128), H100))
    for sizes in (FEW, FEW | {"N": 8, "K": 8}, FEW | {"B": 32}, FEW | {"T": 16384, "N": 1, "K": 1}):
        plan = plan_backward(spec, shapes(**sizes), H100)
        assert found >= {launch.kernel for launch in plan.launches}, sums_of(plan)
    assert {dict(kernel.defines)["DQ_SUMS"] for kernel in found} == {1, 2, 4, 8}
    unordered = kernels(AttentionSpec(0.1), shapes(), H100)
    assert {dict(kernel.defines)["DQ_SUMS"] for kernel in unordered} == {1}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_tile_has_a_cta_and_every_block_scratch(head_dim):
    plan = plan_backward(AttentionSpec(0.1), shapes(B=8, S=129, H=head_dim), H100)
    shape = backward_tiles.tile(head_dim)
    blocks = math.ceil(1000 / shape.queries)
    preprocess, main, *postprocess = plan.launches
    arguments = main.by_path
    units = arguments["shares_of_head"] * arguments["parts_of_blocks"]
    assert arguments["head_shares"] * arguments["group"] == 8
    # One a key head, not a query head, or one a unit; two where they share a tile.
    assert main.cluster == (2 if head_dim > 128 else 1)
    tiles = math.ceil(129 / shape.keys) * 2 * 8
    assert main.grid == (min(tiles * units, H100.sm_count) * main.cluster, 1, 1)
    assert preprocess.grid == (blocks * 8 * 8, 1, 1)
    grids = {launch.kernel.entry: launch.grid for launch in postprocess}
    # At head dim 64 the main kernel writes dQ.
    assert grids.get("backward_postprocess") == (preprocess.grid if head_dim > 64 else None)
    groups = tiles * shape.keys // 64
    assert grids.get("backward_postprocess_keys") == ((2 * groups, 1, 1) if units > 1 else None)
    buffers = {b.name: b for b in plan.results}
    assert buffers["lse_delta"].shape[2:] == (blocks, 2, shape.queries)
    assert buffers["dq_accum"].shape[1:] == (blocks, shape.queries * head_dim)


def test_a_side_of_the_window_that_hides_nothing_is_out_of_reach():
    def window(spec, **sizes):
        arguments = main_launch(plan_backward(spec, shapes(**sizes), H100)).by_path
        return [arguments["left"], arguments["right"]]

    left, right = window(AttentionSpec(0.1))
    assert left == right
    # As far as lengths go that fit 32 bits with it, on either side of the diagonal.
    assert left >= 2**28 and 2 * left + 2**28 < 2**31
    assert window(AttentionSpec(0.1, 63, 63), T=64, S=64) == [left, right]
    assert window(AttentionSpec(0.1, 5, 0)) == [5, 0]
    assert window(AttentionSpec(0.1, -3, None)) == [-3, right]
