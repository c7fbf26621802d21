"""The portable implementation cut so small that short sequences take many blocks."""

from unittest import mock

from jax_flash.xla import blocks


def small_blocks():
    """A context in which a short sequence has many blocks, and none divides an odd length."""
    return mock.patch.multiple(blocks, QUERIES_PER_BLOCK=32, QUERIES_AT_LEAST=32, KEYS_PER_BLOCK=48)
