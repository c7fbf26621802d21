"""`jax_flash.precompile` and its command: the cache filled ahead is the one that calls find."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _device, _precompile
from jax_flash._device import H100, Device
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import cache, compile

pytestmark = pytest.mark.every_turn


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_compiled", {})


@pytest.fixture
def wanted(monkeypatch):
    """The kernels that are asked for, in place of compiling them."""
    seen = []

    def store(kernel):
        seen.append(kernel)
        return True

    monkeypatch.setattr(_precompile, "store", store)
    monkeypatch.setattr(_precompile, "is_stored", lambda kernel: False)
    return seen


def make_operands(batch: int, length: int, heads: int, key_heads: int, head_dim: int) -> Operands:
    query = jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, length, key_heads, head_dim), jnp.bfloat16)
    return Operands(query, key, key)


@pytest.mark.parametrize(
    "arch, capability", [("sm_90a", (9, 0)), ("sm_80", (8, 0)), ("sm_89", (8, 9)), ("sm_100a", (10, 0))]
)
def test_device_of(arch, capability):
    device = _precompile.device_of(arch)
    assert (device.platform, device.compute_capability, device.arch) == ("cuda", capability, arch)


@pytest.mark.parametrize("arch", ["90", "sm_90", "sm_80a", "sm_9", "hopper", ""])
def test_other_names_of_architectures_are_refused(arch, capsys):
    with pytest.raises(ValueError, match="arch must be"):
        _precompile.device_of(arch)
    with pytest.raises(SystemExit):
        _precompile.main(["--arch", arch])
    assert "arch must be" in capsys.readouterr().err


def test_calls_find_every_kernel_that_was_compiled_ahead(monkeypatch, capsys):
    arguments = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal true --group 8 --jobs 2"
    _precompile.main(arguments.split())
    entries, size = cache.usage()
    printed = capsys.readouterr().out
    assert f"[{entries}/{entries}]" in printed and f"{entries} kernels, {size} bytes" in printed

    def no_compiler(kernel, folder):
        raise AssertionError(f"{kernel} was not in the cache")

    monkeypatch.setattr(compile, "_compiled", {})
    monkeypatch.setattr(compile, "_compile", no_compiler)
    spec = AttentionSpec(scale=0.3, right=0)
    for operands in (make_operands(3, 999, 8, 8, 64), make_operands(1, 4096, 32, 4, 64)):
        for kernel in _precompile.kernels(spec, operands, H100):
            compile.compile_kernel(kernel)


def test_a_group_without_heads_is_refused(capsys):
    with pytest.raises(SystemExit):
        _precompile.main("--arch sm_90a --group 0".split())
    assert "--group: must be at least 1; got 0" in capsys.readouterr().err


def test_options_combine(wanted):
    _precompile.main("--arch sm_90a --head-dim 64 128 --dtype bfloat16 float16 --causal true false".split())
    combinations = {(dict(k.defines)["ELEMENT"], dict(k.defines)["HEAD_DIM"]) for k in wanted}
    assert combinations == {(dtype, dim) for dtype in ("bfloat16", "float16") for dim in (64, 128)}
    assert len(set(wanted)) == len(wanted)
    assert {kernel.arch for kernel in wanted} == {"sm_90a"}


def test_values_may_have_a_head_dim_of_their_own(wanted):
    arguments = "--arch sm_90a --head-dim 192 --value-head-dim 128 --dtype bfloat16 --causal true".split()
    _precompile.main(arguments)
    assert {(dict(k.defines)["HEAD_DIM"], dict(k.defines)["VALUE_DIM"]) for k in wanted} == {(192, 128)}
    first = set(wanted)
    wanted.clear()
    _precompile.main([*arguments, "--value-head-dim", "127"])  # padded to the same
    assert set(wanted) == first


def test_a_window_compiles_its_own_kernels(wanted):
    arguments = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal false"
    _precompile.main(arguments.split())
    full = set(wanted)
    wanted.clear()
    _precompile.main([*arguments.split(), "--local-window-size", "256", "0"])
    assert set(wanted) != full
    wanted.clear()
    _precompile.main([*arguments.split(), "--local-window-size", "-1", "-1"])
    assert set(wanted) == full


def test_deterministic_gradients_have_a_kernel_of_their_own(wanted):
    arguments = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal false --deterministic"
    _precompile.main([*arguments.split(), "false"])
    default = set(wanted)
    wanted.clear()
    _precompile.main([*arguments.split(), "true"])
    # Main, and main whose units share tiles, each with each number of sums of dQ. So have preprocess and
    # postprocess; those with one sum serve both.
    own = set(wanted) - default
    assert sorted(kernel.entry for kernel in own) == sorted(
        ["backward"] * 8 + ["backward_preprocess", "backward_postprocess"] * 3
    )
    assert all(("DETERMINISTIC", 1) in kernel.defines for kernel in own if kernel.entry == "backward")


def test_a_window_that_is_none_is_refused(wanted, capsys):
    with pytest.raises(SystemExit):
        _precompile.main("--arch sm_90a --local-window-size -2 0".split())
    assert "local_window_size must hold sizes of at least 0" in capsys.readouterr().err


def test_calls_that_cannot_run_are_named(wanted, capsys):
    _precompile.main("--arch sm_90a --head-dim 64 264 --dtype bfloat16 --causal true".split())
    assert wanted
    assert "head dim 264, bfloat16: key's head dim is 264" in capsys.readouterr().err


def test_nothing_to_compile_is_an_error(wanted):
    with pytest.raises(SystemExit, match="nothing was compiled"):
        _precompile.main("--arch sm_90a --head-dim 264".split())
    assert wanted == []


def test_only_the_architecture_decides(wanted):
    device = Device("cuda", "another Hopper", (9, 0), sm_count=78)
    spec, operands = AttentionSpec(scale=1.0), make_operands(1, 512, 2, 1, 128)
    assert _precompile.kernels(spec, operands, device) == _precompile.kernels(spec, operands, H100)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--jobs 0", "argument --jobs: must be at least 1; got 0"),
        ("--head-dim 0", "argument --head-dim: must be at least 1; got 0"),
        ("--head-dim 64 0", "argument --head-dim: must be at least 1; got 0"),
        ("--value-head-dim 0", "argument --value-head-dim: must be at least 1; got 0"),
        ("--seq-len -5", "argument --seq-len: must be at least 1; got -5"),
        ("--seq-len many", "argument --seq-len: must be an integer; got 'many'"),
        ("--group -1", "argument --group: must be at least 1; got -1"),
    ],
)
def test_options_out_of_range_are_refused(wanted, capsys, arguments, said):
    with pytest.raises(SystemExit) as exited:
        _precompile.main(["--arch", "sm_90a", *arguments.split()])
    assert exited.value.code == 2
    assert said in capsys.readouterr().err
    assert wanted == []


ONE_CALL = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal true".split()


def test_a_folder_that_can_not_be_written_is_an_error_before_anything_is_compiled(
    wanted, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "file" / "folder"))
    with pytest.raises(SystemExit, match=r"kernels can't be kept: .*JAX_FLASH_CACHE_DIR names another"):
        _precompile.main(ONE_CALL)
    assert wanted == []


def test_kernels_that_are_not_kept_are_an_error(wanted, monkeypatch, tmp_path, capsys):
    """As on a full disk, which takes an empty file and no more."""
    monkeypatch.setattr(_precompile, "store", lambda kernel: wanted.append(kernel) or len(wanted) < 2)
    with pytest.raises(SystemExit, match=r"\d+ of \d+ kernels are not kept in .*: is its disk full\?"):
        _precompile.main(ONE_CALL)
    assert "compiled, not kept: " in capsys.readouterr().out


def test_store_says_whether_the_disk_has_it(monkeypatch, tmp_path):
    kernel = fake_compiler(monkeypatch)
    assert not compile.is_stored(kernel)
    assert compile.store(kernel) and compile.is_stored(kernel)
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "another"))
    assert not compile.is_stored(kernel)
    assert compile.store(kernel) and compile.is_stored(kernel)  # though this process has it in memory
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(cache, "_warned", True)
    assert not compile.store(kernel)


def fake_compiler(monkeypatch):
    """Makes compiling instant; gives some kernel."""
    monkeypatch.setattr(compile, "_compile", lambda kernel, folder: compile.Compiled(b"cubin", "log"))
    spec, operands = AttentionSpec(scale=1.0, right=0), make_operands(1, 128, 1, 1, 64)
    return _precompile.kernels(spec, operands, H100)[0]


# The function.

QUERY = jax.ShapeDtypeStruct((2, 256, 8, 64), jnp.bfloat16)
KEY = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)


def defines(report):
    """For each kernel its entry point and its defines."""
    return {(kernel.name.split()[0], kernel.name.split("(")[1]) for kernel in report.kernels}


def test_compiles_forward_and_backward_with_every_option(wanted):
    def attend(query, key, value, bias, mask, dropout_key, lengths):
        return jax_flash.flash_attention(
            query,
            key,
            value,
            bias,
            mask,
            logits_soft_cap=20.0,
            dropout_rate=0.1,
            dropout_key=dropout_key,
            key_value_seq_lengths=lengths,
        )

    report = jax_flash.precompile(
        attend,
        *(QUERY, KEY, KEY),
        jax.ShapeDtypeStruct((1, 8, 256, 256), jnp.float32),
        jax.ShapeDtypeStruct((2, 1, 256, 256), jnp.bool_),
        jax.random.key(0),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        device="sm_90a",
    )
    entries = {kernel.entry for kernel in wanted}
    assert {"forward", "backward"} < entries  # and kernels around them, and of the mask's metadata
    for kernel in wanted:
        if kernel.entry in ("forward", "backward"):
            found = dict(kernel.defines)
            assert (found["SOFT_CAP"], found["BIAS"], found["MASK"], found["DROPOUT"]) == (1, "float", 1, 1)
    assert [kernel.name for kernel in report.kernels] == [compile.describe(kernel) for kernel in wanted]
    assert report.arch == "sm_90a" and report.compiled == report.kernels


def test_varlen_sequences_and_segments(wanted):
    def attend(query, offsets, ids):
        packed = jax_flash.flash_attention_varlen(
            *(query[0],) * 3, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=99, max_seqlen_kv=99
        )
        ids = dict(query_segment_ids=ids, key_value_segment_ids=ids)
        return packed, jax_flash.flash_attention(query, query, query, **ids)

    offsets, ids = jax.ShapeDtypeStruct((5,), jnp.int32), jax.ShapeDtypeStruct((2, 256), jnp.int32)
    report = jax_flash.precompile(attend, QUERY, offsets, ids, device="sm_90a")
    plain = jax_flash.precompile(lambda x: jax_flash.flash_attention(x, x, x), QUERY, device="sm_90a")
    assert defines(report) - defines(plain)


def test_a_training_step_under_jit_and_scan(wanted):
    """It has its gradient inside, which can't be taken twice."""

    def loss(weight, x):
        def layer(x, _):
            return jax_flash.flash_attention(x * weight, x, x, is_causal=True), None

        out, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=2)
        return (out.astype(jnp.float32) ** 2).mean()

    @jax.jit
    def step(state, x):
        return state["weight"] - 0.1 * jax.grad(loss)(state["weight"], x), state["count"] + 1

    state = {"weight": jax.ShapeDtypeStruct((), jnp.bfloat16), "count": jax.ShapeDtypeStruct((), jnp.int32)}
    report = jax_flash.precompile(step, state, QUERY, device="sm_90a")
    assert {"forward", "backward"} < {kernel.entry for kernel in wanted}
    # Once more, though JAX has traced `step` before.
    assert defines(jax_flash.precompile(step, state, QUERY, device="sm_90a")) == defines(report)


