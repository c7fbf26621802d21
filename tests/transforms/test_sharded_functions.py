"""score_mod and block_mask of sharded sequences, by each strategy: what they give against one device.

Functions see positions in the whole sequences. Each function here gives something else at other positions,
and so does each mask.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transform_cases as cases
from exhaustive import thorough
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from pallas_lowering import only_lowering
from sharded_calls import axis_of_sequences, reorder, restore, sequence_mesh
from sharded_jit import KINDS, mesh_of, put
from strict_settings import SETTINGS, setting

import jax_flash
from jax_flash.pallas import compat, lowering

B, T, N, K, H = 2, 64, 4, 2, 8


def normal(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def relative_position(table, gate):
    """Of all four indices."""
    return lambda score, b, h, q, k: score * gate[b] + table[h, jnp.clip(q - k, -40, 40) + 40]


def soft_cap(caps):
    """A learned one, whose gradient depends on the score."""
    return lambda score, b, h, q, k: caps[h] * jnp.tanh((score + 0.05 * q) / caps[h])


def of_tokens(rows, columns):
    """An element of each query and one of each key, as they are numbered in the sequences."""
    return lambda score, b, h, q, k: score * rows[b, q] + columns[k]


def with_a_sort(rows, columns):
    """No graph of scalars, so JAX evaluates it."""
    return lambda score, b, h, q, k: jnp.sort(jnp.stack([score, rows[q] + h, columns[k] - 2]))[1]


SCORE_MODS = {
    "relative_position": (relative_position, ((N, 81), (B,))),
    "soft_cap": (soft_cap, ((N,),)),
    "of_tokens": (of_tokens, ((B, T), (2 * T,))),
    "with_a_sort": (with_a_sort, ((T,), (2 * T,))),
}

IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (B, 2 * T)), axis=-1), jnp.int32)
MASK_MODS = {
    "causal": (lambda b, h, q, k: q >= k, None, None),
    "window": (lambda b, h, q, k: (q >= k) & (q - k < 21), None, None),
    "documents": (lambda b, h, q, k: IDS[b, q] == IDS[b, k], B, None),
    "of_heads": (lambda b, h, q, k: jnp.abs(q - k) < 7 * (h + 1), None, N),
    "late_queries": (lambda b, h, q, k: (q > 50) & (k < 9), None, None),
}
"""Each with the batch rows and heads for which it differs."""


@dataclasses.dataclass(frozen=True)
class Case:
    score_mod: str | None = None
    mask: str | None = None  # of MASK_MODS, or "blocks" for `BlockMask.from_blocks`
    block_size: int = 8  # divides the chunks of all devices; 12 and 40 don't
    keys: int = T
    dtype: str = "float32"
    options: tuple[str, ...] = ()

    def arrays(self):
        """query, key, value, and what score_mod captures."""
        shapes = SCORE_MODS[self.score_mod][1] if self.score_mod else ()
        query, key, value = (
            normal(B, n, heads, H) for n, heads in ((T, N), (self.keys, K), (1 + self.keys, K))
        )
        own = (x.astype(self.dtype) for x in (query, key, value[:, 1:]))
        return *own, tuple(1 + normal(*shape, dtype=self.dtype) / 4 for shape in shapes)

    def block_mask(self):
        if self.mask is None:
            return None
        if self.mask == "blocks":
            layout = np.random.default_rng(1).random(
                (B, N, T // self.block_size, self.keys // self.block_size)
            )
            return jax_flash.BlockMask.from_blocks(jnp.asarray(layout < 0.4), block_size=self.block_size)
        function, rows, heads = MASK_MODS[self.mask]
        size = self.block_size, self.block_size + 4
        return jax_flash.create_block_mask(
            function, rows, heads, T, self.keys, block_size=size if self.block_size == 12 else size[0]
        )

    def attend(self, call, query, key, value, captured):
        """`call` of whole arrays, in the sequences' own order."""
        options = dict(implementation="xla") | dict.fromkeys(self.options, True)
        if self.score_mod is not None:
            options["score_mod"] = SCORE_MODS[self.score_mod][0](*captured)
        return call(query, key, value, block_mask=self.block_mask(), **options)

    def with_gradients(self, call, *arrays):
        out, vjp = jax.vjp(functools.partial(self.attend, call), *arrays)
        return out, vjp(jnp.sin(out))


