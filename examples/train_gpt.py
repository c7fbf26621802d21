r"""Train a byte-level GPT whose attention is `jax_flash.flash_attention`.

    python examples/train_gpt.py
    python examples/train_gpt.py --text=book.txt --checkpoint-dir=runs/book
    python examples/train_gpt.py --text=book.txt --checkpoint-dir=runs/book --resume

The defaults suit two CPU cores and a few minutes. On a GPU, the size of GPT-2 medium:

    python examples/train_gpt.py --layers=24 --heads=16 --width=1024 --sequence-length=2048 --batch-size=16 \
        --learning-rate=3e-4 --steps=1000

Writes losses.csv, loss.png and sample.txt to --output-dir. A run that is resumed from a checkpoint has, bit
for bit, the losses of a run without a break. Training is data-parallel over all local devices: by a `jit`
over a sharded batch, or by `jax.pmap` with --pmap. Long sequences are sharded over devices by
--sequence-shards; a run may be resumed with another number of these.
"""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import time
from typing import Any

import data
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import report
import tqdm
from checkpoints import Checkpoints
from command_line import flag, run
from flax import nnx
from parallel import Pmap, ShardedJit
from steps import State, make_optimizer, make_steps

import jax_flash


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run; each field is a flag of the program."""

    text: str | None = flag(
        None, "File or folder to train on. Default: the Python standard library's source."
    )
    output_dir: str = flag("runs/gpt", "Where losses.csv, loss.png and sample.txt go.")
    checkpoint_dir: str | None = flag(None, "Where checkpoints go. Default: none are made.")
    resume: bool = flag(False, "Go on from the newest checkpoint in --checkpoint-dir.")

    implementation: str | None = flag(
        None, "Implementation of attention. Default: the fastest that supports it.", ["cuda", "pallas", "xla"]
    )
    quantization: str | None = flag(
        None, "Compute attention's forward pass in 8 bits; goes with bfloat16. Default: don't.", ["fp8"]
    )
    dtype: str | None = flag(
        None, "Dtype of activations. Default: float32 on a CPU, else bfloat16.", ["float32", "bfloat16"]
    )
    layers: int = flag(4, "Layers.")
    heads: int = flag(2, "Query heads.")
    key_heads: int | None = flag(
        None, "Key and value heads; fewer than heads is GQA. Default: as many as heads."
    )
    width: int = flag(128, "Features of a token; width / heads is the head dim.")
    remat: bool = flag(False, "Recompute each layer in the backward pass: less memory, more work.")
    pmap: bool = flag(False, "Use jax.pmap in place of jit over a sharded batch.")
    sequence_shards: int = flag(1, "Devices that each sequence is sharded over.")

    sequence_length: int = flag(128, "Bytes in a sequence.")
    batch_size: int = flag(16, "Sequences in a batch, over all devices.")
    steps: int = flag(750, "Steps of the whole run.")
    learning_rate: float = flag(
        3e-3, "Peak learning rate: warm-up over 5 % of the steps, then cosine decay to 10 % of it."
    )
    weight_decay: float = flag(0.1, "Weight decay of matrices.")
    seed: int = flag(0, "Seed of parameters, batches and the sample.")

    steps_per_report: int = flag(10, "Steps between updates of the progress bar.")
    steps_per_validation: int = flag(125, "Steps between measurements on the held-out text.")
    steps_per_checkpoint: int = flag(250, "Steps between checkpoints.")
    prompt: str = flag("def ", "What the sample starts with.")
    sample_length: int = flag(400, "Bytes in the sample.")
    temperature: float = flag(0.7, "Temperature of sampling.")


VALIDATION_BATCHES = 8


class Progress:
    """The progress bar and the history. Losses are added while the device may still compute them.

    A loss is fetched one report after it was added, so the device always has steps to run.
    """

    def __init__(self, settings: Settings, history: report.History, start: int):
        self.history = history
        self._tokens_per_step = settings.batch_size * settings.sequence_length
        self._started: list[tuple[int, list[jax.Array], bool]] = []
        self._bar = tqdm.tqdm(total=settings.steps, initial=start, unit="step", smoothing=0.1)
        self._first_report: tuple[float, int] | None = None  # when, and steps until then

    def add(self, step: int, losses: list[jax.Array], validation: bool = False) -> None:
        """Adds the mean of the losses of `step`. A loss may have an axis of devices, all of one value."""
        self._started.append((step, losses, validation))

    def report(self, keep: int = 0) -> None:
        """Fetches all losses except the last `keep` that were added."""
        ready, self._started = (
            self._started[: len(self._started) - keep],
            self._started[len(self._started) - keep :],
        )
        steps = 0
        for step, losses, validation in ready:
            loss = float(np.mean([np.ravel(loss)[0] for loss in losses]))
            if validation:
                self.history.validation[step] = loss
            else:
                self.history.training.append(loss)
                steps += 1
        if not steps:
            return
        now = time.perf_counter()
        shown = {"loss": f"{self.history.training[-1]:.3f}"}
        if self.history.validation:
            shown["validation"] = f"{list(self.history.validation.values())[-1]:.3f}"
        done = len(self.history.training)
        if self._first_report is None:  # before it, most time went into compilation
            self._first_report = now, done
        else:
            since, before = self._first_report
            shown["tokens/s"] = f"{(done - before) * self._tokens_per_step / (now - since):,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(steps)

    def close(self) -> None:
        self._bar.close()


def explain(settings: Settings, config: gpt.GPTConfig, devices: int) -> str:
    """Which implementation runs the model's attention on one device, and why."""

    def operand(heads: int) -> jax.ShapeDtypeStruct:
        batch = settings.batch_size * settings.sequence_shards // devices
        shape = batch, settings.sequence_length // settings.sequence_shards, heads, config.head_dim
        return jax.ShapeDtypeStruct(shape, jnp.dtype(config.dtype))

    query, key = operand(config.heads), operand(config.key_heads)
    options = {"implementation": settings.implementation, "quantization": settings.quantization}
    return str(jax_flash.explain(query, key, key, is_causal=True, **options))