def test_forward_alone(wanted):
    def attend(x):
        return jax_flash.flash_attention(x, x, x)

    jax_flash.precompile(attend, QUERY, device="sm_90a", backward=False)
    assert "forward" in {kernel.entry for kernel in wanted}
    assert "backward" not in {kernel.entry for kernel in wanted}


def test_a_function_that_has_no_gradient_is_refused_unless_told(wanted):
    def attend(x):
        return jax.lax.while_loop(
            lambda x: x[0, 0, 0, 0] < 1, lambda x: jax_flash.flash_attention(x, x, x), x
        )

    with pytest.raises(ValueError, match=r"(?s)function has no gradient.*backward=False.*while_loop"):
        jax_flash.precompile(attend, QUERY, device="sm_90a")
    assert jax_flash.precompile(attend, QUERY, device="sm_90a", backward=False).kernels


def test_what_was_traced_before_for_another_device_is_traced_again(wanted):
    attend = jax.jit(lambda x: jax_flash.flash_attention(x, x, x))
    jax.eval_shape(attend, QUERY)  # for the CPU
    assert jax_flash.precompile(attend, QUERY, device="sm_90a").kernels
    out = attend(jnp.ones(QUERY.shape, QUERY.dtype))  # and for the CPU again
    assert out.shape == QUERY.shape


