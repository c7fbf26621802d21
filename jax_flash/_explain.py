"""`explain`: which implementation runs a call, and why not the others."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax

from jax_flash import (
    _arguments,
    _attention,
    _device,
    _dispatch,
    _explain_sequences,
    _quantize,
    _ragged_paged_attention,
    _validate,
    _varlen,
    _with_cache,
)
from jax_flash._cache import KVCache, PagedKVCache
from jax_flash._cache_call import CacheCall
from jax_flash._cache_spec import CacheSpec
from jax_flash._call import Arguments, Call, prepare
from jax_flash._device import Device
from jax_flash._explain_sequences import Sequences
from jax_flash._float8_arguments import Float8
from jax_flash._quantize import QuantizeCall, Quantized

Prepared = TypeVar("Prepared")

_FUNCTIONS = (
    _attention.flash_attention,
    _varlen.flash_attention_varlen,
    _with_cache.flash_attention_with_cache,
    _ragged_paged_attention.ragged_paged_attention,
    _quantize.quantize,
)
"""The functions whose calls `explain` takes."""

_ARRAYS = (
    "query",
    "key",
    "value",
    "bias",
    "mask",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
    "alibi_slopes",
    "sinks",
    "dropout_key",
    "quantization_key",
)
_FLOAT8 = tuple(field.name for field in dataclasses.fields(Float8))


@dataclasses.dataclass(frozen=True)
class Choice:
    """One implementation's answer to a call."""

    name: str
    reason: str | None  # why it can't run the call; None where it can
    kernel: str | None  # its kernel and tile shape, where it can

    @property
    def runs(self) -> bool:
        return self.reason is None

    def __str__(self) -> str:
        runs = "runs: " if self.runs else "does not run: "
        return f"{self.name:<7} {runs}{self.kernel or self.reason}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a function would do with a call here; print it, or read its fields."""

    function: str  # its name
    spec: _dispatch.Spec
    shapes: _dispatch.Shapes  # canonical: one batch axis
    device: Device  # that the call would be planned for
    choices: tuple[Choice, ...]  # in order of preference; none where there is nothing to compute
    automatic: str | None  # what implementation=None picks
    requested: tuple[str, ...] | None  # the `implementation` argument; None for the automatic choice
    picked: str | None  # what the argument as it was given picks; None where that can't run
    sequences: Sequences | None = None  # how devices see each other's keys; None where no sequence is sharded

    def __str__(self) -> str:
        device = f"{self.device.kind} ({self.device.platform})"
        lines = [f"{self.function} on {device}"]
        lines += [f"  {name} {x.dtype} {x.shape}" for name, x in self.shapes.present().items()]
        lines.append(f"  {_described(self.spec)}")
        if not self.choices:
            return "\n".join([*lines, "nothing to compute: no implementation is called"])
        lines += [str(choice) for choice in self.choices]
        lines.append(f"implementation=None picks {self.automatic}")
        if self.requested is not None:
            picked = self.picked or "none, and raises NotImplementedError"
            lines.append(f"implementation={self.requested} picks {picked}")
        if self.sequences is not None:
            lines += ["the sequence is sharded", *(f"  {choice}" for choice in self.sequences.choices)]
            picked = self.sequences.picked or "none: sequences are gathered"
            lines.append(self.sequences.refusal or f"context_parallel picks {picked}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class QuantizeExplanation:
    """What `quantize` would do here with each of its arrays, which it rounds one by one."""

    query: Explanation
    key: Explanation
    value: Explanation

    def __str__(self) -> str:
        return "\n".join(str(getattr(self, field.name)) for field in dataclasses.fields(self))


@overload
def explain(function: Callable[..., Quantized], /, *args: Any, **kwargs: Any) -> QuantizeExplanation: ...
@overload
def explain(*args: Any, **kwargs: Any) -> Explanation: ...
def explain(*args: Any, **kwargs: Any) -> Explanation | QuantizeExplanation:
    """Which implementation would run this call on this device, and why not the others.

        explain(query, key, value, is_causal=True)
        explain(jax_flash.quantize, query, key, value, scales="head")

    Args:
      *args, **kwargs: the arguments of `flash_attention`; of `flash_attention_varlen` if cu_seqlens_q is
        among them; of `flash_attention_with_cache` if a cache is; or of `ragged_paged_attention`, by name, if
        kv_pages is. Or one of these functions, or `quantize`, and its arguments. Arrays or
        `jax.ShapeDtypeStruct`s. Nothing is computed.

    Returns:
      a value to print, or to read: for each implementation whether it would run the call, and its
      kernel's tile shape or the reason why not; and which one `implementation=None` picks. Of `quantize` one
      such value each for `query`, `key` and `value`.

    Raises:
      TypeError, ValueError: as that function does.

    Within `jax_flash.planned_for` it explains the call for that device. Where query is sharded along the
    sequence (an array, or a `jax.ShapeDtypeStruct` with a sharding), it also says for each strategy of
    `context_parallel` whether it would run, and at what cost in communication.
    """
    if args and callable(args[0]):
        function, args = args[0], args[1:]
    elif "cache" in kwargs or any(isinstance(x, KVCache | PagedKVCache) for x in args):
        function = _with_cache.flash_attention_with_cache
    elif "kv_pages" in kwargs:
        function = _ragged_paged_attention.ragged_paged_attention
    else:
        is_varlen = "cu_seqlens_q" in kwargs
        function = _varlen.flash_attention_varlen if is_varlen else _attention.flash_attention
    if function is _with_cache.flash_attention_with_cache:
        return _of_cache(function, lambda **arguments: _with_cache.prepare(**arguments)[0], args, kwargs)
    if function is _ragged_paged_attention.ragged_paged_attention:
        prepare_ragged = _ragged_paged_attention.prepare
        return _of_cache(function, lambda **arguments: prepare_ragged(**arguments)[0], args, kwargs)
    if function is _quantize.quantize:
        return _of_quantize(args, kwargs)
    if function not in _FUNCTIONS:
        known = ", ".join(x.__name__ for x in _FUNCTIONS)
        raise TypeError(f"the function to explain must be one of {known}; got {_validate.short(function)}")
    return _of_attention(function is _varlen.flash_attention_varlen, args, kwargs)


def _of_attention(is_varlen: bool, args: Any, kwargs: dict[str, Any]) -> Explanation:
    """The explanation of a call of `flash_attention`, or of `flash_attention_varlen`."""
    arguments = (_VARLEN_SIGNATURE if is_varlen else _SIGNATURE).bind(*args, **kwargs).arguments
    sequences = [arguments.pop(name) for name in _varlen.VarlenSequences._fields] if is_varlen else []
    requested = _arguments.implementations(arguments.pop("implementation", None))
    window = _arguments.window(arguments.pop("is_causal", False), arguments.pop("local_window_size", None))
    # What is no array stays as it is, for `prepare` to take or refuse.
    given = {name: arguments[name] for name in (*_ARRAYS, *_FLOAT8) if name in arguments}
    if isinstance(arguments.get("scale"), jax.ShapeDtypeStruct):  # a traced one; an array's value is known
        given["scale"] = arguments["scale"]
    arrays = {name: x for name, x in given.items() if _validate.has_shape(x)}
    others = {name: x for name, x in arguments.items() if name not in arrays}
    of_float8 = {name: others.pop(name) for name in _FLOAT8 if name in others}
    # Offsets whose values are known are checked.
    traced_sequences = {i: x for i, x in enumerate(sequences) if isinstance(x, jax.ShapeDtypeStruct)}
    call: Call | None = None

    def trace(arrays: dict[str, Any], traced_sequences: dict[int, Any]) -> None:
        nonlocal call
        if not is_varlen:
            float8 = Float8(**of_float8, **{name: arrays.pop(name) for name in _FLOAT8 if name in arrays})
            call = prepare(Arguments(**arrays, **others, window=window, float8=float8))
            return
        checked = Arguments(**arrays, **others, window=window)
        given = (traced_sequences.get(i, x) for i, x in enumerate(sequences))
        call, own = _varlen.prepare_varlen(checked, _varlen.VarlenSequences(*given))
        if own is not None and not call.is_empty:
            call = _varlen.unpacked(call, own)

    jax.eval_shape(trace, arrays, traced_sequences)
    assert call is not None
    found = _explanation("flash_attention_varlen" if is_varlen else "flash_attention", call, requested)
    if is_varlen or call.is_empty:
        return found
    sequences = _explain_sequences.of_call(call, given, found.picked, found.device)
    return dataclasses.replace(found, sequences=sequences)


def _of_cache(
    function: Callable[..., Any], prepare: Callable[..., CacheCall], args: Any, kwargs: dict[str, Any]
) -> Explanation:
    """The explanation of a call on a key-value cache, which `prepare` makes of the arguments."""
    return _explanation(function.__name__, *_prepared(function, prepare, args, kwargs))


def _of_quantize(args: Any, kwargs: dict[str, Any]) -> QuantizeExplanation:
    calls, requested = _prepared(_quantize.quantize, _quantize.prepare, args, kwargs)
    names = [field.name for field in dataclasses.fields(QuantizeExplanation)]
    return QuantizeExplanation(
        *(
            _explanation(f"quantize, {name},", call, requested)
            for name, call in zip(names, calls, strict=True)
        )
    )


def _prepared(
    function: Callable[..., Any], prepare: Callable[..., Prepared], args: Any, kwargs: dict[str, Any]
) -> tuple[Prepared, tuple[str, ...] | None]:
    """What `prepare` makes of the arguments of `function`, traced; and the implementations requested."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    requested = _arguments.implementations(arguments.pop("implementation", None))
    leaves, structure = jax.tree.flatten(arguments)
    arrays = {i: x for i, x in enumerate(leaves) if _validate.has_shape(x)}
    found: list[Prepared] = []

    def trace(arrays: dict[int, Any]) -> None:
        given = (arrays.get(i, x) for i, x in enumerate(leaves))
        found.append(prepare(**jax.tree.unflatten(structure, given)))

    jax.eval_shape(trace, arrays)
    return found[0], requested


def _explanation(
    function: str, call: Call | CacheCall | QuantizeCall, requested: tuple[str, ...] | None
) -> Explanation:
    device = _device.current()
    if call.is_empty:
        return Explanation(function, call.spec, call.shapes, device, (), None, requested, None)
    choices = tuple(_choice(name, call, device) for name in _dispatch.IMPLEMENTATIONS)
    runs = [choice.name for choice in choices if choice.runs]
    automatic = runs[0] if runs else None
    return Explanation(
        function=function,
        spec=call.spec,
        shapes=call.shapes,
        device=device,
        choices=choices,
        automatic=automatic,
        requested=requested,
        picked=next((name for name in requested if name in runs), None) if requested else automatic,
    )


def _signature() -> inspect.Signature:
    """That of `flash_attention`, without the argument that is always None."""
    signature = inspect.signature(_attention.flash_attention)
    parameters = [x for x in signature.parameters.values() if x.name != "broadcast_dropout"]
    return signature.replace(parameters=parameters)


_SIGNATURE = _signature()
_VARLEN_SIGNATURE = inspect.signature(_varlen.flash_attention_varlen)
explain.__signature__ = _SIGNATURE.replace(return_annotation=Explanation)  # type: ignore[attr-defined]


def _choice(name: str, call: Call | CacheCall | QuantizeCall, device: Device) -> Choice:
    reason = _dispatch.reason(name, call.spec, call.shapes, device)
    implementation = None if reason else _dispatch.get(name, call.spec.operation)
    kernel = None if implementation is None else implementation.describe(call.spec, call.shapes, device)
    return Choice(name, reason, kernel)


def _described(spec: _dispatch.Spec) -> str:
    """The fields of `spec` that are not their defaults."""
    if isinstance(spec, CacheSpec):
        rest = dataclasses.replace(spec, attention=None)  # type: ignore[arg-type]
        return ", ".join(filter(None, (_described(spec.attention), _changed(rest))))
    return _changed(spec)


def _changed(spec: Any) -> str:
    given = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    return ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in given.items()
        if value != defaults[name] and name != "attention"
    )
