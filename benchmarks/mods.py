"""Functions of scores and masks against the options that do the same, on one GPU, forward and backward.

    python benchmarks/mods.py --out benchmarks/results/mods_h200.json

A soft cap, ALiBi slopes, and a bias of a head and a distance, each as an option of `flash_attention` and as a
`score_mod`; and a plain call with a function that changes nothing. Causality, a window, a prefix, documents,
a dilated window and the neighborhood of a grid as options and as a `block_mask`; of these, prefix, dilated
window and neighborhood have no option but a boolean mask. The time of a call with a block
mask has that of its lists. Two variants have no option: a soft cap that each head learns stands against one
that it doesn't, and the relative bias in a fixed order against any order. In shuffled rounds. Each row has a
variant, a pass and the kernel time of both, and their ratio: 1.00 is as fast, more is faster.

`--merge FILE` adds times of PyTorch's flex_attention, measured by torch_flex.py on the same GPU just before:
`to_flex` is its time over that of the function.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import passes
import record
import rounds
from calls import Case
from cases import FUNCTION_SHAPES, FURTHEST, has_one

import jax_flash

CASES = [
    Case(batch, length, length, *heads_and_dim, causal=causal)
    for batch, length, *heads_and_dim, causal in FUNCTION_SHAPES
]
OPTION, FUNCTION = "option", "function"

Arguments = dict[str, Any]
"""Of `flash_attention`, beside query, key and value."""


def plain(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    return {OPTION: {}, FUNCTION: {"score_mod": lambda score, b, h, q, k: score}}


def soft_cap(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    return {
        OPTION: {"logits_soft_cap": 30.0},
        FUNCTION: {"score_mod": lambda score, b, h, q, k: 30 * jnp.tanh(score / 30)},
    }


def alibi(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    slopes = learned[:, 0]
    return {
        OPTION: {"alibi_slopes": slopes},
        FUNCTION: {"score_mod": lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)},
    }


def relative_bias(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    """The option takes an array of all pairs."""

    def of_distance(score, b, h, q, k):
        return score + learned[h, jnp.clip(q - k, -FURTHEST, FURTHEST) + FURTHEST]

    queries, keys = jnp.arange(case.queries)[:, None], jnp.arange(case.keys)
    place = jnp.clip(queries - keys, -FURTHEST, FURTHEST) + FURTHEST
    return {OPTION: {"bias": learned[:, place]}, FUNCTION: {"score_mod": of_distance}}


def learned_cap(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    """Its gradient depends on the score. There is no such option: the other form's caps have no gradient."""

    def of(caps):
        return {"score_mod": lambda score, b, h, q, k: caps[h] * jnp.tanh(score / caps[h])}

    caps = 30 + learned[:, 0]
    return {OPTION: of(jax.lax.stop_gradient(caps)), FUNCTION: of(caps)}