def test_a_function_without_attention_has_no_kernels(wanted):
    report = jax_flash.precompile(lambda x: x + 1, QUERY, device="sm_90a")
    assert report.kernels == () and "0 kernels for sm_90a" in str(report)


def test_calls_after_it_compile_nothing(monkeypatch):
    seen = []

    def compiler(kernel, folder):
        seen.append(kernel)
        return compile.Compiled(b"cubin", "log")

    monkeypatch.setattr(compile, "_compile", compiler)
    registered = []
    monkeypatch.setattr(jax_flash.cuda.call, "_compile_all", registered.append)

    def attend(x):
        return jax_flash.flash_attention(x, x, x, is_causal=True, implementation="cuda")

    report = jax_flash.precompile(attend, QUERY, device="sm_90a", jobs=2)
    assert len(report.compiled) == len(report.kernels) == len(seen) > 0
    assert "compiled: forward of " in str(report)
    with _device.assume(H100):
        jax.eval_shape(lambda x: jax.vjp(attend, x)[1](x), QUERY)
    wanted = {launch.kernel for plan in registered for launch in plan.launches}
    assert wanted == set(seen)
    again = jax_flash.precompile(attend, QUERY, device="sm_90a")
    assert again.compiled == () and "from the cache: " in str(again) and len(seen) == len(report.kernels)


