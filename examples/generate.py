r"""Generate text with what `train_gpt.py` trained: prefill, then decoding with a key-value cache.

    python examples/train_gpt.py --checkpoint-dir=runs/gpt/checkpoints
    python examples/generate.py --checkpoint-dir=runs/gpt/checkpoints --prompt="def " --check --temperature=0

Random weights serve to measure speed. On a GPU, the size of GPT-2 medium:

    python examples/generate.py --random --layers=24 --heads=16 --width=1024 --batch=8 \
        --prompt-length=1024 --tokens=1024

All sequences of the batch continue one prompt; they differ if the temperature is above 0. The rates leave out
compilation.
"""

import dataclasses
import time
from typing import NamedTuple

import inference
import jax
import jax.numpy as jnp
import loading
import numpy as np
import run_record
import tqdm
from command_line import flag, run
from inference import Sampling

ROUNDING = {"float32": 1e-4, "bfloat16": 0.3}
"""Logits this close may change order between a run with a cache and one without."""

CACHE_IN_8_BITS = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True)
class Settings(loading.ModelSettings):
    """One run; each field is a flag of the program."""

    prompt: str = flag("def ", "What the text starts with.")
    prompt_length: int | None = flag(None, "Repeat or cut the prompt to this many bytes.")
    tokens: int = flag(200, "Bytes to generate.")
    batch: int = flag(1, "Sequences to generate at once.")
    temperature: float = flag(0.7, "Temperature of sampling; 0 takes the most likely byte.")
    top_p: float = flag(1.0, "Sample from the fewest bytes whose probabilities add up to this.")
    cache_dtype: str | None = flag(
        None, f"Of the keys and values in the cache: {CACHE_IN_8_BITS} halves them. By default the model's."
    )
    tokens_per_report: int = flag(32, "Decoding steps in one compiled loop, between updates of the bar.")
    check: bool = flag(False, "Compare with full recomputation. Needs --temperature=0.")
    out: str | None = flag(None, "JSON file for the rates.")


class Generated(NamedTuple):
    prompt: np.ndarray  # (length,) int32
    tokens: np.ndarray  # (batch, tokens) int32
    prefill_rate: float  # tokens per second, of the whole batch
    decode_rate: float


def generate(settings: Settings) -> Generated:
    """Run `settings`: print the text and the rates, check and record them if asked to."""
    prompt = _prompt(settings)
    for name in "tokens", "batch", "tokens_per_report":
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    if settings.check and settings.temperature != 0:
        raise ValueError(f"--check needs --temperature=0, got {settings.temperature}")
    if settings.check and settings.cache_dtype is not None:
        raise ValueError(f"--check needs a cache of the model's dtype, got {settings.cache_dtype}")
    sampling = Sampling(settings.temperature, settings.top_p)
    model = loading.load(settings)
    if settings.cache_dtype not in (None, CACHE_IN_8_BITS, model.config.dtype):
        raise ValueError(
            f"--cache-dtype must be {CACHE_IN_8_BITS} or the model's dtype, {model.config.dtype}, "
            f"got {settings.cache_dtype}"
        )
    print(f"model: {model.name}, on {jax.devices()[0].device_kind}", flush=True)
    length = len(prompt) + settings.tokens
    if model.trained_length is not None and length > model.trained_length:
        print(f"note: {length} tokens are more than the {model.trained_length} that it was trained on")
    generated = _generate(settings, model, prompt, sampling)
    for tokens in () if settings.random else generated.tokens:
        print(f"\n{bytes([*prompt.tolist(), *tokens.tolist()]).decode(errors='replace')}")
    print(
        f"\nprefill {generated.prefill_rate:,.0f} tokens/s, decoding {generated.decode_rate:,.0f} tokens/s, "
        f"batch {settings.batch}"
    )
    if settings.check:
        check(model, generated)
        print(f"all {generated.tokens.size} tokens are those of full recomputation")
    if settings.out is not None:
        case = {"batch": settings.batch, "prompt": len(prompt), "tokens": settings.tokens}
        case["cache"] = settings.cache_dtype or model.config.dtype
        figures = {
            "prefill_tokens_per_second": generated.prefill_rate,
            "decode_tokens_per_second": generated.decode_rate,
        }
        run_record.write(settings.out, [case | figures], model=model.name)
    return generated


