"""What every test starts from, and what implementations refused.

Eight virtual CPU devices, so that sharding is tested on any machine. The number is fixed before
JAX starts its backends, and concerns the CPU alone: where there is a GPU it stays JAX's default.
"""

import os

# Compilation takes most of the time of tests on a CPU, and results hardly depend on it.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax
from refusals import count_refused

jax.config.update("jax_num_cpu_devices", 8)


def pytest_terminal_summary(terminalreporter):
    for name, reasons in count_refused(terminalreporter.getreports("passed")).items():
        terminalreporter.section(f"refused by {name}, as it says: {reasons.total()} calls")
        for reason, times in reasons.most_common():
            terminalreporter.write_line(f"{times:5} {reason}")
