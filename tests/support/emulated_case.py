"""Calls of the Hopper kernels in the emulator, drawn at random and compared with the definition."""

import dataclasses

import agreement
import jax
import numpy as np
import rounding
from kernel_emulator import DTYPES
from seeds import seed_of

import jax_flash
from jax_flash import _dropout, _function_arguments, _reference
from jax_flash._device import H100
from jax_flash._spec import AttentionSpec, Operands, shapes_of
from jax_flash.cuda import dropout, fixed_point, score_mod
from jax_flash.cuda.sm90 import backward_plan, forward_plan
from jax_flash.cuda.varlen import of_varlen_tokens

# So few multiprocessors that a persistent CTA has several tiles.
DEVICE = dataclasses.replace(H100, sm_count=2)


@dataclasses.dataclass(frozen=True)
class Case:
    H: int
    T: int
    S: int
    N: int = 1
    K: int = 1
    B: int = 1
    left: int | None = None
    right: int | None = None
    dtype: str = "bfloat16"
    return_residual: bool = False
    deterministic: bool = False
    soft_cap: float | None = None
    bias: str | None = None  # its axes, 1 in place of the letter of one that is broadcast
    bias_dtype: str = "float32"
    mask: str | None = None  # as bias
    alibi: str | None = None  # its axes: BN or 1N
    sinks: str | None = None
    lengths: str = ""  # "q", "k" or "qk": which there are
    segments: str | None = None  # "sorted", as packed documents have them; or in no order
    packed: int | None = None  # so many sequences to a batch row
    V: int | None = None  # where values have a head dim of their own
    dropout: float = 0.0
    diagonal: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None  # for each batch row, or its parts
    score_mod: str | None = None  # of FUNCTIONS
    block_mask: str | None = None  # of BLOCK_MASKS
    wide: str | None = None  # which results are float32

    def __str__(self):
        return "-".join(
            f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name)) != f.default
        )


def relative_position(random, case):
    """A bias of a head and a distance, learned."""
    table = jax.numpy.asarray(random.standard_normal((case.N, 33), np.float32))
    return lambda score, b, h, q, k: score + table[h, jax.numpy.clip(q - k, -16, 16) + 16]


def capped(random, case):
    """A function of the score alone."""
    return lambda score, b, h, q, k: 2 * jax.numpy.tanh(score / 2) + 0.25 * score


def mildly_capped(random, case):
    """A cap that most scores are within."""
    return lambda score, b, h, q, k: 6 * jax.numpy.tanh(score / 6)


def hides(random, case):
    """Keys of the other parity, for odd heads; a slope for each batch row and head."""
    slopes = jax.numpy.asarray(random.uniform(0, 0.1, (case.B, case.N)), "bfloat16")

    def function(score, b, h, q, k):
        near = score - slopes[b, h].astype("float32") * abs(q - k)
        return jax.numpy.where((h % 2 == 1) & ((q + k) % 2 == 1), -jax.numpy.inf, near)

    return function


def scaled(random, case):
    """By what the row is, and an embedding that is added: its gradient doesn't depend on the score."""
    scales = jax.numpy.asarray(random.integers(0, 3, (case.B, case.T)), "int32")
    embedding = jax.numpy.asarray(random.standard_normal((4, 3), np.float32))

    def function(score, b, h, q, k):
        own = embedding[q % 4] @ embedding[k % 4]
        return score * jax.numpy.exp2(scales[b, q].astype("float32") - 1) + 0.3 * own

    return function


def learned(random, case):
    """A cap of each head, a temperature of each row, and a number for scores of either sign: their gradients
    depend on the score."""
    caps = jax.numpy.asarray(random.uniform(1, 3, (case.N,)).astype(np.float32))
    temperatures = jax.numpy.asarray(random.uniform(0.5, 2, (case.B, case.T)).astype(np.float32))
    of_signs = jax.numpy.asarray(random.standard_normal((2,)).astype(np.float32))

    def function(score, b, h, q, k):
        of_sign = of_signs[(score > 0).astype("int32")]
        return caps[h] * jax.numpy.tanh(score * temperatures[b, q] / caps[h]) + of_sign

    return function


