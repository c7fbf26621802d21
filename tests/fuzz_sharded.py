"""Random calls on sharded sequences, on simulated devices, against the definition.

    python tests/fuzz_sharded.py --draws 500 --jobs 2 --out benchmarks/results/fuzz_sharded_cpu.json

Drawn are options, lengths, heads, the strategy, the order of tokens and 2, 4 or 8 devices
(`sharded_calls.drawn_call`). Output, residual and gradients of `context_parallel_attention` are compared as
everywhere in the tests; a call may be refused, with its reason.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

DRAWS_UNTIL_CLEARED = 20  # as compiled programs are kept for ever


def outcome(seed: int) -> str:
    """passed, refused, or what failed."""
    import jax
    import sharded_calls

    if seed % DRAWS_UNTIL_CLEARED == 0:
        jax.clear_caches()
    case, calls = sharded_calls.drawn_call(seed)
    try:
        calls.check(case)
    except NotImplementedError as refusal:
        return "refused" if "run this call" in str(refusal) else f"{case}: {refusal}"
    except Exception as error:  # the other draws run nevertheless
        return f"{case}: {type(error).__name__}: {str(error)[:500]}"
    return "passed"


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--first", type=int, default=1000, help="seed of the first draw")
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60, help="no draw begins later")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    started, counts, failures = time.time(), {"passed": 0, "refused": 0}, []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
        seeds = range(options.first, options.first + options.draws)
        for place in range(0, len(seeds), options.jobs):
            if time.time() - started > 60 * options.minutes:
                break
            batch = seeds[place : place + options.jobs]
            for seed, found in zip(batch, pool.map(outcome, batch), strict=True):
                if found in counts:
                    counts[found] += 1
                else:
                    failures.append({"seed": seed, "error": found})
                    print(f"seed {seed}: {found}", flush=True)
    print(f"{counts}, {len(failures)} failed, {time.time() - started:.0f} s")
    if options.out:
        import jax
        from run_environment import environment

        result = environment(jax.devices()[0]) | {"first_seed": options.first, "counts": counts}
        result |= {"failures": failures, "seconds": round(time.time() - started)}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
