"""The CUDA kernels on the GPU, through the suite that every implementation runs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import assert_same_bits
from gpu_memory import poison
from implementation_suite import Case, ImplementationSuite, compare, draw
from nonfinite_suite import NonFiniteSuite
from seeds import seed_of

import jax_flash
from jax_flash import _dropout


class TestCuda(ImplementationSuite):
    implementation = "cuda"
    head_dims = (64, 80, 96, 128, 160, 192, 256, 40, 100)
    features = (
        "bias",
        "bias_broadcast",
        "mask",
        "logits_soft_cap",
        "alibi_slopes",
        "sinks",
        "seq_lengths",
        "segment_ids",
        "packed",
        "value_head_dim",
        "dropout",
        "deterministic",
        "score_mod",
        "block_mask",
    )
    thorough = True

    def before_run(self, nbytes):
        poison(nbytes)

    @pytest.mark.parametrize(
        "fields",
        (
            dict(),
            dict(is_causal=True),
            dict(is_causal=True, features=("deterministic",)),
            dict(local_window_size=(40, 10), features=("bias", "mask", "sinks")),
        ),
        ids=str,
    )
    @pytest.mark.parametrize(
        "H,V",
        [
            *((192, 128), (128, 64), (64, 128), (128, 192), (96, 128), (40, 24), (16, 256), (256, 16)),
            *((256, 128), (160, 208), (20, 12), (100, 36), (1, 255)),
        ],
    )
    def test_values_with_a_head_dim_of_their_own(self, H, V, fields, dtype, record_property):
        case = Case("value head dim", dtype, H=H, V=V, T=333, S=517, N=4, K=2, **fields)
        record_property("category", case.category)
        record_property("implementation", self.implementation)
        record_property("error_ratios", self.check(case))

    @pytest.mark.parametrize("head_dim", (64, 128, 192, 256, (192, 128), (128, 64)))
    @pytest.mark.parametrize(
        "category,sizes",
        [
            ("many waves", dict(B=4, T=2100, S=2000, N=12, K=4, is_causal=True)),
            # whose tiles are cut along their keys
            ("ragged last wave", dict(B=1, T=200, S=4000, N=133, K=7)),
            ("few tiles", dict(B=2, T=3, S=5000, N=16, K=2)),
            ("dropout", dict(B=3, T=2100, S=2001, N=12, K=4, is_causal=True, features=("dropout",))),
            ("dropout, packed heads", dict(B=2, T=10, S=3001, N=16, K=2, features=("dropout",))),
        ],
    )
    def test_tiles_are_shared_out(self, category, sizes, head_dim, dtype, record_property):
        """More tiles than the GPU has room for at once, so that CTAs take several, or far fewer.

        Two batch rows and key heads are compared with the definition, of wide heads one. The rest would take
        too long.
        """
        H, V = head_dim if isinstance(head_dim, tuple) else (head_dim, None)
        case = Case(category, dtype, H=H, V=V, **sizes)
        arguments, spec, operands, d_out, d_lse = draw(case)
        out, lse, gradients = self.run(arguments, d_out, d_lse)
        group = case.N // case.K
        for b, k in ((0, 0), (case.B - 1, case.K - 1))[H > 128 :]:
            queries, keys = np.s_[b : b + 1, :, k * group : (k + 1) * group], np.s_[b : b + 1, :, k : k + 1]
            part = dataclasses.replace(case, B=1, N=group, K=1)
            got = (
                out[queries],
                lse[queries],
                {name: x[queries if name == "query" else keys] for name, x in gradients.items()},
            )
            slices = operands.replace(
                query=operands.query[queries], key=operands.key[keys], value=operands.value[keys]
            )
            if spec.dropout_rate:
                slices = slices.replace(
                    dropout_rows=operands.dropout_rows[b : b + 1, k * group : (k + 1) * group],
                    dropout_columns=operands.dropout_columns[b : b + 1],
                )
            ratios = compare(part, spec, slices, d_out[queries], d_lse[queries], got)
            record_property("category", case.category)
            record_property("implementation", self.implementation)
            record_property("error_ratios", ratios)

    @pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
    @pytest.mark.parametrize(
        "sizes",
        (
            dict(B=4, T=2048, S=2048, N=8, K=8),
            dict(B=4, T=2048, S=2048, N=8, K=8, is_causal=True),
            dict(B=1, T=1000, S=3001, N=12, K=3),  # more tiles of a head than blocks
            dict(B=2, T=3001, S=2000, N=12, K=3, is_causal=True),
            dict(B=1, T=4097, S=4097, N=5, K=5, local_window_size=(500, 40)),
            dict(B=3, T=129, S=6000, N=2, K=1),
            dict(B=1, T=77, S=100, N=3, K=3, is_causal=True),
        ),
        ids=lambda sizes: "-".join(f"{name}{x}" for name, x in sizes.items()),
    )
    def test_deterministic_gradients_are_the_same_bits(self, sizes, head_dim, dtype):
        """Over many runs: what differs is which CTA comes first. The numbers are compared elsewhere."""
        case = Case("deterministic", dtype, H=head_dim, features=("deterministic",), **sizes)
        arguments, _, _, d_out, d_lse = draw(case)
        program = self.program(arguments, d_out, d_lse)
        first = program()
        for _ in range(19):
            assert_same_bits(first, program())

    @pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
    @pytest.mark.parametrize(
        "features",
        (
            ("bias:11TS",),
            ("bias:1N1S", "logits_soft_cap"),
            ("bias:B1T1", "alibi_slopes:N"),
            ("bias:1111", "mask:B1TS"),
        ),
        ids="-".join,
    )
    def test_deterministic_gradients_of_a_broadcast_bias_are_the_same_bits(self, features, head_dim, dtype):
        sizes = dict(B=4, T=1000, S=1500, N=8, K=4, is_causal="bias:11TS" in features)
        case = Case("deterministic", dtype, H=head_dim, features=("deterministic", *features), **sizes)
        arguments, _, _, d_out, d_lse = draw(case)
        program = self.program(arguments, d_out, d_lse)
        first = program()
        for _ in range(9):
            assert_same_bits(first, program())

    @pytest.mark.parametrize("others", (("bias",), ("alibi_slopes",), ("bias", "alibi_slopes", "mask")))
    @pytest.mark.parametrize("head_dim", (192, 200, 256))
    def test_soft_cap_whose_derivative_is_handed_over(self, head_dim, others, dtype, record_property):
        case = Case(
            "soft cap handed over",
            dtype,
            **dict(B=2, T=300, S=450, N=4, K=2, H=head_dim, is_causal=True),
            features=("logits_soft_cap", *others),
        )
        record_property("category", case.category)
        record_property("implementation", self.implementation)
        record_property("error_ratios", self.check(case))

    @pytest.mark.parametrize("rate", (3 * 2**-15, 0.02, 0.5, 0.96))
    @pytest.mark.parametrize("head_dim", (64, 128, 192, 256))
    def test_drops_what_dropout_mask_says(self, rate, head_dim, dtype):
        """Probabilities all alike, and identities: the output and dV are the matrix of what is kept."""
        shape = 2, head_dim, 3, head_dim
        query = jnp.zeros(shape, dtype)
        identity = jnp.broadcast_to(jnp.eye(head_dim, dtype=dtype)[:, None], shape)
        key = jax.random.key(seed_of(f"{rate} {head_dim} {dtype}"))

        def attend(value):
            return jax_flash.flash_attention(
                query, query, value, dropout_rate=rate, dropout_key=key, implementation="cuda"
            )

        out, vjp = jax.vjp(attend, identity)
        (d_value,) = vjp(identity)
        kept = jax_flash.dropout_mask(key, rate, (2, 3, head_dim, head_dim))
        expected = kept / (head_dim * _dropout.keep_probability(rate))
        np.testing.assert_allclose(out.astype(jnp.float32).transpose(0, 2, 1, 3), expected, rtol=0.01)
        np.testing.assert_allclose(d_value.astype(jnp.float32).transpose(0, 2, 3, 1), expected, rtol=0.01)

    @pytest.mark.parametrize("magnitude", (1e3, 1e4, 1e5))
    @pytest.mark.parametrize("head_dim", (64, 256))
    def test_huge_logits_give_no_nan(self, magnitude, head_dim):
        """Logits of 1e7 to 1e11, whose own rounding is far more than 1: no number to compare, but finite."""
        keys = jax.random.split(jax.random.key(0), 4)
        query, key, value, d_out = (
            jax.random.normal(k, (1, 257, 2, head_dim), jnp.bfloat16) * factor
            for k, factor in zip(keys, (magnitude, magnitude, 1, 1), strict=True)
        )

        def attend(*inputs):
            return jax_flash.flash_attention(*inputs, is_causal=True, implementation="cuda")

        out, vjp = jax.vjp(attend, query, key, value)
        for x in (out, *vjp(d_out)):
            assert np.isfinite(np.asarray(x, np.float32)).all()

    def test_is_the_automatic_choice(self):
        shape = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
        assert jax_flash.explain(shape, shape, shape).automatic == "cuda"

    def test_one_program_runs_on_the_cpu_too(self):
        """A `jit` over CPU arrays on a machine with a GPU must not end in a CUDA kernel."""
        arguments, spec, operands, d_out, _ = draw(Case("cpu", "bfloat16", T=65, S=65))
        cpu = jax.local_devices(backend="cpu")[0]
        query, key, value = (jax.device_put(arguments[name], cpu) for name in ("query", "key", "value"))

        @jax.jit
        def run(inputs):
            out, vjp = jax.vjp(lambda x: jax_flash.flash_attention(**x), inputs)
            return out, None, vjp(jax.device_put(d_out, cpu))[0]

        out, _, gradients = run({"query": query, "key": key, "value": value})
        assert out.devices() == {cpu}
        got = jax.tree.map(np.asarray, (out, None, gradients))
        compare(Case("cpu", "bfloat16", T=65, S=65), spec, operands, d_out, None, got)


class TestCudaNonFinite(NonFiniteSuite):
    implementation = "cuda"
    sizes = dict(T=170, S=190, N=4, K=2, H=64)  # noqa: RUF012


class TestCudaNonFiniteInOrder(NonFiniteSuite):
    """Several tiles, whose sums have the same bits in a fixed order: shared by units, by CTAs, or not."""

    implementation = "cuda"

    def attend(self, arguments, **options):
        return super().attend(arguments | {"deterministic": True}, **options)

    @pytest.fixture(autouse=True, scope="class", params=((64, 8, 8), (128, 8, 1), (192, 8, 2), (256, 2, 2)))
    @classmethod
    def of_head_dim(cls, request):
        H, N, K = request.param
        cls.sizes = dict(T=300, S=400, N=N, K=K, H=H)


@pytest.mark.parametrize(
    "features", ((), ("bias", "dropout"), ("seq_lengths",), ("deterministic",)), ids="-".join
)
@pytest.mark.parametrize("H", (64, 128, 192, 256, 40))
def test_float32_results(H, features):
    """As steps of a ring have them: rounded, they are the usual ones."""
    case = Case("wide", "bfloat16", H=H, B=2, T=333, S=517, N=4, K=2, is_causal=True, features=features)
    _, spec, operands, d_out, d_lse = draw(case)
    operands, d_out, d_lse = jax.tree.map(jnp.asarray, (operands, d_out, d_lse.transpose(0, 2, 1)))

    @functools.partial(jax.jit, static_argnums=0)
    def run(spec, operands):
        out, lse = jax_flash.cuda.forward(spec, operands)
        rest = out.astype(operands.query.dtype), lse, d_out, d_lse
        return {"out": out, **jax_flash.cuda.backward(spec, operands, *rest).present()}

    usual = run(spec, operands)
    poison(4 * sum(x.nbytes for x in usual.values()))
    wide = run(spec.wide(), operands)
    np.testing.assert_array_equal(wide["out"].astype(usual["out"].dtype), usual["out"])
    for name in ("query", "key", "value"):
        assert wide[name].dtype == jnp.float32
        exact, rounded = (np.asarray(x[name], np.float64) for x in (wide, usual))
        assert np.linalg.norm(exact - rounded) <= 2.0**-8 * np.linalg.norm(exact), name
    shared = run(spec.wide("shared"), operands)
    assert shared["query"].dtype == usual["query"].dtype and shared["key"].dtype == jnp.float32
    for name in ("query", "key", "value"):
        exact, other = (np.asarray(x[name], np.float64) for x in (wide, shared))
        assert np.linalg.norm(exact - other) <= 2.0**-8 * np.linalg.norm(exact), name
