import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _device, _dispatch


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments():
    return struct(2, 3, 4, 4, 8), struct(2, 3, 5, 2, 8), struct(2, 3, 5, 2, 16)


@pytest.fixture
def fakes(monkeypatch):
    """Implementations that are all about what they say: pallas lacks the soft cap."""

    def get(name, operation="attention"):
        def supports(spec, shapes, device):
            if name == "cuda" and device.platform != "cuda":
                return "it needs a GPU"
            return "it has no logits_soft_cap yet" if name == "pallas" and spec.logits_soft_cap else None

        return types.SimpleNamespace(
            supports=supports, describe=lambda spec, shapes, device: f"{name} tiles of 128 x 64"
        )

    monkeypatch.setattr(_dispatch, "get", get)


def test_value(fakes):
    with _device.assume(_device.H100):
        explanation = jax_flash.explain(*arguments(), logits_soft_cap=30.0)
    assert [(c.name, c.runs, c.reason, c.kernel) for c in explanation.choices] == [
        ("cuda", True, None, "cuda tiles of 128 x 64"),
        ("pallas", False, "it has no logits_soft_cap yet", None),
        ("xla", True, None, "xla tiles of 128 x 64"),
    ]
    assert explanation.automatic == explanation.picked == "cuda"
    assert explanation.device == _device.H100
    assert explanation.shapes.query.shape == (6, 4, 4, 8)


def test_text(fakes):
    with _device.assume(_device.CPU):
        text = str(jax_flash.explain(*arguments(), is_causal=True, implementation="cuda"))
    assert text.splitlines() == [
        "flash_attention on cpu (cpu)",
        "  query float32 (6, 4, 4, 8)",
        "  key float32 (6, 5, 2, 8)",
        "  value float32 (6, 5, 2, 16)",
        "  scale=0.353553, right=0",
        "cuda    does not run: it needs a GPU",
        "pallas  runs: pallas tiles of 128 x 64",
        "xla     runs: xla tiles of 128 x 64",
        "implementation=None picks pallas",
        "implementation=('cuda',) picks none, and raises NotImplementedError",
    ]


def test_varlen_sequences(fakes):
    packed = dict(cu_seqlens_q=struct(4, dtype=np.int32), max_seqlen_q=9, max_seqlen_kv=7)
    tensors = [struct(20, 4, 8), struct(12, 2, 8), struct(12, 2, 8)]
    with _device.assume(_device.H100):
        offsets = np.array([0, 5, 5, 12])
        explanation = jax_flash.explain(*tensors, cu_seqlens_kv=offsets, is_causal=True, **packed)
        assert str(explanation).splitlines()[:2] == [
            f"flash_attention_varlen on {_device.H100.kind} (cuda)",
            "  query float32 (1, 20, 4, 8)",
        ]
        assert explanation.spec.max_query_length == 9 and explanation.picked == "cuda"
        # Slopes of each sequence make rows of them.
        slopes = jax_flash.explain(
            *tensors, cu_seqlens_kv=offsets, alibi_slopes=struct(3, 4), implementation="xla", **packed
        )
        assert slopes.shapes.query.shape == (3, 9, 4, 8) and slopes.picked == "xla"
        with pytest.raises(ValueError, match="cu_seqlens_kv must ascend"):
            jax_flash.explain(*tensors, cu_seqlens_kv=np.array([0, 7, 5, 12]), **packed)


def test_what_is_requested(fakes):
    with _device.assume(_device.CPU):
        explanation = jax_flash.explain(*arguments(), implementation=["cuda", "xla"])
    assert (explanation.automatic, explanation.picked) == ("pallas", "xla")


def test_agrees_with_what_runs():
    query = jnp.ones((1, 4, 2, 8))
    explanation = jax_flash.explain(query, query, query)
    for choice in explanation.choices:
        if choice.runs:
            jax_flash.flash_attention(query, query, query, implementation=choice.name)
        else:
            with pytest.raises(NotImplementedError) as raised:
                jax_flash.flash_attention(query, query, query, implementation=choice.name)
            assert choice.reason in str(raised.value)
    assert explanation.picked in [choice.name for choice in explanation.choices if choice.runs]


def test_arrays_and_shapes_say_the_same():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 4, 2, 8)).astype(np.float32)
    options = dict(
        bias=rng.normal(size=(2, 1, 4)).astype(np.float32),
        mask=np.ones((2, 1, 1, 4), bool),
        key_value_seq_lengths=np.array([1, 2], np.int32),
        query_segment_ids=np.zeros((2, 4), np.int32),
        key_value_segment_ids=np.zeros((2, 4), np.int32),
        alibi_slopes=np.ones(2, np.float32),
        sinks=np.ones(2, np.float32),
        dropout_key=jax.random.key(0),
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), options)
    static = dict(dropout_rate=0.1, local_window_size=2, return_residual=True)
    with_arrays = jax_flash.explain(query, query, query, **options, **static)
    with_shapes = jax_flash.explain(*[struct(2, 4, 2, 8)] * 3, **shapes, **static)
    assert with_arrays == with_shapes
    assert set(with_arrays.shapes.present()) >= {"bias", "mask", "sinks", "dropout_rows", "dropout_columns"}


def test_the_shape_of_a_scale_is_that_of_a_traced_one():
    query, key, value = arguments()
    found = jax_flash.explain(query, key, value, scale=jax.ShapeDtypeStruct((), jnp.float32))
    assert found == jax_flash.explain(query, key, value, scale=1.0)


