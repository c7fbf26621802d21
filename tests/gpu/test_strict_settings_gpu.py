"""The whole public API on the GPU, forward and backward, under each of JAX's strict settings."""

from strict_settings import StrictSettingsSuite


class TestCuda(StrictSettingsSuite):
    implementation = "cuda"
    dtype = "bfloat16"


class TestPallas(StrictSettingsSuite):
    implementation = "pallas"
    dtype = "bfloat16"

    def takes(self, call):
        return call.takes_implementation and super().takes(call)


class TestXla(StrictSettingsSuite):
    implementation = "xla"
    dtype = "float32"

    def takes(self, call):
        return call.takes_implementation and super().takes(call)