def _prompt(settings: Settings) -> np.ndarray:
    prompt = np.frombuffer(settings.prompt.encode(), np.uint8).astype(np.int32)
    length = len(prompt) if settings.prompt_length is None else settings.prompt_length
    if length < 1 or not len(prompt):
        raise ValueError(
            f"the prompt must have at least 1 byte, got {settings.prompt!r}, {length} bytes of it"
        )
    return np.resize(prompt, length)


def _generate(settings: Settings, model: loading.Model, prompt: np.ndarray, sampling: Sampling) -> Generated:
    # Prefill makes the first token. All loops have the same number of steps, so that one program serves all.
    chunk = max(min(settings.tokens_per_report, settings.tokens - 1), 1)
    chunks = -(-(settings.tokens - 1) // chunk)
    prompts = jnp.broadcast_to(jnp.asarray(prompt), (settings.batch, len(prompt)))
    lengths = jnp.full(settings.batch, len(prompt), jnp.int32)
    weights = model.graph, model.parameters
    capacity = len(prompt) + max(chunks, 1) * chunk

    def start(key: jax.Array):
        cache = inference.empty_cache(model.config, settings.batch, capacity, settings.cache_dtype)
        jax.block_until_ready(cache)
        begin = time.perf_counter()
        cache, tokens = inference.prefill(*weights, cache, prompts, lengths, sampling, key)
        tokens.block_until_ready()
        return cache, tokens, time.perf_counter() - begin

    first_key, *keys = jax.random.split(jax.random.key(settings.seed), 1 + chunks)
    # Once for compilation.
    cache, tokens, _ = start(first_key)
    jax.block_until_ready(inference.decode(*weights, cache, tokens, sampling, first_key, steps=chunk))

    cache, tokens, prefill_seconds = start(first_key)
    new = [np.asarray(tokens)[:, None]]
    begin = time.perf_counter()
    with tqdm.tqdm(total=settings.tokens, initial=1, unit="token") as bar:
        for key in keys:
            cache, tokens, of_chunk = inference.decode(*weights, cache, tokens, sampling, key, steps=chunk)
            new.append(np.asarray(of_chunk))
            bar.update(min(chunk, settings.tokens - bar.n))
    seconds = time.perf_counter() - begin
    return Generated(
        prompt,
        np.concatenate(new, axis=1)[:, : settings.tokens],
        prompts.size / prefill_seconds,
        settings.batch * chunks * chunk / seconds,
    )


def check(model: loading.Model, generated: Generated) -> None:
    """Compare greedy output with full recomputation: one pass of the model without a cache over all tokens.

    Raises:
      ValueError: a token is not the most likely one there, by more than rounding explains.
    """
    batch, count = generated.tokens.shape
    prompts = np.broadcast_to(generated.prompt, (batch, len(generated.prompt)))
    tokens = np.concatenate([prompts, generated.tokens], axis=1)
    logits = np.asarray(inference.recompute(model.graph, model.parameters, tokens[:, :-1]))[:, -count:]
    chosen = np.take_along_axis(logits, generated.tokens[..., None], axis=-1)[..., 0]
    short = logits.max(-1) - chosen
    wrong = np.argwhere(short > ROUNDING[model.config.dtype])
    if len(wrong):
        sequence, position = wrong[0]
        raise ValueError(
            f"token {position} of sequence {sequence} is {generated.tokens[sequence, position]}, and full "
            f"recomputation gives {logits[sequence, position].argmax()}, whose logit is greater by "
            f"{short[sequence, position]:.3g}"
        )


if __name__ == "__main__":
    run(Settings, generate)
