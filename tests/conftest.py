"""What every test starts from, which exhaustive cases run, and what implementations refused.

Eight virtual CPU devices, so that sharding is tested on any machine. The number is fixed before
JAX starts its backends, and concerns the CPU alone: where there is a GPU it stays JAX's default.
"""

import importlib.metadata
import os

# Before numpy is loaded. Tests run in several processes, whose threads would take each other's cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from exhaustive import in_part, numbers_of_part
from refusals import count_refused

jax.config.update("jax_num_cpu_devices", 8)

# On a CPU compilation takes most of the time of tests. Results hardly depend on how thorough it is.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    jax.config.update("jax_disable_most_optimizations", True)
    # Later versions lack the first of these flags, and a process ends by an unknown flag. Places in Python
    # have made one of them hang (jax_flash/transforms/locations.py): programs are without them only here.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of the time of lowering
        quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive-part",
        metavar="K/N",
        help="of the exhaustive cases those of part K of N, 0 to N - 1; all of a test marked every_case",
    )


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("--exhaustive-part")
    if chosen is None:
        return
    try:
        part, parts = numbers_of_part(chosen)
    except ValueError as error:
        raise pytest.UsageError(f"--exhaustive-part: {error}") from None
    left_out = [
        item
        for item in items
        if item.get_closest_marker("exhaustive")
        and not item.get_closest_marker("every_case")
        and not in_part(item.nodeid, part, parts)
    ]
    config.hook.pytest_deselected(items=left_out)
    without = set(left_out)
    items[:] = [item for item in items if item not in without]


def pytest_terminal_summary(terminalreporter):
    for name, reasons in count_refused(terminalreporter.getreports("passed")).items():
        terminalreporter.section(f"refused by {name}, as it says: {reasons.total()} calls")
        for reason, times in reasons.most_common():
            terminalreporter.write_line(f"{times:5} {reason}")
