"""The README's support table is what the implementations say of themselves.

python tests/api/test_support_table.py      writes it anew
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_flash import _dispatch, masks
from jax_flash._cache_spec import CacheOperands, CacheSpec
from jax_flash._device import CPU, H100, Device
from jax_flash._quantize_spec import QuantizeOperands, QuantizeSpec
from jax_flash._spec import AttentionSpec, BlockMaskSpec, Operands
from jax_flash.functions.static import static_masked_score, static_score_mod

README = Path(__file__).parents[2] / "README.md"
MARKED = re.compile(r"(<!-- support-table -->\n).*?(<!-- /support-table -->)", re.DOTALL)

ARCHITECTURES = {
    "CPU": CPU,
    "TPU": Device("tpu", "TPU v5"),
    "Ampere": Device("cuda", "NVIDIA A100", (8, 0), 108),
    "Ada": Device("cuda", "NVIDIA L40S", (8, 9), 142),
    "Hopper": H100,
    "Blackwell": Device("cuda", "NVIDIA B200", (10, 0), 148),
}

Call = tuple[_dispatch.Spec, _dispatch.Shapes]


def calls() -> dict[str, Call]:
    """A call for each row of the table, the plainest first."""
    B, T, S, N = 2, 1000, 777, 8

    def call(dtype="bfloat16", head_dim=128, value_head_dim=None, key_heads=N, spec=None, **operands) -> Call:
        value_head_dim = value_head_dim or head_dim
        shapes = Operands(
            jax.ShapeDtypeStruct((B, T, N, head_dim), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((B, S, key_heads, head_dim), jnp.dtype(dtype)),
            jax.ShapeDtypeStruct((B, S, key_heads, value_head_dim), jnp.dtype(dtype)),
            **{name: jax.ShapeDtypeStruct(shape, t) for name, (shape, t) in operands.items()},
        )
        return dataclasses.replace(AttentionSpec(scale=0.1), **spec or {}), shapes

    words = {"dropout_rows": ((B, N, T), jnp.uint32), "dropout_columns": ((B, S), jnp.uint32)}
    indices = {"batch_indices": ((B,), jnp.int32), "head_indices": ((1, N), jnp.int32)}
    score_mod, _ = static_score_mod(lambda score, b, h, q, k: jnp.where(q < k, score, 2 * score))
    lengths, segments = ((B,), jnp.int32), (((B, T), jnp.int32), ((B, S), jnp.int32))
    return {
        "bfloat16, any lengths": call(),
        "float16": call("float16"),
        "float32": call("float32"),
        "head dim 64": call(head_dim=64),
        "head dim 256": call(head_dim=256),
        "head dim not a multiple of 8": call(head_dim=100),
        "head dim over 256": call(head_dim=512),
        "`V != H`": call(value_head_dim=64),
        "grouped and multi-query heads": call(key_heads=2),
        "`is_causal`": call(spec={"right": 0}),
        "`local_window_size`": call(spec={"left": 100, "right": 10}),
        "`return_residual`, with gradients": call(spec={"return_residual": True}),
        "`bias`": call(bias=((1, N, T, S), jnp.bfloat16)),
        "`mask`": call(mask=((B, 1, T, S), jnp.bool_)),
        "`logits_soft_cap`": call(spec={"logits_soft_cap": 30.0}),
        "`alibi_slopes`": call(alibi_slopes=((1, N), jnp.float32)),
        "`sinks`": call(sinks=((1, N), jnp.float32)),
        "`dropout_rate`": call(spec={"dropout_rate": 0.1}, **words),
        "sequence lengths": call(query_seq_lengths=lengths, key_value_seq_lengths=lengths),
        "varlen sequences": call(
            spec={"max_query_length": 600, "max_key_value_length": 500},
            query_offsets=((B, 4), jnp.int32),
            key_value_offsets=((B, 4), jnp.int32),
        ),
        "segment ids": call(query_segment_ids=segments[0], key_value_segment_ids=segments[1]),
        "`deterministic`": call(spec={"deterministic": True}),
        "`score_mod`": call(spec={"score_mod": score_mod}, **indices),
        "`block_mask`": call(
            spec={"block_mask": BlockMaskSpec((128, 128), None)},
            **indices,
            block_kinds=((1, 1, 8, 7), jnp.int8),
        ),
        '`quantization="fp8"`': call(spec={"quantization": "fp8"}, rotation_signs=((1, 128), jnp.float32)),
        "float8 arrays, without gradients": call(
            "float8_e4m3fn", spec={"out_dtype": "bfloat16"}, query_descale=((B, N, 8), jnp.float32)
        ),
        "`quantize`, a scale for each block of rows": quantizing(),
        "`quantize` of float32, or with other scales": quantizing("float32"),
        **calls_on_caches(),
    }


def quantizing(dtype="bfloat16") -> Call:
    rows = jax.ShapeDtypeStruct((2, 1000, 8, 128), jnp.dtype(dtype))
    return QuantizeSpec(group=4), QuantizeOperands(rows, jax.ShapeDtypeStruct((1, 128), jnp.float32))


def calls_on_caches() -> dict[str, Call]:
    B, T, S, N, K, H, page = 2, 4, 1024, 8, 2, 128, 5

    def call(
        query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, H), right=0, score_mod=None, **integers
    ) -> Call:
        rows = (None if x is None else jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (query, key, value))
        integers = {"lengths": (B,)} | integers
        others = {name: jax.ShapeDtypeStruct(x, jnp.int32) for name, x in integers.items()}
        spec = AttentionSpec(scale=0.1, right=right, score_mod=score_mod)
        return CacheSpec(spec), CacheOperands(*rows, **others)

    pages = (500, page, K, H)
    score_mod, _ = static_masked_score(lambda score, b, h, q, k: score - k, masks.LocalMask(9))
    indices = {"batch_indices": (B,), "head_indices": (1, N)}
    return {
        "key-value caches": call(),
        "key-value caches, `score_mod` and `mask_mod`": call(score_mod=score_mod, **indices),
        "paged caches, any page size": call(key=pages, value=pages, page_table=(B, 60)),
        "`ragged_paged_attention`": call(
            (1, 200, N, H), (500, page, 2 * K, H), None, page_table=(B, 60), query_offsets=(B + 1,)
        ),
    }


def runs_on(name: str, call: Call) -> list[str]:
    return [a for a, device in ARCHITECTURES.items() if _dispatch.reason(name, *call, device) is None]


def table() -> str:
    """Markdown. "yes" is: wherever the implementation runs at all."""
    rows = calls()
    plainest = next(iter(rows.values()))
    names = _dispatch.IMPLEMENTATIONS
    everywhere = {name: runs_on(name, plainest) for name in names}

    def listed(architectures):
        return "everywhere" if len(architectures) == len(ARCHITECTURES) else ", ".join(architectures) or "–"

    def cell(name, call):
        there = runs_on(name, call)
        return "yes" if there and there == everywhere[name] else listed(there)

    lines = [["", *(f"`{name}`" for name in names)], ["---"] * (1 + len(names))]
    lines.append(["runs on", *(listed(everywhere[name]) for name in names)])
    lines += [[row, *(cell(name, call) for name in names)] for row, call in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_readme_has_the_current_table():
    found = MARKED.search(README.read_text())
    assert found, "README.md has no <!-- support-table --> … <!-- /support-table -->"
    current = found.group().removeprefix(found[1]).removesuffix(found[2])
    assert current == table(), "stale: run python tests/api/test_support_table.py"


def test_portable_implementation_supports_every_row():
    assert all(len(runs_on("xla", call)) == len(ARCHITECTURES) for call in calls().values())


if __name__ == "__main__":
    README.write_text(MARKED.sub(lambda found: found[1] + table() + found[2], README.read_text()))