FUNCTIONS = {
    "relative_position": relative_position,
    "capped": capped,
    "mildly_capped": mildly_capped,
    "hides": hides,
    "scaled": scaled,
    "learned": learned,
}
"""What makes each, from a random generator and the case."""


def of_own_heads(random, case):
    """Documents and a window for some heads, all keys for others, which differ by batch row too."""
    documents = jax.numpy.asarray(np.sort(random.integers(0, 3, (case.B, max(case.T, case.S)))), "int32")

    def function(b, h, q, k):
        same = documents[b, q] == documents[b, k]
        return jax.numpy.where(h % 2 == 0, same & (abs(q - k) < 90), k % 70 < 60 + b)

    return jax_flash.create_block_mask(function, case.B, case.N, case.T, case.S, block_size=(48, 32))


def causal_and_sinks(random, case):
    """The same for all, in blocks of the size of the kernels' tiles."""
    del random
    shift = case.S - case.T

    def function(b, h, q, k):
        return (k <= q + shift) & ((q + shift - k < 40) | (k < 3))

    return jax_flash.create_block_mask(function, None, None, case.T, case.S, block_size=64)


def layout(random, case, rows=1, heads=1):
    """A layout of blocks at random, in which a row of blocks sees nothing."""
    blocks = random.random((rows, heads, -(-case.T // 40), -(-case.S // 24))) < 0.4
    blocks[:, :, 0] = False
    return jax_flash.BlockMask.from_blocks(blocks, lengths=(case.T, case.S), block_size=(40, 24))


BLOCK_MASKS = {
    "of_own_heads": of_own_heads,
    "causal_and_sinks": causal_and_sinks,
    "layout": layout,
    "own_layouts": lambda random, case: layout(random, case, case.B, case.N),
}
"""What makes each, from a random generator and the case."""


def traits(case: Case | tuple) -> set:
    """What `make test` has at least once of each test: every option, and every tile shape."""
    case = case[0] if isinstance(case, tuple) else case
    options = {field.name for field in dataclasses.fields(case) if getattr(case, field.name) != field.default}
    options -= {"H", "V", "T", "S", "B", "N", "K", "left", "right", "bias", "bias_dtype", "dtype"}
    options = options or {"none"}
    window = "causal" if (case.left, case.right) == (None, 0) else (case.left, case.right) != (None, None)
    bias = None if case.bias is None else "1" in case.bias
    return options | {("bias", bias), ("V", case.V is not None), ("window", window), case.dtype} | tile(case)


def tile(case: Case | tuple) -> set:
    """What `make test` has at least once where `traits` is had elsewhere: every tile shape."""
    case = case[0] if isinstance(case, tuple) else case
    return {next(width for width in (64, 96, 128, 192, 256) if max(case.H, case.V or 0) <= width)}


def check_forward(case, device, emulator):
    of_call, given, _, _, seed = draw(case)
    spec, operands = of_varlen_tokens(of_call, given)
    plan = forward_plan.plan_forward(spec, shapes_of(operands), device)
    arrays = arrays_of(
        operands, forward_plan.plan_forward_metadata(spec, shapes_of(operands), device), emulator, seed
    )
    arrays |= forward_plan.forward_block_lists(spec, operands, arrays)
    results = emulator.run(plan, dropout.arranged(plan, arrays), seed)
    spec, operands = of_call, given
    d_out = np.zeros(results["out"].shape)
    out, lse, gradients = _reference.reference_with_gradients(spec, operands, d_out)
    references = {"out": out, "lse": lse, **agreement.by_name(gradients)}
    got = {name: results[name] for name in ("out", "lse")}
    check_results(case, got, *expected(case, spec, operands, d_out, None, references, got["out"]))
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5, atol=1e-5)


def check_backward(case, emulator, multiprocessors=2, runs=1, magnitude=1.0, resident=()):
    """Compares with the definition; returns the results of each run.

    The plan is for a device of so many `multiprocessors`. `resident` says how many CTAs run together, in one
    run after the other: by default in each of `runs` as many as there are multiprocessors.
    """
    device = dataclasses.replace(H100, sm_count=multiprocessors)
    spec, operands, d_out, d_lse, seed = draw(case)
    d_out = (magnitude * d_out.astype(np.float32)).astype(d_out.dtype)
    out, lse, gradients = _reference.reference_with_gradients(spec, operands, d_out, d_lse)
    of_call, given = spec, operands
    spec, operands = of_varlen_tokens(of_call, given)
    bounds = backward_plan.plan_backward_metadata(spec, shapes_of(operands), device)
    arrays = arrays_of(operands, bounds, emulator, seed)
    arrays |= backward_plan.backward_block_lists(spec, operands, arrays, device)
    arrays |= dict(out=out, lse=lse, d_out=d_out, d_lse=d_lse)
    bias_factor = None
    if fixed_point.adds_bias_up(spec, shapes_of(operands)):
        arrays["bias_factor"] = bias_factor = fixed_point.factor(spec, operands, lse, d_out, d_lse)
    plan = backward_plan.plan_backward(spec, shapes_of(operands), device)
    resident = resident or (multiprocessors,) * runs
    of_runs = [emulator.run(plan, arrays, seed + i, count) for i, count in enumerate(resident)]
    references = {"out": out, "lse": lse, **agreement.by_name(gradients)}
    rounded_out = out.astype(DTYPES[case.dtype])
    references, deviations = expected(case, of_call, given, d_out, d_lse, references, rounded_out)
    for results in of_runs:
        gradients = {name: results[name] for name in ("d_query", "d_key", "d_value")}
        of_scores = score_mod.gradients(spec, operands, results, bias_factor)
        gradients |= {f"d_{name}": x for name, x in of_scores.items()}
        check_results(case, gradients, references, deviations)
    return of_runs


def expected(case, spec, operands, d_out, d_lse, references, out):
    """What kernels are to give where the output is `out`, and how far rounding takes it: two dicts by name.

    The latter has the standard deviation of each number.
    """
    heads_last = {name: x.transpose(0, 2, 1) if name == "lse" else x for name, x in references.items()}
    d_lse = None if d_lse is None else d_lse.transpose(0, 2, 1)
    terms = rounding.terms_of(case.dtype, spec, operands, heads_last, d_out, d_lse)
    deviations = rounding.deviations(terms, heads_last)
    deviations["lse"] = deviations["lse"].transpose(0, 2, 1)
    return rounding.with_delta_of(out, terms, references), deviations


def check_results(case, got, references, deviations):
    """Compares results by name, `d_query` say, with the definition's: each as a whole, and each row."""
    few_keys = case.S == 1 or "k" in case.lengths or case.segments or case.packed
    for name, x in got.items():
        x, reference = np.asarray(x), references[name]
        assert x.shape == reference.shape, name
        complaint = agreement.complaint_of_values(name, x, reference)
        assert complaint is None, complaint
        result = agreement.Result(
            name, agreement.finite(x), agreement.finite(reference), deviations[name], reference.size
        )
        # With a few keys dS is a difference of equals, and what is left of it is noise.
        is_noisy = (few_keys and name in ("d_query", "d_key")) or agreement.is_sum_over_rows(name)
        noise = (4 if is_noisy else 0) * np.linalg.norm(result.deviation)
        assert result.error <= max(roundoff(case) * np.linalg.norm(result.reference), noise), name
        complaint = result.complaint_of_rows()
        assert complaint is None, complaint


def arrays_of(operands, metadata_plan, emulator, seed):
    """Operands by name, and the results of the mask metadata's plan, if there is one."""
    arrays = {name: np.asarray(x) for name, x in operands.present().items()}
    if metadata_plan is None:
        return arrays
    return arrays | emulator.run(metadata_plan, arrays, seed)


def draw(case):
    """A case's spec, random operands and cotangents, and the seed that they came from."""
    seed = seed_of(case)
    random = np.random.default_rng(seed)

    def normal(length, heads, columns=case.V or case.H):
        return random.standard_normal((case.B, length, heads, columns)).astype(DTYPES[case.dtype])

    query, key = normal(case.T, case.N, case.H), normal(case.S, case.K, case.H)
    value = normal(case.S, case.K)

    def of_axes(axes):
        sizes = (1 if letter == "1" else getattr(case, letter) for letter in axes)
        return random.standard_normal(tuple(sizes), np.float32)

    others = {}
    if case.bias is not None:
        others["bias"] = of_axes(case.bias).astype(DTYPES[case.bias_dtype])
    if case.mask is not None:
        others["mask"] = of_axes(case.mask) < 0.5
    if case.alibi is not None:
        others["alibi_slopes"] = of_axes(case.alibi) / 20
    if case.sinks is not None:
        others["sinks"] = of_axes(case.sinks)
    for letter, name, length in (("q", "query", case.T), ("k", "key_value", case.S)):
        if letter in case.lengths:
            rows = random.integers(1, length, size=case.B, endpoint=True)
            rows[random.integers(case.B)] = random.choice((0, length))
            others[f"{name}_seq_lengths"] = rows.astype(np.int32)
        if case.segments is not None:
            ids = random.integers(-2, 4, size=(case.B, length)).astype(np.int32)
            others[f"{name}_segment_ids"] = np.sort(ids) if case.segments == "sorted" else ids
        if case.packed is not None:
            ends = np.sort(random.integers(length, size=(case.B, case.packed + 1), endpoint=True))
            others[f"{name}_offsets"] = ends.astype(np.int32)
    # Shorter than some sequences may be.
    score_mod = FUNCTIONS[case.score_mod](random, case) if case.score_mod else None
    block_mask = BLOCK_MASKS[case.block_mask](random, case) if case.block_mask else None
    score_mod, block_mask, of_functions = _function_arguments.operands(
        score_mod, block_mask, (case.B,), (case.T, case.S, case.N)
    )
    others |= of_functions
    longest = (case.T - case.T // 3, case.S - case.S // 3) if case.packed is not None else (None, None)
    d_lse = random.standard_normal((case.B, case.N, case.T)).astype(np.float32)
    spec = AttentionSpec(
        case.H**-0.5,
        case.left,
        case.right,
        logits_soft_cap=case.soft_cap,
        dropout_rate=case.dropout,
        return_residual=case.return_residual,
        deterministic=case.deterministic,
        max_query_length=longest[0],
        max_key_value_length=longest[1],
        score_mod=score_mod,
        block_mask=block_mask,
        wide_results=case.wide,
    )
    if case.dropout:
        dropout_key = jax.random.key(int(random.integers(2**31)))
        rows, columns = _dropout.hashes(dropout_key, case.B, case.N, case.T, case.S)
        others |= {"dropout_rows": rows, "dropout_columns": columns}
    if case.diagonal is not None:
        diagonal = np.array(case.diagonal, np.int32)
        others["diagonal"] = diagonal if diagonal.ndim == 2 else diagonal[:, None]
    arrays = {"query": query, "key": key, "value": value} | others
    operands = Operands.of({name: jax.numpy.asarray(x) for name, x in arrays.items()})
    return spec, operands, normal(case.T, case.N), d_lse if case.return_residual else None, seed


def roundoff(case):
    return 2.0**-8 if case.dtype == "bfloat16" else 2.0**-11
