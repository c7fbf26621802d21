"""An implementation that is wrong where two features meet, for tests of the tests."""

import sys
import types

import transform_cases

from jax_flash import _arguments, _dispatch


def add_flawed_implementation(monkeypatch):
    """Makes "flawed" an implementation, for one test.

    It is plain attention that leaves the sinks out under a soft cap, and refuses segments, and dropout of
    bfloat16.
    """

    def forward(spec, operands):
        if spec.logits_soft_cap is not None and operands.sinks is not None:
            operands = operands.replace(sinks=operands.sinks - 50)
        return transform_cases.plain_forward(spec, operands)

    def supports(spec, shapes, device):
        if spec.dropout_rate and shapes.query.dtype == "bfloat16":
            return "no dropout of bfloat16"
        return "no segments" if shapes.query_segment_ids is not None else None

    module = types.ModuleType("jax_flash.flawed")
    module.name, module.supports = "flawed", supports
    module.forward, module.backward = forward, transform_cases.plain_backward
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_arguments, "IMPLEMENTATIONS", (*_dispatch.IMPLEMENTATIONS, "flawed"))
    _dispatch.get.cache_clear()
