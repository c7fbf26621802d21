"""Unpacks a varlen call: every sequence becomes a padded batch row with a length.

Implementations that take no offsets unpack. The rows are as long as the longest sequence, and their lengths
give each sequence its own alignment. The forward pass of such an implementation begins with

    if operands.query_offsets is not None:
        return _varlen_unpacking.forward(forward, spec, operands)

and its `supports` looks at `unpacked_shapes`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash._axes import axes_of
from jax_flash._spec import AttentionSpec, Gradients, Operands, batch_axis_may_be_one, sizes

OFFSETS = ("query_offsets", "key_value_offsets")


class Places(NamedTuple):
    """Where tokens are, `(B, tokens)` each. Of tokens of no sequence the first two may be anything."""

    sequence: jax.Array
    position: jax.Array  # in the sequence
    is_there: jax.Array  # whether it is of a sequence


@dataclasses.dataclass(frozen=True)
class TokenAxis:
    """The axis of queries or keys: P sequences in a row of `tokens`, or each in a row of `longest`."""

    offsets: jax.Array  # (B, P + 1)
    tokens: int
    longest: int

    def lengths(self) -> jax.Array:
        """The length of every sequence, `(B * P,)`."""
        return jnp.clip(jnp.diff(self.offsets), 0, self.longest).reshape(-1)

    def places(self) -> Places:
        def row(offsets: jax.Array) -> Places:
            token = jnp.arange(self.tokens, dtype=jnp.int32)
            # Unrolled, as each step of a loop would be a kernel of its own.
            sequence = jnp.searchsorted(offsets, token, side="right", method="scan_unrolled")
            sequence = sequence.astype(jnp.int32) - 1
            within = token - offsets[sequence]
            is_there = (sequence >= 0) & (sequence < offsets.size - 1) & (within < self.longest)
            return Places(sequence, within, is_there)

        return jax.vmap(row)(self.offsets)

    def unpack(self, x: jax.Array, axis: int, fill: float = 0) -> jax.Array:
        """`x (B, …)` as `(B * P, …)`, a row for each sequence with `fill` behind its tokens.

        Tokens lie along `axis`, counted without the batch.
        """
        within = jnp.arange(self.longest, dtype=jnp.int32)
        starts, ends = self.offsets[:, :-1, None], self.offsets[:, 1:, None]
        token = jnp.where(starts + within < ends, starts + within, self.tokens)

        def row(x: jax.Array, token: jax.Array) -> jax.Array:
            sequences = jnp.take(x, token, axis, mode="fill", fill_value=fill)
            return jnp.moveaxis(sequences, axis, 0)

        return _merge(jax.vmap(row)(x, token))

    def pack(self, x: jax.Array, axis: int, fill: float = 0) -> jax.Array:
        """The inverse of `unpack`: `x (B * P, …)` as `(B, …)`, with `fill` for tokens of no sequence."""
        batch, count = self.offsets.shape[0], self.offsets.shape[1] - 1

        places = self.places()
        unpacked = places.sequence * self.longest + places.position
        position = jnp.where(places.is_there, unpacked, count * self.longest)

        def row(x: jax.Array, position: jax.Array) -> jax.Array:
            x = _merge(jnp.moveaxis(x, 0, axis), axis)
            return jnp.take(x, position, axis, mode="fill", fill_value=fill)

        return jax.vmap(row)(x.reshape(batch, count, *x.shape[1:]), position)


def token_axes(spec: AttentionSpec, operands: Operands) -> tuple[TokenAxis, TokenAxis]:
    """The axes of queries and of keys of a varlen call."""
    n = sizes(operands)
    assert operands.query_offsets is not None and operands.key_value_offsets is not None
    assert spec.max_query_length is not None and spec.max_key_value_length is not None
    return (
        TokenAxis(operands.query_offsets, n.T, spec.max_query_length),
        TokenAxis(operands.key_value_offsets, n.S, spec.max_key_value_length),
    )


def unpack(spec: AttentionSpec, operands: Operands) -> tuple[AttentionSpec, Operands]:
    """The call in which every sequence is a batch row of its own."""
    queries, keys = token_axes(spec, operands)
    batch, count = queries.offsets.shape[0], queries.offsets.shape[1] - 1

    def unpack_one(name: str, x: jax.Array) -> jax.Array:
        if name == "batch_indices":  # a function's batch is the sequence
            return jnp.tile(jnp.arange(count, dtype=jnp.int32), batch)
        for letter, tokens in (("T", queries), ("S", keys)):
            if letter in axes_of(name):
                return tokens.unpack(x, axes_of(name).index(letter))
        if batch_axis_may_be_one(name) and x.shape[0] == 1:
            return x
        return jnp.repeat(x, count, axis=0, total_repeat_length=batch * count)

    rows = {name: unpack_one(name, x) for name, x in operands.present().items() if name not in OFFSETS}
    lengths = {"query_seq_lengths": queries.lengths(), "key_value_seq_lengths": keys.lengths()}
    rows = Operands.of(rows | lengths)
    return dataclasses.replace(spec, max_query_length=None, max_key_value_length=None), rows


def unpacked_shapes(
    spec: AttentionSpec, shapes: Operands[jax.ShapeDtypeStruct]
) -> tuple[AttentionSpec, Operands[jax.ShapeDtypeStruct]]:
    """The shapes of `unpack`'s result; those of a call without offsets as they are."""
    if shapes.query_offsets is None:
        return spec, shapes
    rows = jax.eval_shape(lambda operands: unpack(spec, operands)[1], shapes)
    return dataclasses.replace(spec, max_query_length=None, max_key_value_length=None), rows


def forward(run: Callable[..., Any], spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Runs `run`, an implementation's forward pass, on unpacked sequences, and packs its results."""
    queries, _ = token_axes(spec, operands)
    out, lse = run(*unpack(spec, operands))
    return queries.pack(out, axes_of("out").index("T")), queries.pack(
        lse, axes_of("lse").index("T"), -jnp.inf
    )


def backward(
    run: Callable[..., Gradients],
    spec: AttentionSpec,
    operands: Operands,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
) -> Gradients:
    """Runs `run`, an implementation's backward pass, on unpacked sequences, and packs its gradients."""
    queries, keys = token_axes(spec, operands)
    t_of_out, t_of_lse = axes_of("out").index("T"), axes_of("lse").index("T")
    gradients = run(
        *unpack(spec, operands),
        queries.unpack(out, t_of_out),
        queries.unpack(lse, t_of_lse, -jnp.inf),
        queries.unpack(d_out, t_of_out),
        None if d_lse is None else queries.unpack(d_lse, t_of_lse),
    )

    def of_all_sequences(gradient: Any, operand: jax.Array | None) -> Any:
        if gradient is None or operand is None or gradient.shape == operand.shape:
            return gradient
        return gradient.reshape(operand.shape[0], -1, *gradient.shape[1:]).sum(1)

    present = operands.present()
    return Gradients(
        query=queries.pack(gradients.query, axes_of("query").index("T")),
        key=keys.pack(gradients.key, axes_of("key").index("S")),
        value=keys.pack(gradients.value, axes_of("value").index("S")),
        alibi_slopes=of_all_sequences(gradients.alibi_slopes, operands.alibi_slopes),
        sinks=of_all_sequences(gradients.sinks, operands.sinks),
        captured={name: of_all_sequences(x, present[name]) for name, x in gradients.captured.items()},
    )


def _merge(x: jax.Array, axis: int = 0) -> jax.Array:
    """Two neighbouring axes as one."""
    merged = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], merged, *x.shape[axis + 2 :])
