"""Arguments of `context_parallel_attention`, orders of tokens, and which strategy takes a call."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import AXIS, arrays, count, program, sequence_mesh, sharded_call

import jax_flash
from jax_flash import _dispatch, xla
from jax_flash._device import H100
from jax_flash._mask import Window
from jax_flash._spec import AttentionSpec, Operands, Sizes
from jax_flash.context_parallel import gather, halo, load_balance, ring, strategy
from jax_flash.context_parallel.load_balance import Order
from jax_flash.context_parallel.sharded import LENGTHS, Sharded
from jax_flash.context_parallel.strategy import STRATEGIES, Work


def of_window(left, right=0, T=64, shards=4, kind=None, lengths=()):
    spec = AttentionSpec(1.0, left, right)
    return Sharded(spec, AXIS, Order(kind, shards), T, T, has_alibi=False, lengths=lengths)


def test_a_causal_window_needs_the_steps_that_it_reaches():
    assert [ring.steps(of_window(left)) for left in (0, 1, 16, 17, 40, None)] == [1, 2, 2, 3, 4, 4]
    assert ring.steps(of_window(1, right=1)) == 4
    assert ring.steps(of_window(1, kind="zigzag")) == 4
    assert ring.steps(of_window(1, lengths=LENGTHS)) == 4


@pytest.mark.parametrize("T", [56, 64, 72])
@pytest.mark.parametrize(("shards", "kind"), [(1, None), (2, None), (4, None), (2, "zigzag"), (4, "zigzag")])
def test_the_edges_of_a_window_have_all_that_queries_see(T, shards, kind):
    """Of 64 keys. The first chunk and the last one see nothing of each other, whose positions they take."""
    S, distance, chunks = 64, np.arange(64) - (np.arange(T)[:, None] + 64 - T), shards * (2 if kind else 1)
    narrow = 0
    for window in itertools.product((-1, 0, 1, 3, 5, 9, 20, 40), repeat=2):
        of = Sharded(AttentionSpec(1.0, *window), AXIS, Order(kind, shards), T, S, False, ())
        edges, sees = halo.edges_of(of), (-window[0] <= distance) & (distance <= window[1])
        if edges is None:
            continue
        narrow += 1
        for chunk in range(chunks):
            rows, columns = (np.arange(n // chunks) + chunk * n // chunks for n in (T, S))
            covered = np.isin(np.arange(S), columns) & np.isin(np.arange(T), rows)[:, None]
            for edge in edges:
                neighbour = chunk + edge.side
                of_edge = np.ix_(
                    rows[edge.first_query :][: edge.rows],
                    np.arange(edge.rows) + edge.first_key + neighbour % chunks * S // chunks,
                )
                if 0 <= neighbour < chunks:
                    covered[of_edge] = True
                else:
                    assert not sees[of_edge].any()
            assert not (sees & ~covered)[rows].any()
    assert narrow > 1 or shards == 1


def test_what_a_narrow_window_gathers():
    def gathered(*args, **options):
        return gather.gathered_keys(of_window(*args, **options))

    assert gathered(3) == 3 and gathered(3, right=2) == 5
    assert gathered(3, lengths=LENGTHS) == 3
    assert gathered(3, lengths=LENGTHS[:1]) == gathered(3, lengths=LENGTHS[1:]) == 48
    assert gathered(3, kind="zigzag") == 6 and gathered(3, right=2, kind="zigzag") == 10
    assert gathered(17) == gathered(9, kind="zigzag") == gathered(3, kind="striped") == gathered(None) == 48


@pytest.mark.parametrize("kind", load_balance.KINDS)
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_orders(kind, shards):
    tokens = 4 * shards
    x = jnp.arange(2 * tokens).reshape(2, tokens)
    for axis, array in ((1, x), (0, x.T), (-1, x)):
        there = jax_flash.reorder_for_load_balance(array, axis, shards, kind)
        np.testing.assert_array_equal(jax_flash.restore_order(there, axis, shards, kind), array)
    order = Order(kind, shards)
    expected = [order.positions(device, 4) for device in range(shards)]
    np.testing.assert_array_equal(there[0], np.concatenate(expected))
    for device, positions in enumerate(expected):
        late = 2 * shards - 1 - device
        of_zigzag = [2 * device, 2 * device + 1, 2 * late, 2 * late + 1]
        of_stripes = [device + shards * i for i in range(4)]
        np.testing.assert_array_equal(positions, of_zigzag if kind == "zigzag" else of_stripes)


@pytest.mark.parametrize("kind", [None, "zigzag"])
def test_the_number_of_each_chunk(kind):
    order = Order(kind, 3)
    chunks = [(shard, index) for shard in range(3) for index in range(order.chunks_per_device)]
    numbers = [order.number(*chunk) for chunk in chunks]
    assert sorted(numbers) == list(range(len(chunks)))
    assert [tuple(map(int, order.holder(jnp.int32(number)))) for number in numbers] == chunks


def test_orders_of_arrays_without_elements():
    assert jax_flash.reorder_for_load_balance(jnp.zeros((0, 8, 3)), 1, 2, "zigzag").shape == (0, 8, 3)


@pytest.mark.parametrize("function", [jax_flash.reorder_for_load_balance, jax_flash.restore_order])
def test_malformed_orders(function):
    x = jnp.arange(12)
    with pytest.raises(ValueError, match="divisible by 16 chunks, two for each of 8 devices; got 12 "):
        function(x, 0, 8, "zigzag")
    with pytest.raises(ValueError, match="divisible by 5 devices; got 12 tokens: pad them to 15"):
        function(x, 0, 5, "striped")
    with pytest.raises(ValueError, match='kind must be "zigzag" or "striped"'):
        function(x, 0, 4, "zig")
    with pytest.raises(ValueError, match="axis must be one of x, int32"):
        function(x, 1, 4, "zigzag")
    with pytest.raises(ValueError, match="shards must be at least 1"):
        function(x, 0, 0, "zigzag")
    with pytest.raises(TypeError, match="x must be an array"):
        function([1, 2], 0, 1, "zigzag")


MALFORMED = {
    "axis": (ValueError, "axis_name must be an axis of the surrounding", dict(axis_name="rows")),
    "axes": (ValueError, "axis_name must be a mesh axis, or", dict(axis_name=("a", "b", AXIS))),
    "equal axes": (ValueError, "axis_name must be a mesh axis, or", dict(axis_name=(AXIS, AXIS))),
    "strategy": (ValueError, 'strategy must be "auto" or "ring" or', dict(strategy="star")),
    "load_balance": (ValueError, 'load_balance must be None or "zigzag" or', dict(load_balance="none")),
    "odd": (ValueError, "queries of all devices .* 12 tokens: pad them to 16", dict(load_balance="zigzag")),
    "heads": (NotImplementedError, "4 query heads must be divisible by the 8 devices", dict(shards=8)),
    "stripes": (
        NotImplementedError,
        '"all_gather" can\'t run this call: load_balance "striped"',
        dict(strategy="all_gather", load_balance="striped", is_causal=True),
    ),
    "striped_window": (
        NotImplementedError,
        'strategy "ring" can.t run .* a window with two sides',
        dict(strategy="ring", load_balance="striped", is_causal=True, local_window_size=3),
    ),
    "striped_alibi": (
        NotImplementedError,
        "no strategy can run this call: ring: alibi_slopes .* ulysses: the 4 query heads .* all_gather: ",
        dict(strategy="auto", load_balance="striped", shards=8, alibi_slopes=jnp.ones(4)),
    ),
    "bias": (
        ValueError,
        r"bias must be broadcastable to \(\*B, N, T, S / 4\) = \(2, 4, 12, 3\), .* or \(\*B, N, T / 4, S\) = "
        r"\(2, 4, 3, 12\); got float32 \(1, 4, 12, 12\)",
        dict(bias=jnp.zeros((1, 4, 12, 12))),
    ),
    "bias_along_keys": (
        ValueError,
        r"bias must be broadcastable to \(\*B, N, T, S / 4\), .* = \(2, 4, 12, 3\); "
        r"got float32 \(3, 4, 12, 3\)",
        dict(bias=jnp.zeros((3, 4, 12, 3))),
    ),
    "bias_of_all_heads": (
        NotImplementedError,
        "bias must have an axis of 4 heads, or one row for all queries",
        dict(bias=jnp.zeros((2, 1, 3, 12))),
    ),
    "lengths": (ValueError, r"key_value_seq_lengths must have shape", dict(key_value_seq_lengths=[1, 2, 3])),
    "alignment": (
        NotImplementedError,
        'alignment must be "bottom_right"',
        dict(alignment="top_left", key_value_seq_lengths=[1, 2]),
    ),
    "dropout": (ValueError, "dropout_key must be a key", dict(dropout_rate=0.5)),
    "implementation": (NotImplementedError, '"cuda" can.t run', dict(implementation="cuda")),
}  # fmt: skip


@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_calls(what):
    error, message, options = MALFORMED[what]
    options = dict(strategy="ulysses", axis_name=AXIS, shards=4) | options
    shards = options.pop("shards")
    call = functools.partial(jax_flash.context_parallel_attention, **options)
    mapped = jax.shard_map(call, mesh=sequence_mesh(shards), in_specs=P(None, AXIS), out_specs=P(None, AXIS))
    with pytest.raises(error, match=message):
        jax.eval_shape(mapped, *arrays(T=12 if shards == 4 else 16))


def test_outside_of_a_mesh():
    with pytest.raises(ValueError, match="axis_name must be an axis of the surrounding"):
        jax_flash.context_parallel_attention(*arrays(), axis_name=AXIS)


def test_which_kernels_take_a_diagonal():
    query, key, value = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays(H=64))
    shapes = Operands(query, key, value, diagonal=jax.ShapeDtypeStruct((1, 1), jnp.int32))
    reasons = _dispatch.reasons(AttentionSpec(1.0, right=0), shapes, H100)
    assert all(reasons[name] is None for name in ("cuda", "pallas", "xla"))
    for name in ("cuda", "pallas"):
        far = _dispatch.reason(name, AttentionSpec(1.0, left=2**29), shapes, H100)
        assert "a window's sides are limited" in far


class TestAuto:
    def work(self, tokens=1024, shards=8, N=32, K=8, H=128, steps=None, visible=0.5):
        local = Sizes(1, tokens, tokens, N, K, H, H)
        return Work(local, shards, steps or shards, itemsize=2, visible=visible)

    def test_bytes_of_each_strategy(self):
        work = self.work(tokens=1, shards=4, N=8, K=2, H=10)
        keys = 2 * 20  # elements
        assert strategy.exposed_bytes("all_gather", work) == 3 * (2 * 2 + 4) * keys
        assert strategy.exposed_bytes("ulysses", work) == 0.75 * 2 * 2 * (8 * 20 + 4 * 20)
        # Nearly all of it, as a step of one token has nothing to hide it behind.
        assert 0.9 < strategy.exposed_bytes("ring", work) / ((3 * 2 * 2 + 4 * 4) * keys) < 1

    def test_long_sequences_hide_a_ring(self):
        assert strategy.exposed_bytes("ring", self.work(tokens=65536)) == 0
        assert strategy.exposed_bytes("ring", self.work(tokens=512)) > 0

    def test_a_ring_adds_up_the_results_of_its_steps(self):
        """Measured for these heads: on two devices an all-gather is faster, on four Ulysses is."""
        two, four = self.work(tokens=16384, shards=2), self.work(tokens=32768, shards=4)
        assert strategy.combined_bytes("ring", two) == 4 * 16384 * 32 * 256
        assert strategy.combined_bytes("ring", four) == 3 * 4 * 32768 * 32 * 256
        assert not strategy.combined_bytes("all_gather", two) and not strategy.combined_bytes("ulysses", two)
        assert strategy.cheapest(two) == "all_gather"
        assert strategy.cheapest(four) == "ulysses"

    def test_as_many_key_heads_as_query_heads_go_round(self):
        work = self.work(tokens=16384, shards=2, K=32)
        assert strategy.cheapest(work, ("ring", "all_gather")) == "ring"

    def test_long_sequences_on_several_hosts_go_round(self):
        """Where Ulysses has too few heads, an all-gather's bytes would take a third of the time."""
        work = self.work(tokens=16384, shards=64)
        assert strategy.cheapest(work, ("ring", "all_gather")) == "ring"
        within_a_host = dataclasses.replace(work, shards=8, steps=8)
        assert strategy.cheapest(within_a_host, ("ring", "all_gather")) == "all_gather"

    def test_short_ones_with_many_key_heads_exchange_heads(self):
        assert strategy.cheapest(self.work(tokens=128, K=32)) == "ulysses"

    def test_few_key_heads_are_gathered_or_passed_on(self):
        work = self.work(tokens=16, shards=2, N=32, K=1)
        assert strategy.cheapest(work) != "ulysses"
        assert strategy.cheapest(work, ("ulysses", "all_gather")) == "all_gather"

    def test_a_window_shortens_a_ring(self):
        long, short = self.work(tokens=2048, K=32), self.work(tokens=2048, K=32, steps=2)
        assert strategy.cost("ring", short) < strategy.cost("ring", long) / 6
        assert strategy.cheapest(short, ("ring", "all_gather")) == "ring"

    def test_a_narrow_window_gathers_what_it_reaches(self):
        """A ring would send whole shards, beside few products."""
        few = dataclasses.replace(self.work(tokens=65536, steps=2), gathered=512, visible=513 / 131072)
        keys = 512 * 8 * 256  # elements
        assert strategy.exposed_bytes("all_gather", few) == (2 * 2 + 4) * keys
        assert strategy.cheapest(few) == "all_gather"
        text = program(sharded_call(4, local_window_size=(3, 0)), *arrays(T=64))
        assert re.search(r" = f32\[2,2,3,2,8\]\S* collective-permute", text)  # keys and values, 3 rows

    def test_devices_that_wait_cost_as_bytes_do(self):
        """A causal mask leaves the last of eight devices 1.875 times the mean of the pairs."""
        work = dataclasses.replace(self.work(tokens=65536), busiest=1.875)
        waiting = 0.875 * 3.5 * 2 * 32 * 65536**2 * 256 * 8 * 0.5
        for name in STRATEGIES:
            sent = strategy.exposed_bytes(name, work) + strategy.combined_bytes(name, work)
            waits = 0 if name == "ulysses" else waiting
            assert strategy.cost(name, work) == pytest.approx(sent * strategy.FLOPS_PER_BYTE + waits)
        assert strategy.cheapest(work) == "ulysses"

    def test_one_device_moves_nothing(self):
        assert all(strategy.exposed_bytes(name, self.work(shards=1)) == 0 for name in STRATEGIES)

    @pytest.mark.parametrize(("heads", "expected"), [(4, "all-to-all"), (3, "all-gather")])
    def test_takes_a_strategy_that_can(self, heads, expected):
        text = program(sharded_call(4, is_causal=True), *arrays(T=8, N=heads, K=heads))
        assert count(text, expected)