ALL_INDICES = "relative_position"
SHORT = [
    Case(ALL_INDICES, "window"),
    Case("soft_cap", "documents", keys=2 * T),
    Case("of_tokens", "of_heads", keys=2 * T, block_size=4),
    Case(None, "blocks"),
    Case(ALL_INDICES, "late_queries", 12, options=("is_causal",)),
]
LONG = thorough(
    Case("of_tokens", None, options=("is_causal",)),
    Case("with_a_sort", "causal", 40),
    Case(None, "documents", 64),
    Case(None, "causal", dtype="bfloat16"),
    Case(ALL_INDICES, None, keys=2 * T),
    Case("of_tokens", "blocks", 4, keys=2 * T, options=("deterministic",)),
)


def by_turns(layouts):
    """Each layout with every third case, and with all cases in the exhaustive tests."""
    pairs = itertools.product(range(len(layouts)), range(len(SHORT)))
    marks = ((), pytest.mark.exhaustive, pytest.mark.exhaustive)
    short = [pytest.param(layouts[i], SHORT[j], marks=marks[(i + j) % 3]) for i, j in pairs]
    return short + [pytest.param(x, *case.values, marks=case.marks) for x in layouts for case in LONG]


def check(case, results, arrays):
    """Against one device. A gradient of a captured array is a sum over all devices."""
    expected = jax.jit(functools.partial(case.with_gradients, jax_flash.flash_attention))(*arrays)
    tolerance = 2e-5 if case.dtype == "float32" else 0.04

    def close(x, y):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1, np.abs(y).max()))

    jax.tree.map(close, results, expected)


# Within shard_map -----------------------------------------------------------------------------------------


def context_parallel(shards, strategy, kind, check_vma=True):
    """A function of whole arrays, as `flash_attention` is."""
    count, axis = int(np.prod(shards)), axis_of_sequences(shards)

    def call(query, key, value, **options):
        of_shards = functools.partial(
            jax_flash.context_parallel_attention,
            axis_name=axis,
            strategy=strategy,
            load_balance=kind,
            **options,
        )
        spec = P(None, axis)
        mapped = jax.shard_map(
            of_shards, mesh=sequence_mesh(shards), in_specs=spec, out_specs=spec, check_vma=check_vma
        )
        return restore(mapped(*(reorder(x, 1, count, kind) for x in (query, key, value))), 1, count, kind)

    return call


LAYOUTS = [
    ("all_gather", None),
    ("all_gather", "zigzag"),
    ("ring", None),
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("ulysses", "zigzag"),
    ("ulysses", "striped"),
]


@pytest.mark.parametrize(("layout", "case"), by_turns(LAYOUTS), ids=str)
def test_within_shard_map(layout, case):
    call = context_parallel(4, *layout, check_vma=case.score_mod != "with_a_sort")
    arrays = case.arrays()
    if layout == ("ring", "striped") and case.mask == "blocks":
        with pytest.raises(NotImplementedError, match="every 4th of the queries is not of whole blocks"):
            jax.eval_shape(functools.partial(case.attend, call), *arrays)
        return
    check(case, jax.jit(functools.partial(case.with_gradients, call))(*arrays), arrays)


@pytest.mark.parametrize("name", ["of_tokens", *thorough("soft_cap", "relative_position")])
def test_a_score_mod_with_a_narrow_window(name):
    """No keys but those that the window reaches are sent, within shard_map and under jit."""
    case, window = Case(name), dict(local_window_size=(9, 3))
    arrays, mesh = case.arrays(), sequence_mesh(4)

    def of(call):
        return jax.jit(functools.partial(case.with_gradients, functools.partial(call, **window)))

    expected = of(jax_flash.flash_attention)(*arrays)
    by_jit = functools.partial(jax_flash.flash_attention, context_parallel="all_gather")
    on_mesh = [put(x, mesh, P(None, "sequence")) for x in arrays[:3]]
    captured = jax.tree.map(lambda x: put(x, mesh, P()), arrays[3])
    for call in (context_parallel(4, "all_gather", None), by_jit):
        compiled = of(call).lower(*on_mesh, captured).compile()
        cases.assert_close(compiled(*on_mesh, captured), expected)
        assert not re.search(r" all-gather\(", compiled.as_text())


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize(
    "calls", [((2, 2), "zigzag"), *thorough(((4, 2), None), ((2, 4), "zigzag"))], ids=str
)
def test_over_two_mesh_axes(strategy, calls):
    """Ulysses over the second one gives each device heads of its own."""
    shards, kind = calls
    case = Case(ALL_INDICES, "of_heads")
    call, arrays = context_parallel(shards, strategy, kind), case.arrays()
    check(case, jax.jit(functools.partial(case.with_gradients, call))(*arrays), arrays)


