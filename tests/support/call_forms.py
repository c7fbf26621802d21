"""A call in one of the forms that programs have: over several batch axes or none, under a transform.

Inputs and results keep one batch axis outside, so that every form of a call has the same definition.
"""

import functools

import jax
from attention_case import block_mask_of, score_mod_of

import jax_flash

RANK_WITH_BATCH_AXIS = {
    **dict.fromkeys(("query", "key", "value", "bias", "mask"), 4),
    **dict.fromkeys(("query_segment_ids", "key_value_segment_ids", "alibi_slopes"), 2),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), 2),
    **dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), 1),
}


def attend(arguments, **options):
    """`flash_attention`; or `flash_attention_varlen` over the batch axes, which it doesn't take itself."""
    arguments = dict(arguments)
    if "score_table" in arguments:
        options["score_mod"] = score_mod_of(arguments.pop("score_table"))
    if "key_ids" in arguments:
        *_, queries, heads, _ = arguments["query"].shape
        options["block_mask"] = block_mask_of(arguments.pop("key_ids"), queries, heads)
    if "cu_seqlens_q" not in arguments:
        return jax_flash.flash_attention(**arguments, **options)
    axes = arguments["query"].ndim - 3

    def is_per_row(name):
        return name in RANK_WITH_BATCH_AXIS and arguments[name].ndim == RANK_WITH_BATCH_AXIS[name] - 1 + axes

    per_row = {name: x for name, x in arguments.items() if is_per_row(name)}
    shared = {name: x for name, x in arguments.items() if name not in per_row}

    def packed(per_row):
        return jax_flash.flash_attention_varlen(**per_row, **shared, **options)

    for _ in range(axes):
        packed = jax.vmap(packed)
    return packed(per_row)


def in_form_of(case, attend):
    """`attend(arguments, return_residual)` as the case has it called."""
    transform = {"jit": _as_it_is, "checkpoint": jax.checkpoint, "vmap": _vmap, "scan": _scan}[case.transform]

    def call(arguments, return_residual):
        static = {name: x for name, x in arguments.items() if not hasattr(x, "shape")}
        per_row, shared = {}, {}
        for name, x in arguments.items():
            if name in static:
                continue
            if getattr(x, "ndim", None) != RANK_WITH_BATCH_AXIS.get(name):
                shared[name] = x
            elif x.shape[0] == case.B:
                per_row[name] = x.reshape(case.batch_shape + x.shape[1:])
            else:  # an axis of size 1 for each batch axis that the call has
                axes = len(case.batch_shape) - (case.transform in ("vmap", "scan"))
                shared[name] = x.reshape((1,) * axes + x.shape[1:])

        def one(per_row, shared):
            return attend(static | per_row | shared, return_residual=return_residual)

        results = transform(one)(per_row, shared)
        return jax.tree.map(lambda x: x.reshape(case.B, *x.shape[len(case.batch_shape) :]), results)

    return call


def _as_it_is(function):
    return function


def _vmap(function):
    return jax.vmap(function, in_axes=(0, None))


def _scan(function):
    @functools.wraps(function)
    def scanned(per_row, shared):
        return jax.lax.scan(lambda carry, row: (carry, function(row, shared)), None, per_row)[1]

    return scanned