@pytest.mark.parametrize(
    ("options", "queries"),
    [
        ({"is_causal": True}, [(24, (1, 2))]),
        ({"local_window_size": (40, 0)}, [(24, (1, 2))]),
        ({"is_causal": True, "key_value_seq_lengths": np.array([96, 90])}, [(12, (2, 1))]),
        ({"score_mod": lambda score, b, h, q, k: score + q - k}, [(12, None)]),
        ({}, [(24, None)]),
    ],
    ids=["causal", "window", "lengths", "function", "any order"],
)
def test_an_all_gather_of_zigzag_calls_once_where_it_can(monkeypatch, options, queries):
    """The queries of a call, and the shape of its diagonals. Calls that are alike are traced once."""
    seen, forward = [], xla.forward

    def recorded(spec, operands):
        seen.append((operands.query.shape[1], None if operands.diagonal is None else operands.diagonal.shape))
        return forward(spec, operands)

    monkeypatch.setattr(xla, "forward", recorded)
    call = sharded_call(
        4, strategy="all_gather", load_balance="zigzag", implementation="xla", check_vma=False, **options
    )
    jax.jit(call).lower(*arrays(T=96))
    assert seen == queries


def test_a_window_of_stripes_is_that_of_one_side():
    order = Order("striped", 4)
    assert order.local_window(Window(None, 5)) == Window(None, 0)
    assert order.local_window(Window(3, None)) == Window(0, None)
    assert Order("zigzag", 4).local_window(Window(3, 5)) == Window(3, 5)
