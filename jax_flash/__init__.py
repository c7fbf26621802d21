"""Exact attention for JAX that never stores the matrix of logits."""

# Registers the custom calls, which a program exported elsewhere may hold.
import jax_flash.cuda.call  # noqa: F401
from jax_flash import flash_attn as flash_attn
from jax_flash import flax as flax  # `import *` leaves it out: it would hide Flax itself
from jax_flash import masks as masks
from jax_flash._attention import flash_attention
from jax_flash._block_mask import BlockMask, create_block_mask
from jax_flash._cache import KVCache, PagedKVCache
from jax_flash._dot_product_attention import dot_product_attention
from jax_flash._dropout import dropout_mask
from jax_flash._explain import explain
from jax_flash._planned_for import planned_for
from jax_flash._precompile import precompile
from jax_flash._quantize import quantize
from jax_flash._ragged_paged_attention import ragged_paged_attention
from jax_flash._rotary import apply_rotary
from jax_flash._varlen import flash_attention_varlen
from jax_flash._with_cache import flash_attention_with_cache
from jax_flash.context_parallel.attention import context_parallel_attention
from jax_flash.context_parallel.load_balance import reorder_for_load_balance, restore_order
from jax_flash.masks import and_masks, or_masks

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "KVCache",
    "PagedKVCache",
    "and_masks",
    "apply_rotary",
    "context_parallel_attention",
    "create_block_mask",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_attention_with_cache",
    "flash_attn",
    "masks",
    "or_masks",
    "planned_for",
    "precompile",
    "quantize",
    "ragged_paged_attention",
    "reorder_for_load_balance",
    "restore_order",
]
