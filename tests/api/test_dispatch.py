"""Which implementation is picked, and what is said when none can be."""

import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _device, _dispatch, _slower
from jax_flash._dispatch import SlowerImplementationWarning
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import compile

SPEC = AttentionSpec(scale=1.0)
SHAPES = Operands(*[jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)] * 3)


@pytest.fixture(autouse=True)
def nothing_warned_of_yet():
    _slower._told.clear()
    yield
    _slower._told.clear()


@pytest.fixture
def support(monkeypatch):
    """Stand-ins for the implementations, each with its reason why it can't run a call."""

    def use(**reasons):
        def get(name, operation="attention"):
            if isinstance(reasons[name], Exception):
                raise reasons[name]
            if callable(reasons[name]):
                return types.SimpleNamespace(name=name, supports=reasons[name])
            return types.SimpleNamespace(name=name, supports=lambda spec, shapes, device: reasons[name])

        monkeypatch.setattr(_dispatch, "get", get)

    return use


def select(names, device=_device.H100):
    return _dispatch.select(SPEC, SHAPES, names, device)


def test_none_picks_the_first_that_supports_the_call(support):
    support(cuda=None, pallas=None, xla=None)
    assert select(None) == ("cuda", "xla")
    support(cuda="no sinks yet", pallas=None, xla=None)
    assert select(None) == ("pallas", "xla")
    support(cuda="no sinks yet", pallas="no sinks yet", xla=None)
    with pytest.warns(SlowerImplementationWarning):
        assert select(None) == ("xla",)


def test_a_named_one_stands_alone(support):
    support(cuda=None, pallas=None, xla=None)
    for name in _dispatch.IMPLEMENTATIONS:
        assert select([name]) == (name,)


def test_a_sequence_is_tried_in_order(support):
    support(cuda=None, pallas=None, xla=None)
    assert select(("pallas", "cuda")) == ("pallas",)
    assert select(("pallas", "xla")) == ("pallas", "xla")
    assert select(("xla", "cuda")) == ("xla",)
    support(cuda="no", pallas="no", xla=None)
    assert select(("cuda", "xla")) == ("xla",)


def test_a_named_one_that_can_not(support):
    support(cuda="head dim 320 is more than 256", pallas=None, xla=None)
    with pytest.raises(NotImplementedError) as raised:
        select(["cuda"])
    assert str(raised.value) == (
        'implementation "cuda" can\'t run this call on NVIDIA H100 (cuda): head dim 320 is more than 256'
    )


def test_none_of_a_sequence_can(support):
    support(cuda="no sinks yet", pallas="no bias yet", xla=None)
    with pytest.raises(NotImplementedError, match="cuda: no sinks yet; pallas: no bias yet"):
        select(["cuda", "pallas"])


def test_one_that_can_not_be_imported_says_so(support):
    support(cuda=ImportError("no module named cuda_thing"), pallas=None, xla=None)
    with pytest.warns(SlowerImplementationWarning, match="no module named cuda_thing"):
        assert select(None) == ("pallas", "xla")
    reasons = _dispatch.reasons(SPEC, SHAPES, _device.H100)
    assert "it can't be imported (ImportError: no module named cuda_thing, " in reasons["cuda"]
    assert (reasons["pallas"], reasons["xla"]) == (None, None)


def test_a_limit_that_leaves_nothing_but_the_portable_one_warns_once_for_each_reason(support):
    support(cuda="head dim 320", pallas="head dim is 320", xla=None)
    with pytest.warns(SlowerImplementationWarning) as warned:
        assert [select(None) for _ in range(3)] == [("xla",)] * 3
        support(cuda="head dim 512", pallas="head dim is 512", xla=None)
        assert select(None) == ("xla",)
    assert [str(warning.message) for warning in warned] == [
        'On NVIDIA H100 this call of jax_flash runs by implementation="xla", which is slower, because of: '
        f"cuda: head dim {dim}; pallas: head dim is {dim}. "
        'To choose it without this warning, pass implementation="xla".'
        for dim in (320, 512)
    ]


@pytest.mark.parametrize(
    "names, device, reasons",
    [
        (
            ["cuda", "xla"],
            _device.H100,
            dict(cuda="no sinks", pallas=None, xla=None),
        ),  # named
        (["xla"], _device.H100, dict(cuda="no sinks", pallas="no sinks", xla=None)),
        (
            None,
            _device.H100,
            dict(cuda="no sinks", pallas=None, xla=None),
        ),  # still a kernel
        (None, _device.CPU, dict(cuda="no GPU", pallas="no GPU", xla=None)),
        (None, _device.Device("tpu", "TPU v5e"), dict(cuda="no GPU", pallas="no GPU", xla=None)),
    ],
)
def test_what_is_as_documented_or_chosen_does_not_warn(support, names, device, reasons):
    support(**reasons)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(names, device)


@pytest.mark.parametrize("names", [None, ["cuda", "xla"], ["cuda", "pallas"]])
def test_a_fault_of_the_installation_always_warns(support, names):
    def supports(spec, shapes, device):
        raise ImportError("NVRTC is not there: pip install it")

    support(cuda=supports, pallas=None, xla=None)
    with pytest.warns(
        SlowerImplementationWarning, match="cuda: NVRTC is not there: pip install it"
    ) as warned:
        select(names)
        select(names)
    assert len(warned) == 1


