"""The whole public API on the GPU, forward and backward, under JAX's strict settings that act at run time.

The others refuse what is traced: tests/api/test_strict_settings.py lowers every call under them.
"""

from strict_settings import StrictSettingsSuite

AT_RUN_TIME = ("x64", "debug nans", "debug infs", "disable jit", "transfer guard")


class TestCuda(StrictSettingsSuite):
    implementation = "cuda"
    dtype = "bfloat16"
    settings = AT_RUN_TIME


class TestPallas(StrictSettingsSuite):
    implementation = "pallas"
    dtype = "bfloat16"
    settings = AT_RUN_TIME

    def takes(self, call):
        return call.takes_implementation and super().takes(call)


class TestXla(StrictSettingsSuite):
    """All else that plain JAX does, it does on the CPU too."""

    implementation = "xla"
    dtype = "float32"
    settings = ("disable jit", "transfer guard")

    def takes(self, call):
        return call.takes_implementation and super().takes(call)