@pytest.mark.parametrize("layout", [("ring", "zigzag"), *thorough(("all_gather", None))], ids=str)
def test_without_the_check_of_types_and_outside_of_jit(layout):
    case = SHORT[0]
    call, arrays = context_parallel(2, *layout, check_vma=False), case.arrays()
    check(case, case.with_gradients(call, *arrays), arrays)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_arguments_of_shard_map(strategy):
    """A mask that is one, and a captured array that is sharded with the batch: rows count from 0 on each."""
    case, mesh, spec = (
        Case(ALL_INDICES, "window"),
        mesh_of(dict(b=2, sequence=2), KINDS[0]),
        P("b", "sequence"),
    )

    def local(query, key, value, captured, mask):
        return jax_flash.context_parallel_attention(
            query, key, value, axis_name="sequence", strategy=strategy, block_mask=mask,
            score_mod=relative_position(*captured),
        )  # fmt: skip

    in_specs = (spec, spec, spec, (P(), P("b")), P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=spec)

    def with_gradients(mask, *arrays):
        out, vjp = jax.vjp(lambda *arrays: mapped(*arrays, mask), *arrays)
        return out, vjp(jnp.sin(out))

    arrays = case.arrays()
    check(case, jax.jit(with_gradients)(case.block_mask(), *arrays), arrays)


# Under a sharded jit ---------------------------------------------------------------------------------------


def under_jit(case, strategy, axes, kind, arrays):
    """Sequences over `s`; batch and heads over `b` and `n` if there are such axes."""
    mesh = mesh_of(axes, kind)
    spec = P(*(axis if axis in axes else None for axis in "bsn"))
    *own, captured = arrays
    own = [put(x, mesh, spec) for x in own]
    call = functools.partial(jax_flash.flash_attention, context_parallel=strategy)
    with jax.set_mesh(mesh):
        captured = jax.tree.map(lambda x: put(x, mesh, P()), captured)
        lowered = jax.jit(functools.partial(case.with_gradients, call)).lower(*own, captured)
        compiled = lowered.compile()
        return compiled(*own, captured), compiled.as_text()


MOVES = {"all_gather": "all-gather", "ring": "collective-permute", "ulysses": "all-to-all"}


SHARDED = [
    ("all_gather", dict(s=4), KINDS[0]),
    ("ring", dict(b=2, s=2, n=2), KINDS[0]),
    ("all_gather", dict(b=2, s=2, n=2), KINDS[1]),
    ("ring", dict(s=4), KINDS[1]),
]


@pytest.mark.parametrize(("sharded", "case"), by_turns(SHARDED), ids=str)
def test_under_jit(sharded, case):
    if case.score_mod == "with_a_sort" and sharded[2] == AxisType.Explicit:
        pytest.skip("JAX doesn't evaluate its jaxpr on an Explicit mesh")
    arrays = case.arrays()
    results, text = under_jit(case, *sharded, arrays)
    check(case, results, arrays)
    # Floats alone: a mask that is made in the same program is an all-gather of its own.
    moves = {name for name, move in MOVES.items() if re.search(rf"= b?f(?:16|32)\[\S* {move}\(", text)}
    assert moves == {sharded[0]}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_each_device_has(kind):
    """Nothing is gathered: a device has a chunk of the queries, and all keys."""
    case, mesh = Case(ALL_INDICES, "documents", 12), mesh_of(dict(s=4), kind)
    arrays = case.arrays()
    with jax.set_mesh(mesh):
        query = put(arrays[0], mesh, P(None, "s"))
        rest = jax.tree.map(lambda x: put(x, mesh, P()), arrays[1:])
        compiled = jax.jit(functools.partial(case.with_gradients, jax_flash.flash_attention)).lower(
            query, *rest
        )
        compiled = compiled.compile()
        check(case, compiled(query, *rest), arrays)
    assert not any(re.search(rf" {move}\(", compiled.as_text()) for move in MOVES.values())