def test_a_warning_that_is_an_error_is_raised_by_every_call(support):
    support(cuda=ImportError("broken"), pallas=None, xla=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(SlowerImplementationWarning):
                select(None)


def test_an_error_that_is_no_import_error_is_not_swallowed(support):
    support(cuda=OSError("libcuda is damaged"), pallas=None, xla=None)
    with pytest.raises(OSError, match="libcuda is damaged"):
        select(None)


def attend(**options):
    query = jax.ShapeDtypeStruct((1, 128, 2, 64), options.pop("dtype", jnp.bfloat16))
    with _device.assume(_device.H100):
        return jax.eval_shape(lambda x: jax_flash.flash_attention(x, x, x, **options), query)


@pytest.fixture(params=["cuda", "pallas"])
def broken(request, monkeypatch, tmp_path):
    """A real implementation that fails while it is imported, two modules deep."""
    package = tmp_path / f"broken_{request.param}"
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner\n")
    (package / "inner.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib_import = _dispatch.importlib.import_module

    def import_module(name):
        return importlib_import(package.name if name == f"jax_flash.{request.param}" else name)

    _dispatch.get.cache_clear()
    monkeypatch.setattr(_dispatch, "importlib", types.SimpleNamespace(import_module=import_module))
    yield request.param
    _dispatch.get.cache_clear()


def test_a_broken_import_warns_at_the_callers_line_with_what_failed_and_the_cure(broken):
    with pytest.warns(SlowerImplementationWarning) as warned:
        # "pallas" is asked where "cuda" has refused.
        attend(dtype=jnp.float32) if broken == "pallas" else attend()
    (warning,) = warned
    message = str(warning.message)
    assert f"{broken}: it can't be imported (ModuleNotFoundError: No module named" in message
    assert re.search(r"inner\.py:1\)", message) and "pip install --force-reinstall jax_flash" in message
    assert warning.filename == __file__


def test_a_broken_import_of_the_one_that_is_named_raises(broken):
    with pytest.raises(NotImplementedError, match="a_module_that_is_not_there") as raised:
        attend(implementation=broken)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_without_nvrtc_the_warning_names_the_extra(monkeypatch):
    from jax_flash import cuda

    def missing(name):
        raise ImportError("No module named 'cuda'")

    cuda.require_nvrtc.cache_clear()
    compile._nvrtc.cache_clear()
    monkeypatch.setattr(compile, "importlib", types.SimpleNamespace(import_module=missing))
    try:
        with pytest.warns(SlowerImplementationWarning, match=r"pip install 'jax_flash\[cuda13\]'") as warned:
            attend()
            attend()
        assert len(warned) == 1
        assert 'implementation="pallas"' in str(warned[0].message)
        with pytest.raises(NotImplementedError, match="cuda13"):
            attend(implementation="cuda")
        with warnings.catch_warnings():  # a documented limit comes before what is missing
            warnings.simplefilter("ignore")
            attend(dtype=jnp.float32)
    finally:
        cuda.require_nvrtc.cache_clear()
        compile._nvrtc.cache_clear()


@pytest.mark.parametrize("lowering", ["triton", "mosaic_gpu"])
def test_without_a_lowering_of_pallas(monkeypatch, lowering):
    monkeypatch.setitem(sys.modules, f"jax.experimental.pallas.{lowering}", None)
    if lowering == "triton":
        with pytest.raises(NotImplementedError, match="has no Triton lowering of Pallas"):
            attend(implementation="pallas")
    else:
        with pytest.warns(SlowerImplementationWarning, match="has no Mosaic GPU lowering") as warned:
            attend(implementation="pallas")
        assert len(warned) == 1 and warned[0].filename == __file__


def test_a_documented_limit_on_a_gpu_warns_at_the_callers_line():
    with pytest.warns(SlowerImplementationWarning, match="query's dtype is float32") as warned:
        attend(dtype=jnp.float32)
        attend(dtype=jnp.float32)
    assert [warning.filename for warning in warned] == [__file__]


def test_explain_does_not_warn():
    query = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
    with _device.assume(_device.H100), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax_flash.explain(query, query, query).automatic == "xla"


@pytest.mark.parametrize("name", ["cuda", "pallas"])
def test_no_gpu(name):
    """The real implementations, on a device without a GPU."""
    query = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with _device.assume(_device.CPU), pytest.raises(NotImplementedError) as raised:
        jax_flash.flash_attention(query, query, query, implementation=name)
    assert f'implementation "{name}" can\'t run this call on cpu (cpu): ' in str(raised.value)
    assert "GPU" in str(raised.value)


def test_no_gpu_is_said_while_tracing():
    query = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with _device.assume(_device.CPU), pytest.raises(NotImplementedError, match="GPU"):
        jax.eval_shape(lambda x: jax_flash.flash_attention(x, x, x, implementation="cuda"), query)


def test_no_gpu_and_a_sequence_with_a_way_out():
    query = jnp.ones((1, 4, 2, 64), jnp.bfloat16)
    with _device.assume(_device.CPU):
        out = jax_flash.flash_attention(query, query, query, implementation=["cuda", "xla"])
    assert out.shape == query.shape


def test_the_portable_one_runs_everything_everywhere():
    for device in (_device.CPU, _device.H100, _device.Device("tpu", "TPU v5e")):
        assert _dispatch.reasons(SPEC, SHAPES, device)["xla"] is None