def bias_in_order(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    """The relative bias with the same bits each time, against the same function in any order."""
    function = relative_bias(case, learned)[FUNCTION]
    return {OPTION: function, FUNCTION: function | {"deterministic": True}}


def causal_mask(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    return {OPTION: {"is_causal": True}, FUNCTION: {"mask_mod": jax_flash.masks.CausalMask()}}


def window_mask(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    sides = (case.keys // 8 - 1, 0)
    return {OPTION: {"local_window_size": sides}, FUNCTION: {"mask_mod": jax_flash.masks.LocalMask(sides)}}


def prefix_mask(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    prefix = jax_flash.masks.PrefixLMMask(case.keys // 4)
    queries, keys = jnp.arange(case.queries)[:, None], jnp.arange(case.keys)
    return {OPTION: {"mask": (keys <= queries) | (keys < case.keys // 4)}, FUNCTION: {"mask_mod": prefix}}


def document_mask(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    """Causal within eight documents of unequal lengths."""
    starts = jnp.asarray([0, 3, 4, 9, 10, 11, 13, 15]) * case.keys // 16
    ids = jnp.sum(jnp.arange(case.keys)[:, None] >= starts, axis=1, dtype=jnp.int32)
    of_all = jnp.broadcast_to(ids, (case.batch, case.keys))
    option = {"query_segment_ids": of_all, "key_value_segment_ids": of_all, "is_causal": True}
    mask = jax_flash.masks.DocumentMask(ids) & jax_flash.masks.CausalMask()
    return {OPTION: option, FUNCTION: {"mask_mod": mask}}


def dense(mask: Callable[..., jax.Array], case: Case) -> jax.Array:
    """All pairs of a mask that is alike for all heads."""
    of_keys = jax.vmap(mask, (None, None, None, 0))
    return jax.vmap(of_keys, (None, None, 0, None))(0, 0, jnp.arange(case.queries), jnp.arange(case.keys))


def dilated_mask(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    """Every fourth key, up to an eighth of all on either side."""
    mask = jax_flash.masks.DilatedMask(case.keys // 32, dilation=4)
    return {OPTION: {"mask": dense(mask, case)}, FUNCTION: {"mask_mod": mask}}


def neighborhood_mask(case: Case, learned: jax.Array) -> dict[str, Arguments]:
    """The nearest 13 × 13 tokens of a square grid."""
    side = math.isqrt(case.keys)
    mask = jax_flash.masks.NeighborhoodMask((side, side), min(13, side))
    return {OPTION: {"mask": dense(mask, case)}, FUNCTION: {"mask_mod": mask}}


VARIANTS: dict[str, Callable[[Case, jax.Array], dict[str, Arguments]]] = {
    "plain": plain,
    "soft cap": soft_cap,
    "ALiBi": alibi,
    "relative bias": relative_bias,
    "learned cap": learned_cap,
    "relative bias in order": bias_in_order,
    "causal mask": causal_mask,
    "window mask": window_mask,
    "prefix mask": prefix_mask,
    "document mask": document_mask,
    "dilated mask": dilated_mask,
    "neighborhood mask": neighborhood_mask,
}
"""What makes the arguments of both forms. Those with masks are for cases that aren't causal."""
MASKS = tuple(name for name in VARIANTS if name.endswith("mask"))


def block_mask(variant: str, form: str, case: Case) -> jax_flash.BlockMask | None:
    """The mask of a variant's function, made once and given to the call."""
    if form == OPTION or variant not in MASKS:
        return None
    arguments = VARIANTS[variant](case, jnp.zeros((case.heads, 2 * FURTHEST + 1)))[form]
    return jax_flash.create_block_mask(arguments["mask_mod"], None, None, case.queries, case.keys)


def attend(variant: str, form: str, case: Case, implementation: str) -> Callable[..., jax.Array]:
    """A function of the block mask, what is learned, query, key and value."""

    def run(mask, learned, query, key, value):
        arguments = {"is_causal": case.causal} | VARIANTS[variant](case, learned)[form]
        arguments.pop("mask_mod", None)
        return jax_flash.flash_attention(
            query, key, value, block_mask=mask, implementation=implementation, **arguments
        )

    return run


def programs(variant: str, form: str, case: Case, implementation: str) -> passes.Programs:
    learned = 0.1 * jax.random.normal(jax.random.key(9), (case.heads, 2 * FURTHEST + 1))
    given, inputs = [block_mask(variant, form, case)], [learned, *case.inputs()]
    return passes.compiled(attend(variant, form, case, implementation), given, inputs)


def rows(variant: str, case: Case, of_rounds: int, implementation: str) -> list[dict]:
    try:
        compiled = {form: programs(variant, form, case, implementation) for form in (OPTION, FUNCTION)}
    except Exception as error:  # the other variants are measured nevertheless
        return [{"error": record.error(error)}]
    return [
        {"pass": direction} | times | {"ratio": times[OPTION] / times[FUNCTION]}
        for direction, times in passes.milliseconds(compiled, of_rounds).items()
    ]


def flex_times(rows: Sequence[dict]) -> dict[tuple[str, str, str], float]:
    """By case, variant and pass; a variant that flex_attention refuses has none."""
    return {
        (row["case"], row["variant"], row["pass"]): row["milliseconds"]
        for row in rows
        if "milliseconds" in row
    }


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--variants", default="", help="variants that have one of these texts, by commas")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--merge", type=Path, help="JSON of torch_flex.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    theirs = flex_times(record.other_rows(options.merge, result["device"]))
    print(record.heading(result))
    for case in CASES:
        if not has_one(str(case), options.match):
            continue
        for variant in VARIANTS:
            if (case.causal and variant in MASKS) or not has_one(variant, options.variants):
                continue
            for row in rows(variant, case, options.rounds, options.implementation):
                row = {"case": str(case), "variant": variant} | row
                flex = theirs.get((row["case"], variant, row.get("pass")))
                if flex is not None and FUNCTION in row:
                    row |= {"flex_attention": flex, "to_flex": flex / row[FUNCTION]}
                result["rows"].append(row)
                told = f"{row['ratio']:.3f}" if "ratio" in row else row["error"][:160]
                told += f"  {row['to_flex']:.2f} of flex_attention" if "to_flex" in row else ""
                print(f"{row['case']:36} {variant:22} {row.get('pass', ''):9} {told}", flush=True)
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