@pytest.mark.parametrize("strategy", ["all_gather", *thorough("ring")])
def test_vmap_and_scan(strategy):
    """Over captured arrays, in a loop of layers."""
    case, mesh = Case(ALL_INDICES, "window"), mesh_of(dict(s=4), KINDS[0])
    query, key, value, _ = case.arrays()
    tables, gates = normal(3, N, 81), 1 + normal(3, B) / 4

    def layers(call, query, key, value, tables, gates):
        def layer(x, captured):
            return x + case.attend(call, x, key, value, captured), None

        looped = jax.lax.scan(jax.checkpoint(layer), query, (tables, gates))[0]
        mapped = jax.vmap(lambda *captured: case.attend(call, query, key, value, captured))(tables, gates)
        return jnp.sum(jnp.sin(looped)) + jnp.sum(jnp.sin(mapped))

    def of(call):
        return jax.jit(jax.grad(functools.partial(layers, call), argnums=range(5)))

    expected = of(jax_flash.flash_attention)(query, key, value, tables, gates)
    sharded = [put(x, mesh, P(None, "s")) for x in (query, key, value)]
    call = functools.partial(jax_flash.flash_attention, context_parallel=strategy)
    cases.assert_close(of(call)(*sharded, tables, gates), expected, 1e-4)


MIXED = ("dtype promotion strict", "rank promotion raise")
STRICT = sorted(set(SETTINGS) - {"disable jit", *MIXED})


@pytest.mark.parametrize("layout", [("ring", "zigzag"), *thorough(("all_gather", None))], ids=str)
@pytest.mark.parametrize("option", [*MIXED, *thorough(*STRICT)])
def test_strict_settings(option, layout):
    """Within shard_map, and without a load balance also under jit."""
    case, mesh = Case(ALL_INDICES, "window", 12), sequence_mesh(2)
    *own, captured = case.arrays()
    arrays = (
        *(put(x, mesh, P(None, "sequence")) for x in own),
        jax.tree.map(lambda x: put(x, mesh, P()), captured),
    )
    calls = [context_parallel(2, *layout)]
    if layout[1] is None:
        calls.append(functools.partial(jax_flash.flash_attention, context_parallel=layout[0]))
    for call in calls:
        with setting(option):
            jax.block_until_ready(jax.jit(functools.partial(case.with_gradients, call))(*arrays))


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_no_tracer_stays(strategy):
    case, call = Case(ALL_INDICES, "window"), context_parallel(2, strategy, "zigzag")
    arrays = case.arrays()
    with jax.checking_leaks():
        under_jit(case, strategy, dict(s=2), KINDS[0], arrays)
        if strategy == "ring":  # JAX says so of the checkpoint of any all-gather within shard_map
            jax.jit(functools.partial(case.with_gradients, call))(*arrays)


# What steps compute ----------------------------------------------------------------------------------------


def test_a_ring_skips_steps_in_which_a_block_mask_hides_all():
    """It has a condition, which the kinds of the step's blocks decide."""
    mask = jax_flash.BlockMask.from_blocks(jnp.eye(4, dtype=bool)[None, None], block_size=16)
    call, (query, key, value, _) = context_parallel(4, "ring", None), Case().arrays()

    def attend(call, *args):
        return call(*args, block_mask=mask)

    with_mask, without = (
        str(jax.make_jaxpr(function)(query, key, value))
        for function in (functools.partial(attend, call), call)
    )
    assert "cond[" in with_mask and "cond[" not in without
    expected = attend(jax_flash.flash_attention, query, key, value)
    cases.assert_close(jax.jit(functools.partial(attend, call))(query, key, value), expected)


def lowered_for_cuda(loss, *arrays):
    with jax_flash.planned_for("sm_90a"):
        return jax.jit(jax.grad(loss, argnums=range(len(arrays)))).trace(*arrays).lower(
            lowering_platforms=("cuda",)
        ).as_text()  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS[:5], ids=str)