def test_nothing_to_compute():
    explanation = jax_flash.explain(struct(2, 0, 4, 8), struct(2, 5, 2, 8), struct(2, 5, 2, 8))
    assert explanation.choices == () and explanation.automatic is None
    assert "nothing to compute" in str(explanation)


def test_a_wrong_argument():
    with pytest.raises(TypeError, match="num_heads"):
        jax_flash.explain(*arguments(), num_heads=3)


def half(*shape):
    return struct(*shape, dtype=jnp.bfloat16)


def integers(*shape):
    return struct(*shape, dtype=jnp.int32)


def test_calls_on_caches():
    query, rows, new = half(2, 1, 4, 64), half(2, 128, 2, 64), half(2, 1, 2, 64)
    cache = jax_flash.KVCache(rows, rows, integers(2))
    options = {"local_window_size": (9, 0), "num_splits": 3}
    by_position = jax_flash.explain(query, cache, new, new, **options)
    assert by_position == jax_flash.explain(query=query, cache=cache, key=new, value=new, **options)
    assert by_position.function == "flash_attention_with_cache" and by_position.automatic == "xla"
    for text in ("key bfloat16 (2, 128, 2, 64)", "scale=0.125, left=9", "num_splits=3", "tiles of 1 queries"):
        assert text in str(by_position), text
    pages = jax_flash.PagedKVCache(rows, rows, integers(2, 5), integers(2))
    assert "page_table int32 (2, 5)" in str(jax_flash.explain(query, pages))
    with pytest.raises(ValueError, match="query must have shape"):
        jax_flash.explain(half(3, 1, 4, 64), cache)


def test_kernels_run_calls_on_caches():
    rows = half(2, 128, 2, 64)
    cache = jax_flash.KVCache(rows, rows, integers(2))
    with _device.assume(_device.H100):
        found = jax_flash.explain(half(2, 1, 4, 64), cache)
        assert (found.automatic, found.picked) == ("cuda", "cuda")
        assert [choice.name for choice in found.choices if choice.runs] == ["cuda", "pallas", "xla"]
        odd = jax_flash.explain(half(2, 1, 4, 60), jax_flash.KVCache(*[half(2, 128, 2, 60)] * 2, integers(2)))
        assert odd.automatic == "pallas"


def test_ragged_paged_attention():
    found = jax_flash.explain(
        q=half(9, 4, 64),
        kv_pages=half(20, 16, 4, 64),
        kv_lens=integers(3),
        page_indices=integers(3, 4),
        cu_q_lens=integers(4),
        num_seqs=integers(1),
        sliding_window=8,
    )
    assert found.function == "ragged_paged_attention" and found.picked == "xla"
    assert "left=7" in str(found)


def test_quantize():
    """Each array by itself: its kernel, or why not."""
    arrays = half(2, 3, 1000, 8, 128), half(2, 3, 900, 2, 128), half(2, 3, 900, 2, 300)
    lengths = {"query_seq_lengths": integers(2, 3), "quantization_key": jax.random.key(0)}
    with _device.assume(_device.H100):
        found = jax_flash.explain(jax_flash.quantize, *arrays, **lengths)
        assert [x.picked for x in (found.query, found.key, found.value)] == ["cuda", "cuda", "xla"]
        assert found.query.shapes.rows.shape == (6, 1000, 8, 128) and found.query.spec.group == 4
        assert found.query.shapes.lengths.shape == (6,) and found.key.shapes.lengths is None
        assert found.value.choices[0].reason == "the head dim is 300; it may be up to 256"
        assert "quantize, value, on " in str(found) and "no kernels for rounding to e4m3" in str(found)
        by_head = jax_flash.explain(
            jax_flash.quantize, *arrays, scales="head", implementation=("cuda", "pallas")
        )
        assert by_head.key.automatic == "xla" and by_head.key.picked is None
    no_query = half(2, 3, 0, 8, 128)
    here = jax_flash.explain(jax_flash.quantize, query=no_query, key=arrays[1], value=arrays[2])
    assert here.key.picked == "xla" and "nothing to compute" in str(here.query)
    with pytest.raises(ValueError, match="quantization_key goes with incoherent=True"):
        jax_flash.explain(jax_flash.quantize, *arrays, incoherent=False, **lengths)


def test_what_it_says_of_quantize_is_what_runs():
    arrays = [jnp.ones((1, 4, 2, 8), jnp.float32)] * 3
    found = jax_flash.explain(jax_flash.quantize, *arrays).query
    assert found.picked == "xla"
    for choice in found.choices:
        if choice.runs:
            jax_flash.quantize(*arrays, implementation=choice.name)
        else:
            with pytest.raises(NotImplementedError) as raised:
                jax_flash.quantize(*arrays, implementation=choice.name)
            assert choice.reason in str(raised.value)


def test_the_function_ahead_of_its_arguments():
    cache = jax_flash.KVCache(half(2, 128, 2, 64), half(2, 128, 2, 64), integers(2))
    for function, given in (
        (jax_flash.flash_attention, arguments()),
        (jax_flash.flash_attention_with_cache, (half(2, 1, 4, 64), cache)),
    ):
        found = jax_flash.explain(function, *given)
        assert found == jax_flash.explain(*given) and found.function == function.__name__
    ragged = half(9, 4, 64), half(20, 16, 4, 64), integers(3), integers(3, 4), integers(4), integers(1)
    assert jax_flash.explain(jax_flash.ragged_paged_attention, *ragged).picked == "xla"
    with pytest.raises(TypeError, match=r"must be one of flash_attention, .*quantize; got .*dropout_mask"):
        jax_flash.explain(jax_flash.dropout_mask, *arguments())
