"""What a run gave against the definition in float64; the yardstick is plain attention."""

import dataclasses

import jax
import numpy as np

from jax_flash import _reference

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MANY = 256  # numbers, that plain attention's error in them isn't small by luck


def compare(case, spec, operands, d_out, d_lse, got, ratios=True) -> dict[str, float]:
    """Check a run against the definition in float64; the yardstick is plain attention.

    Args:
      got: output `(B, T, N, V)`, residual `(B, T, N)` or None, and a dict of gradients.
      ratios: whether plain attention is run where `_floor` accepts all results anyway.

    Returns:
      for each result, its error over that of plain attention in the same dtype, where that is
      what bounds it.
    """
    out, lse, gradients = got
    results = {"out": out, **{f"d_{name}": x for name, x in gradients.items()}}
    if lse is not None:
        assert lse.dtype == np.float32
        results["lse"] = lse
    assert out.dtype == operands.query.dtype
    references = _results_of(_reference.reference_with_gradients, spec, operands, d_out, d_lse)
    errors, floors, complaints = {}, {}, []
    for name, result in results.items():
        reference = references[name]
        if name != "out" and name != "lse":
            argument = getattr(operands, name.removeprefix("d_"))
            assert result.dtype == argument.dtype, name
            reference = reference.reshape(result.shape)
        assert result.shape == reference.shape, name
        if not np.array_equal(np.isneginf(result), np.isneginf(reference)):
            complaints.append(f"{name} is -inf in other rows than the definition")
            continue
        result, reference = _finite(result), _finite(reference)
        if not np.all(np.isfinite(result)):
            complaints.append(f"{name} has {np.sum(~np.isfinite(result))} of {result.size} not finite")
            continue
        errors[name] = np.linalg.norm(result - reference)
        floors[name] = _floor(name, case, spec, reference, references, operands, d_out)
    if not ratios and not complaints and all(errors[name] <= floors[name] for name in errors):
        return {}
    plains = _results_of(_reference.plain_with_gradients, spec, operands, d_out, d_lse)
    over_plain = {}
    for name, error in errors.items():
        floor, reference = floors[name], _finite(references[name])
        plain_error = np.linalg.norm(_finite(plains[name]) - reference)
        multiple = 4 if case.is_drawn and reference.size < MANY else 2
        bound = max(multiple * plain_error, floor)
        if multiple * plain_error >= floor:
            over_plain[name] = float(error / plain_error)
        if not error <= bound:
            norm = np.linalg.norm(reference)
            complaints.append(
                f"{name}: error {error:.3g} over {bound:.3g} (of norm {norm:.3g}; plain attention "
                f"{plain_error:.3g})"
            )
    assert not complaints, "; ".join(complaints)
    return over_plain


def _results_of(attention, spec, operands, d_out, d_lse):
    """Output, residual and gradients by name, the residual as `(B, T, N)`."""
    d_lse = None if d_lse is None else d_lse.transpose(0, 2, 1)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        out, lse, gradients = attention(spec, operands, d_out, d_lse)
    named = {f"d_{f.name}": getattr(gradients, f.name) for f in dataclasses.fields(gradients)}
    return {"out": out, "lse": lse.transpose(0, 2, 1), **named}


def _finite(x):
    return np.where(np.isneginf(x), 0, x).astype(np.float64)


