"""Score functions against the options that do the same, on one GPU, forward and backward.

    python benchmarks/mods.py --out benchmarks/results/mods_h200.json

A soft cap, ALiBi slopes, and a bias of a head and a distance, each as an option of `flash_attention` and as a
`score_mod`; and a plain call with a function that changes nothing. In shuffled rounds. Each row has a
variant, a pass and the kernel time of both, and their ratio: 1.00 is as fast, more is faster.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import record
import rounds
import timing
from calls import Case

import jax_flash

CASES = [
    Case(4, 4096, 4096, 16, 16, 128, causal=True),
    Case(4, 4096, 4096, 16, 16, 128),
    Case(4, 4096, 4096, 32, 32, 64, causal=True),
    Case(4, 4096, 4096, 8, 8, 256, causal=True),
    Case(1, 16384, 16384, 32, 8, 128, causal=True),
]
FURTHEST = 128  # the distance beyond which a relative bias is the same
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


VARIANTS: dict[str, Callable[[Case, jax.Array], dict[str, Arguments]]] = {
    "plain": plain,
    "soft cap": soft_cap,
    "ALiBi": alibi,
    "relative bias": relative_bias,
}


def attend(variant: str, form: str, case: Case, implementation: str) -> Callable[..., jax.Array]:
    """A function of what is learned, query, key and value."""

    def run(learned, query, key, value):
        arguments = VARIANTS[variant](case, learned)[form]
        return jax_flash.flash_attention(
            query, key, value, is_causal=case.causal, implementation=implementation, **arguments
        )

    return run


def programs(variant: str, form: str, case: Case, implementation: str) -> dict[str, tuple]:
    """By pass, forward and the backward pass alone, compiled, with its arguments."""
    learned = 0.1 * jax.random.normal(jax.random.key(9), (case.heads, 2 * FURTHEST + 1))
    inputs = learned, *case.inputs()
    d_out = jax.random.normal(jax.random.key(3), inputs[1].shape, inputs[1].dtype)
    run = attend(variant, form, case, implementation)
    forward = jax.jit(run).lower(*inputs).compile()
    _, vjp = jax.vjp(run, *inputs)
    backward = jax.jit(lambda vjp, d_out: vjp(d_out)).lower(vjp, d_out).compile()
    return {"forward": (forward, *inputs), "backward": (backward, vjp, d_out)}


def rows(variant: str, case: Case, of_rounds: int, implementation: str) -> list[dict]:
    try:
        compiled = {form: programs(variant, form, case, implementation) for form in (OPTION, FUNCTION)}
    except Exception as error:  # the other variants are measured nevertheless
        return [{"error": record.error(error)}]
    found = []
    for direction in ("forward", "backward"):
        times: dict[str, list[float]] = {OPTION: [], FUNCTION: []}
        for order in rounds.orders(list(times), of_rounds):
            for form in order:
                times[form].append(timing.milliseconds(*compiled[form][direction]))
        medians = {form: statistics.median(x) for form, x in times.items()}
        found.append({"pass": direction} | medians | {"ratio": medians[OPTION] / medians[FUNCTION]})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--match", default="", help="cases that have one of these texts, by commas")
    parser.add_argument("--rounds", type=int, default=rounds.ROUNDS)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    result = record.environment() | {"rows": []}
    print(record.heading(result))
    for case in CASES:
        if not any(text in str(case) for text in options.match.split(",")):
            continue
        for variant in VARIANTS:
            for row in rows(variant, case, options.rounds, options.implementation):
                row = {"case": str(case), "variant": variant} | row
                result["rows"].append(row)
                told = f"{row['ratio']:.3f}" if "ratio" in row else row["error"][:160]
                print(f"{row['case']:36} {variant:14} {row.get('pass', ''):9} {told}", flush=True)
        if options.out:
            record.write(result, options.out)


if __name__ == "__main__":
    main()
