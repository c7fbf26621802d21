r"""Serve requests that arrive at random, by continuous batching over a paged key-value cache.

    python examples/train_gpt.py --checkpoint-dir=runs/gpt/checkpoints
    python examples/serve.py --checkpoint-dir=runs/gpt/checkpoints

Random weights serve to measure speed. On a GPU, the size of GPT-2 medium:

    python examples/serve.py --random --layers=24 --heads=16 --width=1024 --requests=512 --rate=200 \
        --rows=64 --prefix-length=512 --prompt-length=512 --tokens=512 --pages=2048 --page-size=64 \
        --step-tokens=1024

The same requests are served a second time batch by batch. The table compares throughput, latency (from a
request's arrival to its last token) and the time to its first token. Compilation is left out.
"""

import dataclasses

import data
import engine
import jax
import loading
import run_record
import workload
from batches import BatchServer
from command_line import flag, run
from engine import Capacity, Engine
from workload import Completion


@dataclasses.dataclass(frozen=True)
class Settings(loading.ModelSettings):
    """One run; each field is a flag of the program."""

    text: str | None = flag(
        None, "File or folder that prompts are cut from. Default: the Python standard library's source."
    )
    requests: int = flag(48, "Requests.")
    rate: float = flag(100.0, "Requests per second that arrive on average; 0: all at once.")
    prefix_length: int = flag(128, "Bytes that all prompts begin with.")
    prompt_length: int = flag(32, "Most bytes of its own that a prompt has after them; at least 1.")
    tokens: int = flag(128, "Most bytes to generate for a request; their mean is about a quarter.")

    rows: int = flag(8, "Sequences that run at once, in both ways of serving.")
    step_tokens: int = flag(64, "Tokens of a step in which prompts have a part.")
    pages: int = flag(128, "Pages of the cache.")
    page_size: int = flag(16, "Tokens in a page.")
    out: str | None = flag(None, "JSON file for the figures.")


ROWS = {
    "tokens_per_second": ("tokens/s", 1),
    "latency_mean": ("latency, mean, ms", 1e3),
    "latency_p95": ("latency, 95th percentile, ms", 1e3),
    "first_token_mean": ("time to first token, mean, ms", 1e3),
    "first_token_p95": ("time to first token, 95th percentile, ms", 1e3),
}
"""For each figure, its name in the table and its factor there."""


def serve(settings: Settings) -> dict[str, list[Completion]]:
    """Run `settings` in both ways, print and record their figures. Returns what each way of serving gave."""
    for name in "requests", "prompt_length", "tokens", "page_size":
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    for name in "rate", "prefix_length", "seed":
        if not getattr(settings, name) >= 0:  # NaN isn't either
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(settings, name)}")
    longest = settings.prefix_length + settings.prompt_length + settings.tokens - 1
    capacity = Capacity(
        settings.rows,
        settings.step_tokens,
        settings.pages,
        settings.page_size,
        pages_per_sequence=-(-longest // settings.page_size),
    )
    if capacity.pages_per_sequence > settings.pages:
        raise ValueError(
            f"requests of up to {longest} tokens need {capacity.pages_per_sequence} pages of "
            f"{settings.page_size}, and --pages={settings.pages}"
        )
    corpus = data.load(settings.text)
    requests = workload.random_requests(
        corpus.validation,
        count=settings.requests,
        rate=settings.rate,
        prefix_length=settings.prefix_length,
        prompt_length=settings.prompt_length,
        tokens=settings.tokens,
        seed=settings.seed,
    )
    model = loading.load(settings)
    print(f"model: {model.name}, on {jax.devices()[0].device_kind}", flush=True)

    continuous = Engine(model, capacity)
    completions = {"continuous": engine.serve(continuous, requests, workload.WallClock())}
    prompts = sum(len(request.prompt) for request in requests)
    print(
        f"{prompts} tokens of prompts, {continuous.shared_tokens / prompts:.0%} of them in shared pages; "
        f"{sum(request.tokens for request in requests)} tokens to generate"
    )
    batches = BatchServer(
        model, settings.rows, settings.prefix_length + settings.prompt_length, settings.tokens
    )
    completions["batches"] = batches.serve(requests, workload.WallClock())

    same = sum(a.tokens == b.tokens for a, b in zip(*completions.values(), strict=True))
    print(f"{same} of {len(requests)} requests got the same tokens in both ways\n")
    figures = {case: workload.figures(of_case) for case, of_case in completions.items()}
    print(table(figures))
    if settings.out is not None:
        described = ("requests", "rate", "prefix_length", "prompt_length", "tokens")
        facts = {name: getattr(settings, name) for name in described} | {
            "capacity": dataclasses.asdict(capacity),
            "shared_tokens": continuous.shared_tokens,
            "same_tokens": same,
        }
        rows = [{"case": case} | of_case for case, of_case in figures.items()]
        run_record.write(settings.out, rows, model=model.name, **facts)
    return completions


def table(figures: dict[str, dict[str, float]]) -> str:
    """The figures of each way of serving, in columns."""
    lines = [f"{'':42}" + "".join(f"{case:>12}" for case in figures)]
    for key, (name, factor) in ROWS.items():
        lines.append(
            f"{name:42}" + "".join(f"{of_case[key] * factor:12,.1f}" for of_case in figures.values())
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run(Settings, serve)