def model_config(settings: Settings, device: jax.Device) -> gpt.GPTConfig:
    attention = jax_flash.flash_attention
    if settings.quantization is not None:
        attention = functools.partial(attention, quantization=settings.quantization)
    return gpt.GPTConfig(
        layers=settings.layers,
        heads=settings.heads,
        key_heads=settings.key_heads or settings.heads,
        width=settings.width,
        dtype=settings.dtype or ("float32" if device.platform == "cpu" else "bfloat16"),
        implementation=settings.implementation,
        remat=settings.remat,
        attention=attention,
    )


def write_results(settings: Settings, history: report.History, model: gpt.GPT, output: pathlib.Path) -> None:
    """Writes losses.csv, loss.png and sample.txt, and prints the sample."""
    report.write_csv(history, output / "losses.csv")
    report.plot(
        history, f"Byte-level GPT, {settings.layers} layers, width {settings.width}", output / "loss.png"
    )
    sample = gpt.generate(
        model,
        jax.random.key(settings.seed),
        settings.prompt.encode(),
        settings.sample_length,
        settings.sequence_length,
        settings.temperature,
    )
    text = settings.prompt + sample.decode(errors="replace")
    (output / "sample.txt").write_text(text)
    print(
        f"validation loss {history.validation[settings.steps]:.3f} nats per byte after {settings.steps} steps"
    )
    print(f"wrote losses.csv, loss.png and sample.txt to {output}\n\n{text}")


