"""The Pallas kernels on the GPU, through the suite that every implementation runs."""

from typing import Any

import jax
import pytest
from attention_case import Case
from gpu_memory import poison
from implementation_suite import FEATURES, ImplementationSuite
from nonfinite_suite import NonFiniteSuite
from pallas_lowering import only_lowering

from jax_flash.pallas import lowering
from jax_flash.pallas.mosaic import head_shares
from jax_flash.pallas.mosaic import tiles as mosaic_tiles

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


BY_MOSAIC = {"logits_soft_cap", "sinks", "seq_lengths", "segment_ids", "packed"}
"""The options that its kernels take on Hopper."""


class TestPallas(ImplementationSuite):
    """By Mosaic GPU on Hopper, by Triton elsewhere."""

    implementation = "pallas"
    head_dims = (64, 40, 72, 80, 96, 128, 256)  # every swizzle of shared memory, and two that are padded
    features = FEATURES

    def before_run(self, nbytes):
        poison(nbytes)


class TestPallasByTriton(TestPallas):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_triton(cls):
        with only_lowering(lowering.TRITON):
            yield


class TestPallasNonFiniteByTriton(NonFiniteSuite):
    implementation = "pallas"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_triton(cls):
        with only_lowering(lowering.TRITON):
            yield


class TestPallasNonFiniteOfManyTilesByTriton(TestPallasNonFiniteByTriton):
    """In float16, whose rounding hides less of a difference in float32."""

    dtype = "float16"
    sizes = dict(T=300, S=410, N=4, K=2, H=128)  # noqa: RUF012


class TestPallasNonFiniteByMosaic(NonFiniteSuite):
    """On Hopper. In float16, whose rounding hides less of a difference in float32."""

    implementation = "pallas"
    dtype = "float16"
    sizes = dict(T=300, S=410, N=4, K=2, H=64)  # noqa: RUF012
    situations = ("causal", "window", "window and soft cap", "lengths", "segments alone", "packed alone")

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def by_mosaic(cls):
        with only_lowering(lowering.MOSAIC):
            yield


class TestPallasNonFiniteOfHeadDim128ByMosaic(TestPallasNonFiniteByMosaic):
    """With more queries than keys, so that some see none."""

    sizes = dict(T=700, S=650, N=4, K=2, H=128)  # noqa: RUF012


class TestPallasNonFiniteOfOddHeadDimsByMosaic(TestPallasNonFiniteByMosaic):
    dtype = "bfloat16"
    sizes = dict(T=300, S=410, N=4, K=1, H=80, V=48)  # noqa: RUF012


class TestPallasNonFiniteOfWideHeadsByMosaic(TestPallasNonFiniteByMosaic):
    """With kernels of their own for dK and dV."""

    dtype = "bfloat16"
    sizes = dict(T=300, S=410, N=4, K=2, H=256)  # noqa: RUF012


class TestPallasNonFiniteOfNarrowValuesByMosaic(TestPallasNonFiniteByMosaic):
    sizes = dict(T=300, S=410, N=4, K=2, H=192, V=128)  # noqa: RUF012


class TestPallasNonFiniteTogetherByMosaic(TestPallasNonFiniteByMosaic):
    """With one kernel for all gradients. That of dQ alone computes dQ again."""

    sizes = dict(T=300, S=410, N=4, K=2, H=128)  # noqa: RUF012
    sums_in_any_order = ("d_query",)

    @pytest.fixture(autouse=True)
    def together(self, monkeypatch):
        monkeypatch.setattr(mosaic_tiles, "KEYS_TO_SUM_TOGETHER", 0)


class TestPallasTogether(TestPallas):
    """With one kernel for all gradients however few keys there are, on Hopper."""

    head_dims = (128,)

    @classmethod
    def cases(cls):
        return [case for case in super().cases() if set(case.features) <= BY_MOSAIC]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def together(cls):
        jax.clear_caches()  # which don't know of the number of keys
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mosaic_tiles, "KEYS_TO_SUM_TOGETHER", 0)
            yield
        jax.clear_caches()


_MASKS: tuple[dict[str, Any], ...] = (
    dict(),
    dict(is_causal=True),
    dict(local_window_size=(200, 30)),
    dict(is_causal=True, features=("deterministic",)),
    dict(is_causal=True, features=("seq_lengths", "logits_soft_cap", "sinks")),
    dict(features=("segment_ids",)),
)


@pytest.fixture(scope="class")
def two_head_shares():
    """Two for each key head that has several query heads, and one kernel for all gradients at head dim 128,
    however short the call is."""
    jax.clear_caches()  # which don't know of the number of shares
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_shares, "choose", lambda problem: 2)
        patch.setattr(mosaic_tiles, "KEYS_TO_SUM_TOGETHER", 0)
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("two_head_shares")
class TestPallasByHeadShares(TestPallas):
    """With head shares of a key head, of unequal length at three query heads, by all kernels."""

    @classmethod
    def cases(cls):
        grouped = [case for case in super().cases() if case.category == "groups"]
        more = [
            Case("groups", "bfloat16", T=700, S=650, N=6, K=2, H=H, **options)
            for H in (80, 128, 256)
            for options in _MASKS
        ]
        return grouped + more


class TestPallasPackedRows(TestPallas):
    """With batch rows whose lengths aren't multiples of 8, and whose tokens in all are: packed, on Hopper."""

    @classmethod
    def cases(cls):
        options = (*_MASKS[:4], dict(is_causal=True, features=("logits_soft_cap",)))
        return [
            Case("groups", "bfloat16", B=8, T=197, S=S, N=4, K=2, H=H, **own)
            for H in (64, 128, 256)
            for S in (197, 77)
            for own in options
        ]


@pytest.mark.usefixtures("two_head_shares")
class TestPallasNonFiniteByHeadShares(TestPallasNonFiniteByMosaic):
    sizes = dict(T=300, S=410, N=3, K=1, H=64)  # noqa: RUF012
