"""`python -m jax_flash.precompile`: the cache filled ahead is the one that calls find."""

import jax
import jax.numpy as jnp
import pytest

from jax_flash import precompile
from jax_flash._device import H100, Device
from jax_flash._spec import AttentionSpec, Operands
from jax_flash.cuda import cache, compile


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile, "_compiled", {})


@pytest.fixture
def wanted(monkeypatch):
    """The kernels that `main` asks for, in place of compiling them."""
    seen = []
    monkeypatch.setattr(precompile, "compile_kernel", seen.append)
    return seen


def make_operands(batch: int, length: int, heads: int, key_heads: int, head_dim: int) -> Operands:
    query = jax.ShapeDtypeStruct((batch, length, heads, head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, length, key_heads, head_dim), jnp.bfloat16)
    return Operands(query, key, key)


@pytest.mark.parametrize(
    "arch, capability", [("sm_90a", (9, 0)), ("sm_80", (8, 0)), ("sm_89", (8, 9)), ("sm_100a", (10, 0))]
)
def test_device_of(arch, capability):
    device = precompile.device_of(arch)
    assert (device.platform, device.compute_capability, device.arch) == ("cuda", capability, arch)


@pytest.mark.parametrize("arch", ["90", "sm_90", "sm_80a", "sm_9", "hopper", ""])
def test_other_names_of_architectures_are_refused(arch, capsys):
    with pytest.raises(ValueError, match="arch must be"):
        precompile.device_of(arch)
    with pytest.raises(SystemExit):
        precompile.main(["--arch", arch])
    assert "arch must be" in capsys.readouterr().err


def test_calls_find_every_kernel_that_was_compiled_ahead(monkeypatch, capsys):
    arguments = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal true --group 8 --jobs 2"
    precompile.main(arguments.split())
    entries, size = cache.usage()
    printed = capsys.readouterr().out
    assert f"[{entries}/{entries}]" in printed and f"{entries} kernels, {size} bytes" in printed

    def no_compiler(kernel, folder):
        raise AssertionError(f"{kernel} was not in the cache")

    monkeypatch.setattr(compile, "_compiled", {})
    monkeypatch.setattr(compile, "_compile", no_compiler)
    spec = AttentionSpec(scale=0.3, right=0)
    for operands in (make_operands(3, 999, 8, 8, 64), make_operands(1, 4096, 32, 4, 64)):
        for kernel in precompile.kernels(spec, operands, H100):
            compile.compile_kernel(kernel)


def test_a_group_without_heads_is_refused(capsys):
    with pytest.raises(SystemExit):
        precompile.main("--arch sm_90a --group 0".split())
    assert "--group: must be at least 1; got 0" in capsys.readouterr().err


def test_options_combine(wanted):
    precompile.main("--arch sm_90a --head-dim 64 128 --dtype bfloat16 float16 --causal true false".split())
    combinations = {(dict(k.defines)["ELEMENT"], dict(k.defines)["HEAD_DIM"]) for k in wanted}
    assert combinations == {(dtype, dim) for dtype in ("bfloat16", "float16") for dim in (64, 128)}
    assert len(set(wanted)) == len(wanted)
    assert {kernel.arch for kernel in wanted} == {"sm_90a"}


def test_values_may_have_a_head_dim_of_their_own(wanted):
    arguments = "--arch sm_90a --head-dim 192 --value-head-dim 128 --dtype bfloat16 --causal true".split()
    precompile.main(arguments)
    assert {(dict(k.defines)["HEAD_DIM"], dict(k.defines)["VALUE_DIM"]) for k in wanted} == {(192, 128)}
    first = set(wanted)
    wanted.clear()
    precompile.main([*arguments, "--value-head-dim", "127"])  # padded to the same
    assert set(wanted) == first


def test_a_window_compiles_its_own_kernels(wanted):
    arguments = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal false"
    precompile.main(arguments.split())
    full = set(wanted)
    wanted.clear()
    precompile.main([*arguments.split(), "--local-window-size", "256", "0"])
    assert set(wanted) != full
    wanted.clear()
    precompile.main([*arguments.split(), "--local-window-size", "-1", "-1"])
    assert set(wanted) == full


def test_deterministic_gradients_have_a_kernel_of_their_own(wanted):
    arguments = "--arch sm_90a --head-dim 64 --dtype bfloat16 --causal false --deterministic"
    precompile.main([*arguments.split(), "false"])
    default = set(wanted)
    wanted.clear()
    precompile.main([*arguments.split(), "true"])
    main, finish = sorted(set(wanted) - default, key=lambda kernel: kernel.entry)
    assert main.entry == "backward" and ("DETERMINISTIC", 1) in main.defines
    assert finish.entry == "backward_postprocess"


def test_a_window_that_is_none_is_refused(wanted, capsys):
    with pytest.raises(SystemExit):
        precompile.main("--arch sm_90a --local-window-size -2 0".split())
    assert "local_window_size must hold sizes of at least 0" in capsys.readouterr().err


def test_calls_that_cannot_run_are_named(wanted, capsys):
    precompile.main("--arch sm_90a --head-dim 64 264 --dtype bfloat16 --causal true".split())
    assert wanted
    assert "head dim 264, bfloat16: key's head dim is 264" in capsys.readouterr().err


def test_nothing_to_compile_is_an_error(wanted):
    with pytest.raises(SystemExit, match="nothing was compiled"):
        precompile.main("--arch sm_90a --head-dim 264".split())
    assert wanted == []


def test_only_the_architecture_decides(wanted):
    device = Device("cuda", "another Hopper", (9, 0), sm_count=78)
    spec, operands = AttentionSpec(scale=1.0), make_operands(1, 512, 2, 1, 128)
    assert precompile.kernels(spec, operands, device) == precompile.kernels(spec, operands, H100)