def test_arguments_that_are_refused(wanted):
    refused = functools.partial(jax_flash.precompile, lambda x: x, QUERY)
    with pytest.raises(ValueError, match=r'JAX\'s default device.* is cpu \(cpu\).* device="sm_90a"'):
        refused()
    with pytest.raises(ValueError, match="device is cpu"):
        refused(device=jax.devices("cpu")[0])
    with pytest.raises(ValueError, match="arch must be as"):
        refused(device="hopper")
    with pytest.raises(TypeError, match="device must be None, an architecture"):
        refused(device=90)
    with pytest.raises(ValueError, match="jobs must be at least 1; got 0"):
        refused(device="sm_90a", jobs=0)
    with pytest.raises(TypeError, match="backward must be True or False"):
        refused(device="sm_90a", backward=1)
    with pytest.raises(TypeError, match="function must be callable"):
        jax_flash.precompile(QUERY, device="sm_90a")


IMPORTS = """
import jax_flash, jax_flash.precompile
assert jax_flash.precompile is jax_flash._precompile.precompile
import jax_flash.precompile
from jax_flash import precompile
assert jax_flash.precompile is precompile is jax_flash._precompile.precompile
"""


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


def test_the_function_stays_in_place_when_the_command_is_imported():
    process = run_python("-W", "error", "-c", IMPORTS)
    assert process.returncode == 0, process.stderr


def test_the_command():
    process = run_python("-W", "error", "-m", "jax_flash.precompile", "--arch", "sm_90a", "--head-dim", "264")
    assert process.returncode == 1
    assert "nothing was compiled" in process.stderr and "Traceback" not in process.stderr
