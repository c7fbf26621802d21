"""The device a call is planned for, as a plain value."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

# JAX doesn't tell the size of a GPU's L2 cache. Where models of an architecture differ, the least of theirs.
_L2_BYTES = {(9, 0): 50 << 20}


GPU_PLATFORMS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Device:
    """What planning needs to know of a device; made up freely in tests and for compiling ahead."""

    platform: str  # "cpu", "cuda", "rocm", "tpu"
    kind: str
    compute_capability: tuple[int, int] | None = None  # CUDA only
    sm_count: int = 0
    l2_bytes: int = 0  # of the L2 cache; 0 takes what GPUs of this compute capability have, if that is known

    def __post_init__(self):
        if not self.l2_bytes and self.compute_capability in _L2_BYTES:
            object.__setattr__(self, "l2_bytes", _L2_BYTES[self.compute_capability])

    @property
    def is_gpu(self) -> bool:
        return self.platform in GPU_PLATFORMS

    @property
    def arch(self) -> str:
        """The compiler's name of the architecture, as "sm_90a" or "sm_80"."""
        if self.compute_capability is None:
            raise ValueError(f"{self.kind} is not a CUDA device")
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


CPU = Device("cpu", "cpu")
H100 = Device("cuda", "NVIDIA H100", (9, 0), 132)

# JAX's caches of traced functions know of it: what was traced for one device is not taken for another.
_assumed = jax.make_user_context(default_value=None)


def current() -> Device:
    """The device that a call traced now is planned for: JAX's default device, or the assumed one."""
    assumed = _assumed.value
    if assumed is not None:
        return assumed
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        return describe(jax.local_devices()[0])
    if isinstance(default, str):
        return describe(jax.local_devices(backend=default)[0])
    return describe(default)


@contextlib.contextmanager
def assume(device: Device) -> Iterator[None]:
    """Plan as if for `device`: to lower, export or compile ahead on a machine that lacks it."""
    with _assumed(device):
        yield


def describe(device: jax.Device) -> Device:
    """What planning needs to know of one of JAX's devices."""
    if device.platform != "gpu":
        return Device(device.platform, device.device_kind)
    if "rocm" in device.client.platform_version.lower():
        return Device("rocm", device.device_kind)
    major, minor = map(int, str(device.compute_capability).split("."))
    return Device("cuda", device.device_kind, (major, minor), device.core_count)