def _floor(name, case, spec, reference, references, operands, d_out):
    """The error that is allowed where plain attention happens to make less.

    - In the mean a number rounded to its dtype is off by up to half a unit roundoff, so a result
      is not blamed for that much where the yardstick is exact by luck (one key: p is exactly 1). A
      gradient of a few numbers, each a sum over a whole head of terms of both signs, may be small by
      chance where its rounding isn't.
    - Sums in float32 of terms that cancel leave a rest, though the true result be 0: a gradient
      where there is one key, say. It is measured against the size of the terms. With half-precision
      products the terms pass through the approximate base-2 exponential and the tensor cores'
      shorter sums, a few bits worse than float32 in order. What is summed over a whole head has a
      term for each row, of the size of dP, about sqrt(V), and for a slope times the distance.
    - Large logits are known from their lse alone when the backward pass computes them again, and
      `exp(x - lse)` turns the rounding of lse, absolute, into a relative error. And as one
      probability of a row is nearly 1, its dP nearly equals D = rowsum(dO * O): what is left of
      the difference is mostly the rounding of O to its dtype, which goes into the gradients of
      query and key. Plain attention suffers from neither.
    - In calls that are drawn (`Case.is_drawn`) rows may have few keys, and results few numbers. The rounding
      of O goes into D = rowsum(dO * O) and from there into the gradients of logits, and so does that of P,
      as much and independently, by the sum of P dP. Their own size is below that of their terms where a row
      has few keys: one key's gradient is 0. A slope has it times the distance, a sink times its probability,
      and a bias has the sum over a row, or over many, where it is broadcast. Kernels for half precision have
      logits in base 2, and lse back from it: two roundings of it more. And of few numbers plain attention's
      error may be small by luck, and the rounding of O and P more than it is in the mean: 2.5 standard
      deviations of a single number, which one in a hundred exceeds, so of few numbers twice that, and of few
      that are sums over all rows in every call.
    """
    float32 = UNIT_ROUNDOFF["float32"]
    roundoff = float32 if name == "lse" else UNIT_ROUNDOFF[case.dtype]
    magnitude = case.magnitude
    # A logit's cotangent is of V's magnitude, or of its own in lse. As it is, in the gradients of what is
    # added to logits, it has also the relative rounding of those that are large.
    of_logits = max(magnitude, 1) if case.residual == "used" else magnitude
    of_others = {"out": magnitude, "lse": magnitude**2, "d_value": 1}
    of_others |= {f"d_{x}": of_logits * max(magnitude, 1) for x in ("bias", "alibi_slopes", "sinks")}
    term = of_others.get(name, of_logits * magnitude)
    size_of_terms = term * np.sqrt(reference.size)
    rows = case.B * case.N * case.T
    if case.is_drawn and name in (
        "d_key",
        "d_value",
    ):  # each row adds to them, and with few keys many rows to each
        size_of_terms = max(size_of_terms, term * np.sqrt(rows * reference.shape[-1]))
    noise = 2.0**-20 if case.dtype == "float32" else 2.0**-16
    if name in ("d_alibi_slopes", "d_sinks"):
        distance = max(case.T, case.S) if name == "d_alibi_slopes" else 1
        size_of_terms *= distance * np.sqrt(case.B * case.T * max(case.H, case.V or case.H))
        noise = (4 if case.is_drawn else 2) * float32
    if case.is_drawn and name == "d_bias":
        size_of_terms = term * np.sqrt(rows * case.S)
    relative = 16 * roundoff if name in ("d_alibi_slopes", "d_sinks") else roundoff / 2
    if case.is_drawn and name == "lse" and case.dtype != "float32":
        relative = 2 * roundoff
    if case.category == "large" and name.startswith("d_"):
        lse = references["lse"]
        relative = max(relative, float32 * np.max(np.abs(lse), initial=0, where=np.isfinite(lse)))
        if name != "d_value":
            noise = max(noise, roundoff / 2)
    rounding_of_d = 0.0
    few = reference.size < MANY and name in ("d_bias", "d_alibi_slopes", "d_sinks")
    if few or (case.is_drawn and name in ("d_bias", "d_query", "d_key", "d_alibi_slopes", "d_sinks")):
        terms = references["out"] * np.asarray(d_out, np.float64)
        if name == "d_sinks":
            terms *= _sink_probabilities(operands.sinks, references["lse"])[..., None]
        rounding_of_d = 2**0.5 * roundoff * np.linalg.norm(terms)
        rounding_of_d *= 2 if reference.size < MANY else 1
    if name in ("d_query", "d_key"):
        rounding_of_d *= abs(spec.scale) * np.sqrt(case.H) * case.magnitude
    if name == "d_alibi_slopes":
        rounding_of_d *= max(case.T, case.S)
    return max(relative * np.linalg.norm(reference), noise * size_of_terms, rounding_of_d)


def _sink_probabilities(sinks, lse):
    """(B, T, N); 0 in rows that see nothing, not even the sink."""
    there = np.isfinite(lse)
    return np.where(there, np.exp(sinks[:, None, :] - np.where(there, lse, np.inf)), 0)