def check_devices(settings: Settings, devices: int) -> None:
    """Raises ValueError where the batch or its sequences don't divide among the devices."""
    shards = settings.sequence_shards
    if shards < 1 or devices % shards:
        raise ValueError(f"--sequence-shards must divide the number of devices, got {shards} for {devices}")
    if settings.sequence_length % shards:
        raise ValueError(
            "--sequence-length must be a multiple of --sequence-shards, "
            f"got {settings.sequence_length} and {shards}"
        )
    if settings.pmap and shards > 1:
        raise ValueError("--pmap is data-parallel alone: it goes without --sequence-shards")
    groups = devices // shards
    if settings.batch_size % groups:
        of_what = "devices" if shards == 1 else "devices over --sequence-shards"
        raise ValueError(
            f"--batch-size must be a multiple of the number of {of_what}, "
            f"got {settings.batch_size} for {groups}"
        )


def train(settings: Settings) -> report.History:
    """Run `settings` to the end and write its files. Returns all losses, those before a resumption too."""
    devices = jax.local_devices()
    check_devices(settings, len(devices))
    if settings.resume and settings.checkpoint_dir is None:
        raise ValueError("--resume needs --checkpoint-dir")
    config = model_config(settings, devices[0])
    corpus = data.load(settings.text)
    graph, parameters = nnx.split(gpt.GPT(config, nnx.Rngs(settings.seed)))
    print(f"text: {corpus.source}, {len(corpus.train):,} bytes and {len(corpus.validation):,} held out")
    print(f"model: {sum(x.size for x in jax.tree.leaves(parameters)):,} parameters, {config.dtype}")
    print(
        f"devices: {len(devices)} × {devices[0].device_kind}, by {'pmap' if settings.pmap else 'sharded jit'}"
    )
    print(explain(settings, config, len(devices)), flush=True)

    optimizer = make_optimizer(settings.learning_rate, settings.weight_decay, settings.steps)
    state = State(parameters, optimizer.init(parameters))
    parallel = Pmap(devices) if settings.pmap else ShardedJit(devices, settings.sequence_shards)
    train_step, validation_step = make_steps(graph, optimizer, parallel)

    def tokens(of: np.ndarray, seed: int, step: int) -> Any:
        return parallel.split(data.batch(of, seed, step, settings.batch_size, settings.sequence_length))

    # A resumed run must agree with its checkpoint in these, to be the same run.
    free = "text", "output_dir", "checkpoint_dir", "resume", "steps_per_report", "steps_per_checkpoint"
    free += "sequence_shards", "prompt", "sample_length", "temperature"
    identity = {name: value for name, value in dataclasses.asdict(settings).items() if name not in free}
    identity |= {"dtype": config.dtype, "text_sha256": hashlib.sha256(corpus.train.tobytes()).hexdigest()}

    output = pathlib.Path(settings.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    start, history = 0, report.History()
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if settings.checkpoint_dir is not None:
            checkpoints = stack.enter_context(Checkpoints(pathlib.Path(settings.checkpoint_dir)))
            if settings.resume:
                start, state, saved = checkpoints.restore(state, identity)
                history = report.History.from_json(saved)
                print(f"resumed after {start} steps", flush=True)
            else:
                checkpoints.require_none()

        state = parallel.copy_to_all(state)
        validation = [tokens(corpus.validation, settings.seed, i) for i in range(VALIDATION_BATCHES)]
        progress = Progress(settings, history, start)
        stack.callback(progress.close)
        for step in range(start, settings.steps):
            state, loss = train_step(state, tokens(corpus.train, settings.seed, step))
            done, last = step + 1, step + 1 == settings.steps
            progress.add(done, [loss])
            if last or done % settings.steps_per_validation == 0:
                losses = [validation_step(state.parameters, batch) for batch in validation]
                progress.add(done, losses, validation=True)
            if done % settings.steps_per_report == 0:
                progress.report(keep=settings.steps_per_report)
            if checkpoints is not None and (last or done % settings.steps_per_checkpoint == 0):
                progress.report()
                checkpoints.save(done, parallel.copy_of_first(state), identity, history.to_json())
        progress.report()

    model = nnx.merge(graph, parallel.copy_of_first(state.parameters))
    write_results(settings, history, model, output)
    return history


if __name__ == "__main__":
    run(Settings, train)
