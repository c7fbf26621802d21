"""JAX's strict settings, and calls of the whole public API to run under each of them.

A setting that is on in a user's program must not make a call fail which JAX's own functions would pass: no
axes added in silence, no dtypes mixed, no NaN on the way to a finite result, nothing sent to the device that
the user did not send.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive import thinned

import jax_flash
import jax_flash.flax
from jax_flash import KVCache, PagedKVCache, flash_attn, masks

SETTINGS: dict[str, dict[str, Any]] = {
    "rank promotion raise": {"jax_numpy_rank_promotion": "raise"},
    "dtype promotion strict": {"jax_numpy_dtype_promotion": "strict"},
    "x64": {"jax_enable_x64": True},
    "debug nans": {"jax_debug_nans": True},
    "debug infs": {"jax_debug_infs": True},
    "enable checks": {"jax_enable_checks": True},
    "disable jit": {"jax_disable_jit": True},
    "transfer guard": {"jax_transfer_guard": "disallow"},
}


_latest = None


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """JAX under that one of `SETTINGS`."""
    global _latest
    if name != _latest:  # JAX checks nothing in a program that it has already run without the setting
        jax.clear_caches()
        _latest = name
    before = {option: getattr(jax.config, option) for option in SETTINGS[name]}
    for option, value in SETTINGS[name].items():
        jax.config.update(option, value)
    try:
        yield
    finally:
        for option, value in before.items():
            jax.config.update(option, value)


@dataclasses.dataclass(frozen=True)
class StrictCall:
    """A call of the public API.

    `run` takes the differentiable inputs and the other ones, both by name, and the implementation's name; it
    returns the results through which gradients flow.
    """

    run: Callable[[dict[str, jax.Array], dict[str, jax.Array], str], Any]
    inputs: dict[str, jax.Array]
    others: dict[str, jax.Array]
    returns_infinities: bool = False  # as the lse of rows without keys
    by_kernels: bool = True  # whether these take it; plain JAX takes all
    takes_implementation: bool = True  # as `jax_flash.flash_attn`, as the official package, doesn't

    def replace(self, inputs: dict[str, jax.Array], others: dict[str, jax.Array]) -> "StrictCall":
        return dataclasses.replace(self, inputs=inputs, others=others)

    def forward_and_backward(self, implementation: str) -> Any:
        """Results, and the gradients of their weighted sum."""
        results, vjp = jax.vjp(lambda inputs: self.run(inputs, self.others, implementation), self.inputs)
        return results, vjp(results)


def calls(dtype: str) -> dict[str, StrictCall]:
    """Every public function and option, several options a call, on fresh arrays."""
    rng = np.random.default_rng(0)
    B, T, S, N, K, H = 2, 19, 23, 4, 2, 16

    def normal(*shape: int, dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    def integers(*values: Any) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    def tensors(*lead: int) -> dict[str, jax.Array]:
        return {
            "query": normal(*lead, T, N, H),
            "key": normal(*lead, S, K, H),
            "value": normal(*lead, S, K, H),
        }

    def attention(inputs, others=None, returns_infinities=False, **options):
        def run(inputs, others, implementation):
            return jax_flash.flash_attention(**inputs, **others, **options, implementation=implementation)

        return StrictCall(run, inputs, others or {}, returns_infinities)

    def of(function, inputs, others=None, returns_infinities=False, **options):
        """A call that takes query, key and value by position."""
        named = function.__module__ != flash_attn.__name__

        def run(inputs, others, implementation):
            rest = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
            qkv = inputs["query"], inputs["key"], inputs["value"]
            by_name = {"implementation": implementation} if named else {}
            return function(*qkv, **rest, **others, **options, **by_name)

        return StrictCall(run, inputs, others or {}, returns_infinities, takes_implementation=named)

    mask = jnp.asarray(rng.random((B, 1, T, S)) < 0.8).at[..., :2].set(True)
    segments = {
        "query_segment_ids": jnp.asarray(np.sort(rng.integers(0, 3, (B, T))), jnp.int32),
        "key_value_segment_ids": jnp.asarray(np.sort(rng.integers(0, 3, (B, S))), jnp.int32),
    }
    lengths = {"query_seq_lengths": integers(T, 5), "key_value_seq_lengths": integers(7, S)}
    key_lengths = {"key_value_seq_lengths": integers(7, S)}
    per_head = {"alibi_slopes": normal(N, dtype="float32"), "sinks": normal(N, dtype="float32")}
    dropout = {"dropout_key": jax.random.key(1)}
    offsets = {"cu_seqlens_q": integers(0, 8, 8, T), "cu_seqlens_kv": integers(0, 3, 12, S)}
    official = {"cu_seqlens_q": offsets["cu_seqlens_q"], "cu_seqlens_k": offsets["cu_seqlens_kv"]}
    longest = {"max_seqlen_q": 11, "max_seqlen_kv": 11}
    return {
        "plain": attention(tensors(B)),
        "no batch axis": attention(tensors(), return_residual=True),
        "two batch axes": attention(tensors(2, B), is_causal=True),
        "every change of scores": attention(
            tensors(B) | {"bias": normal(1, N, T, S)} | per_head,
            {"mask": mask},
            logits_soft_cap=20.0,
            return_residual=True,
        ),
        "rows without keys": attention(
            tensors(B) | {"alibi_slopes": normal(B, N, dtype="float32")},
            lengths,
            returns_infinities=True,
            is_causal=True,
            return_residual=True,
        ),
        "segments, window": attention(tensors(B), segments, local_window_size=(9, 3)),
        "dropout, deterministic": attention(
            tensors(B) | {"bias": normal(N, 1, S)}, dropout, dropout_rate=0.2, deterministic=True
        ),
        "dot_product_attention": of(
            jax_flash.dot_product_attention, tensors(B), lengths, local_window_size=(8, 4)
        ),
        "dot_product_attention, bias": of(
            jax_flash.dot_product_attention,
            tensors(B),
            {"bias": integers(*range(S)), "mask": mask, **key_lengths},
        ),
        "varlen": of(
            jax_flash.flash_attention_varlen,
            tensors() | per_head,
            offsets | dropout,
            returns_infinities=True,
            is_causal=True,
            dropout_rate=0.2,
            return_residual=True,
            **longest,
        ),
        "varlen, slopes of sequences": of(
            jax_flash.flash_attention_varlen,
            tensors() | {"alibi_slopes": normal(3, N, dtype="float32")},
            offsets,
            returns_infinities=True,
            return_residual=True,
            **longest,
        ),
        "flash_attn_func": of(
            flash_attn.flash_attn_func,
            tensors(B) | {"alibi_slopes": normal(N, dtype="float32")},
            window_size=(9, 3),
            softcap=10.0,
            return_attn_probs=True,
        ),
        "flash_attn_varlen_func": of(
            flash_attn.flash_attn_varlen_func,
            tensors(),
            official,
            causal=True,
            max_seqlen_q=11,
            max_seqlen_k=11,
        ),
        "flash_attn_qkvpacked_func": StrictCall(
            lambda inputs, others, _: flash_attn.flash_attn_qkvpacked_func(**inputs, **others, causal=True),
            {"qkv": normal(B, T, 3, N, H)},
            {},
            takes_implementation=False,
        ),
        "apply_rotary": StrictCall(
            lambda inputs, others, _: jax_flash.apply_rotary(**inputs, **others),
            {"x": normal(B, T, N, H), "cos": normal(T + 5, H // 2), "sin": normal(T + 5, H // 2)},
            {"offsets": integers(5, 0)},
            takes_implementation=False,
        ),
        "apply_rotary_emb": StrictCall(
            lambda inputs, others, _: flash_attn.apply_rotary_emb(**inputs, **others, seqlen_offsets=3),
            {"x": normal(T, N, H), "cos": normal(T + 5, 4), "sin": normal(T + 5, 4)},
            {"cu_seqlens": integers(0, 8, 8, T)},
            takes_implementation=False,
        ),
        **_on_caches(normal, integers),
        "functions": StrictCall(
            _of_functions, tensors(B) | {"table": normal(N, 5)}, {"bound": integers(3, 9)}, by_kernels=False
        ),
        "pad and unpad": padded(normal(B, T, N, H), jnp.asarray(rng.random((B, T)) < 0.7)),
        "flax": of(
            jax_flash.flax.dot_product_attention,
            tensors(B),
            {"dropout_rng": jax.random.key(2), "mask": mask},
            dropout_rate=0.1,
        ),
        "flax, bound": of(
            jax_flash.flax.dot_product_attention,
            tensors(B) | {"sinks": per_head["sinks"]},
            lengths | segments,
            local_window_size=(9, 3),
            logits_soft_cap=20.0,
        ),
        "flax, dtype": of(
            jax_flash.flax.dot_product_attention,
            tensors(B) | {"bias": normal(1, N, T, S)},
            is_causal=True,
            dtype=jnp.dtype(dtype),
        ),
    }


def _of_functions(inputs, others, implementation):
    """A score_mod and a mask function, which capture arrays."""
    table, bound = inputs["table"], others["bound"]
    tensors = {name: inputs[name] for name in ("query", "key", "value")}
    B, T, N, _ = tensors["query"].shape
    mask = jax_flash.create_block_mask(
        lambda b, h, q, k: k <= q + bound[b], B, N, T, tensors["key"].shape[1], block_size=8
    )
    return jax_flash.flash_attention(
        **tensors,
        score_mod=lambda score, b, h, q, k: score + table[h, (q + k) % 5].astype(jnp.float32),
        block_mask=mask,
        implementation=implementation,
    )


def padded(x: jax.Array, is_token: jax.Array) -> StrictCall:
    """Attention within the tokens of padded rows: unpadded, packed, and padded again."""

    def run(inputs, others, implementation):
        is_token = others["is_token"]
        B, T = is_token.shape
        size = B * T if isinstance(is_token, jax.core.Tracer) else None
        packed, indices, offsets, *_ = flash_attn.unpad_input(inputs["x"], is_token, size=size)
        out = flash_attn.flash_attn_varlen_func(packed, packed, packed, offsets, offsets, T, T)
        return flash_attn.pad_input(out, indices, B, T)

    return StrictCall(run, {"x": x}, {"is_token": is_token}, takes_implementation=False)


def _on_caches(normal: Callable[..., jax.Array], integers: Callable[..., jax.Array]) -> dict[str, StrictCall]:
    """Calls on key-value caches, which have no derivative: all their arrays are other ones."""
    B, T, N, K, H, S, page = 2, 3, 4, 2, 16, 24, 8

    def rows(*shape: int) -> dict[str, jax.Array]:
        return {"key": normal(*shape), "value": normal(*shape)}

    table = integers([4, 0, 7], [2, 5, 1])
    angles = normal(S, H // 2)
    new = rows(B, T, K, H)
    tables = {"rotary_cos": jnp.cos(angles), "rotary_sin": jnp.sin(angles)}
    per_head = {"alibi_slopes": normal(N, dtype="float32"), "sinks": normal(N, dtype="float32")}
    contiguous = KVCache(*rows(B, S, K, H).values(), integers(5, 0))
    paged = PagedKVCache(*rows(2, 9, page, K, H).values(), table, integers([1, 2], [9, 3]))

    def attend(**options: Any) -> Callable[..., Any]:
        def run(_, others, implementation):
            out, cache = jax_flash.flash_attention_with_cache(
                **others, **options, implementation=implementation
            )
            return out, [x for x in jax.tree.leaves(cache) if jnp.issubdtype(x.dtype, jnp.floating)]

        return run

    def ragged(_, others, implementation):
        return jax_flash.ragged_paged_attention(
            **others, k_scale=0.5, v_scale=2.0, implementation=implementation
        )

    def official(_, others, implementation):
        return flash_attn.flash_attn_with_kvcache(**others, causal=True)

    def with_functions(mask: masks.Mask | None = None, **options: Any) -> Callable[..., Any]:
        """A score_mod that captures an array, and that mask or a mask_mod that captures the array too."""

        def run(_, others, implementation):
            table = others["table"]
            given = {name: x for name, x in others.items() if name != "table"}
            functions = {
                "score_mod": lambda score, b, h, q, k: score + table[h, (q + k) % 5].astype(jnp.float32),
                "mask_mod": (lambda b, h, q, k: (table[h, k % 5] < 1) | (q == k)) if mask is None else mask,
            }
            return attend(**functions, **options)(None, given, implementation)

        return run

    query = normal(B, T, N, H)
    pages = rows(9, page, K, H)
    of_functions = {"query": query, "cache": contiguous, "table": normal(N, 5)} | new
    return {
        "cache, functions": StrictCall(with_functions(), {}, of_functions | tables),
        "cache, functions, ready-made mask": StrictCall(
            with_functions(masks.CausalMask() & ~masks.DilatedMask((2, 0), 3), is_causal=False),
            {},
            of_functions | per_head,
        ),
        "cache, rows without keys": StrictCall(
            attend(mask_mod=lambda b, h, q, k: (q + h) % 2 == 0, return_residual=True),
            {},
            {"query": query, "cache": contiguous, **new},
            returns_infinities=True,
        ),
        "cache": StrictCall(attend(), {}, {"query": query, "cache": contiguous} | new | tables | per_head),
        "cache of layers": StrictCall(
            attend(layer=1),
            {},
            {"query": query, "cache": jax.tree.map(lambda x: jnp.stack([x, x]), contiguous)} | new,
        ),
        "paged cache": StrictCall(
            attend(local_window_size=(4, 0), logits_soft_cap=3.0),
            {},
            {"query": query, "cache": paged, "layer": jnp.asarray(1, jnp.int32)} | new,
        ),
        "ragged_paged_attention": StrictCall(
            ragged,
            {},
            {
                "q": normal(5, N, H),
                "kv_pages": normal(9, page, 2 * K, H),
                "kv_lens": integers(7, 20),
                "page_indices": table,
                "cu_q_lens": integers(0, 2, 5),
                "num_seqs": integers(2),
            },
        ),
        "flash_attn_with_kvcache": StrictCall(
            official,
            {},
            {
                "q": query,
                "k_cache": pages["key"],
                "v_cache": pages["value"],
                "k": new["key"],
                "v": new["value"],
                "cache_seqlens": integers(5, 0),
                "block_table": table,
                **tables,
            },
            takes_implementation=False,
        ),
    }


_calls_once = functools.cache(calls)


class StrictSettingsSuite:
    """Every call under every setting; subclass it in a test file, with a name that starts with `Test`."""

    implementation: str
    dtype: str
    settings = tuple(SETTINGS)

    def run(self, call: StrictCall) -> None:
        jax.block_until_ready(call.forward_and_backward(self.implementation))

    def pytest_generate_tests(self, metafunc):
        if "call" in metafunc.fixturenames:
            drawn = _calls_once(self.dtype)
            names = [name for name in drawn if self.takes(drawn[name])]
            pairs = thinned(itertools.product(self.settings, names), lambda pair: pair)
            metafunc.parametrize("option,call", pairs, indirect=["call"])

    def takes(self, call: StrictCall) -> bool:
        return call.by_kernels or self.implementation == "xla"

    @pytest.fixture
    def call(self, request) -> StrictCall:
        return _calls_once(self.dtype)[request.param]

    def test_no_call_fails(self, option, call):
        with setting(option):
            if option == "debug infs" and call.returns_infinities:
                with contextlib.suppress(FloatingPointError):  # it has what the setting looks for
                    self.run(call)
            else:
                self.run(call)
