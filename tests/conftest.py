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
from exhaustive import in_part, numbers_of_part, of_turn
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
    parser.addoption(
        "--turn",
        metavar="K/N",
        help="of the other cases those of turn K of N, 0 to N - 1; all of a test marked every_turn",
    )


def pytest_collection_modifyitems(config, items):
    left_out = set()
    if numbers := _numbers(config, "--exhaustive-part"):
        dealt = [item for item in items if _is(item, "exhaustive") and not _is(item, "every_case")]
        left_out |= {item for item in dealt if not in_part(item.nodeid, *numbers)}
    if numbers := _numbers(config, "--turn"):
        dealt = [item for item in items if not _is(item, "exhaustive") and not _is(item, "every_turn")]
        chosen = of_turn([item.nodeid.partition("[")[0] for item in dealt], *numbers)
        left_out |= {item for item, is_chosen in zip(dealt, chosen, strict=True) if not is_chosen}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _is(item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None


def _numbers(config, option: str) -> tuple[int, int] | None:
    given = config.getoption(option)
    try:
        return given and numbers_of_part(given)
    except ValueError as error:
        raise pytest.UsageError(f"{option}: {error}") from None


def pytest_terminal_summary(terminalreporter):
    for name, reasons in count_refused(terminalreporter.getreports("passed")).items():
        terminalreporter.section(f"refused by {name}, as it says: {reasons.total()} calls")
        for reason, times in reasons.most_common():
            terminalreporter.write_line(f"{times:5} {reason}")