def test_steps_share_kernels_of_cuda(layout):
    """Where chunks start is an operand, so the kernels of all steps and chunks are compiled once."""
    call = context_parallel(4, *layout)

    def loss(query, key, value, table):
        score_mod = lambda score, b, h, q, k: score + table[h, jnp.clip(q - k, -40, 40) + 40]  # noqa: E731
        mask = jax_flash.create_block_mask(MASK_MODS["window"][0], None, None, T, T, block_size=16)
        out = call(query, key, value, score_mod=score_mod, block_mask=mask, implementation="cuda")
        return jnp.sum(out.astype(jnp.float32))

    arrays = [normal(1, T, heads, 64, dtype="bfloat16") for heads in (N, K, K)]
    text = lowered_for_cuda(loss, *arrays, normal(N, 81))
    for name in ("forward", "backward"):
        calls = re.findall(rf"custom_call @jax_flash_{name}\(.*?\{{(.*)\}} :", text)
        assert calls and len(set(calls)) == 1, name
        assert "user_mask_mod.cuh" in calls[0] and "user_score_mod.cuh" in calls[0]


@pytest.mark.parametrize("strategy", ["all_gather", *thorough("ring")])
def test_by_pallas(strategy):
    """Triton's kernels, in the interpreter."""
    case = Case("soft_cap", "window", 16, dtype="bfloat16")
    arrays = case.arrays()

    def call(*args, **options):
        return context_parallel(2, strategy, None, False)(*args, **options | {"implementation": "pallas"})

    with only_lowering(lowering.TRITON), compat.interpret():
        results = case.with_gradients(call, *arrays)
    check(case, results, arrays)


# What is refused -------------------------------------------------------------------------------------------

STRIPES = (
    'load_balance "striped" under a causal mask, window, ALiBi, score_mod or block_mask goes with "ring"'
)
BLOCKS = 'block_mask has no mask function, and a chunk of {} is not of whole blocks of {}; .* "ulysses" takes'


def blocks_of(queries, keys):
    layout = jnp.ones((1, 1, -(-T // queries), -(-T // keys)), bool)
    return jax_flash.BlockMask.from_blocks(layout, lengths=(T, T), block_size=(queries, keys))


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (("all_gather", "striped"), dict(score_mod=lambda score, *_: score + 1), STRIPES),
        (("all_gather", "striped"), dict(block_mask=blocks_of(8, 8)), STRIPES),
        (("all_gather", "zigzag"), dict(block_mask=blocks_of(12, 8)), BLOCKS.format("8 queries", 12)),
        (("ring", None), dict(block_mask=blocks_of(8, 12)), BLOCKS.format("16 keys", 12)),
        (("ring", "striped"), dict(block_mask=blocks_of(64, 16)), BLOCKS.format("every 4th of the q.*", 64)),
    ],
)  # fmt: skip
def test_refused_within_shard_map(layout, options, message):
    call, (query, key, value, _) = context_parallel(4, *layout), Case().arrays()
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda *args: call(*args, **options), query, key, value)


def test_whole_keys_may_have_any_blocks():
    """An all-gather has chunks of the queries alone."""
    call, arrays = context_parallel(4, "all_gather", "zigzag"), Case().arrays()
    case, mask = Case(), blocks_of(8, 12)

    def masked(call):
        return lambda *args, **options: call(*args, **options | {"block_mask": mask})

    results = jax.jit(functools.partial(case.with_gradients, masked(call)))(*arrays)
    expected = jax.jit(functools.partial(case.with_gradients, masked(jax_flash.flash_attention)))(*arrays)
    cases.assert_close(results, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_refused_under_jit(strategy, kind):
    mesh = mesh_of(dict(s=4), kind)
    mask = blocks_of(12, 8)
    arrays = [put(x, mesh, P(None, "s")) for x in Case().arrays()[:3]]
    error = NotImplementedError if kind == AxisType.Explicit else jax.errors.JaxRuntimeError
    call = functools.partial(jax_flash.flash_attention, context_parallel=strategy, block_mask=mask)
    with jax.set_mesh(mesh), pytest.raises(error, match=BLOCKS.format("16 queries", 12)):
        jax.jit(call).lower(*arrays).compile()


def test_a_mask_of_other_lengths():
    """It is that of the whole sequences."""
    call, (query, key, value, _) = context_parallel(4, "ring", None), Case().arrays()
    mask = jax_flash.create_block_mask(lambda b, h, q, k: q >= k, None, None, T // 4, T // 4)
    with pytest.raises(ValueError, match=r"block_mask must be of T = 64 queries and S = 64 keys"):
        jax.eval_shape(lambda *args: call(*args, block_mask=mask), query, key, value)
