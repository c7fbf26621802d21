"""The emulator finds races in shared memory: mistakes in the kernels' sources that most runs would not show.

That the kernels as they are have none is part of all tests that run them in it
(tests/support/emulator/races.h).
"""

import pytest
from cache_case import CacheCase
from emulated_case import DEVICE, Case, check_backward, check_forward
from exhaustive import thorough
from kernel_emulator import KernelEmulator
from test_decode_emulated import run as check_decode

BACKWARD, FORWARD, DECODE = "sm90/backward/", "sm90/forward/", "sm90/decode/"
OF_PAIR = Case(H=256, T=130, S=200, N=2)  # two CTAs share a tile
MISTAKES = {
    "P is written where products still read dS": (
        OF_PAIR,
        BACKWARD + "value_consumer.cuh",
        "mbarrier::wait(shared.d_scores_empty(0), d_scores_slot.parity ^ 1);",
        "",
        "a read and a write",
    ),
    "dS is sent where the other CTA still reads the last one": (
        OF_PAIR,
        BACKWARD + "split_products.cuh",
        "mbarrier::wait(shared.peer_d_scores_empty(), parity ^ 1);",
        "",
        "a read and a write",
    ),
    "products read dS that is behind no fence": (
        OF_PAIR,
        BACKWARD + "key_consumer.cuh",
        "fence_shared_for_async();",
        "",
        "another proxy",
    ),
    "a lane tells of the others' dS": (
        Case(H=128, T=130, S=200),
        BACKWARD + "products.cuh",
        "__syncwarp();",
        "",
        "a write and a read",
    ),
    "dQ is staged where the last one is still added": (
        Case(H=128, T=130, S=200),
        BACKWARD + "d_query.cuh",
        "mbarrier::wait(shared.dq_empty(dq_slot.stage), dq_slot.parity ^ 1);",
        "",
        "a read and a write",
    ),
    "O is read before other lanes have staged it": (
        Case(H=64, T=130, S=200),
        FORWARD + "store.cuh",
        "__syncwarp();\n        const int column",
        "const int column",
        "a write and a read",
    ),
    "products read gathered keys that are behind no fence": (
        CacheCase(page=3, S=300),
        DECODE + "consumer.cuh",
        "            fence_shared_for_async();\n        }\n        multiply_keys",
        "        }\n        multiply_keys",
        "another proxy",
    ),
    "a thread tells which gathered keys are missing before others have said so": (
        CacheCase(page=3, S=300),
        DECODE + "load_gather.cuh",
        """sync_producer();
        // Arrivals of copies tell of the copies alone: this one tells consumers which keys are missing.
        if (thread == 0) mbarrier::arrive(shared.key_full(stage));""",
        """if (thread == 0) mbarrier::arrive(shared.key_full(stage));
        sync_producer();""",
        "a write and a read",
    ),
    "products read widened keys that are behind no fence": (
        CacheCase(T=9, S=300, float8=True),
        DECODE + "widen.cuh",
        "fence_shared_for_async();",
        "",
        "another proxy",
    ),
    "values are widened where not all have widened the keys": (
        CacheCase(T=9, S=300, float8=True),
        DECODE + "widen.cuh",
        "sync_consumers();",
        "",
        "a write and a read",
    ),
}
"""A call, the file, a text and what is there in its place, and what is said of that."""


def run(case, emulator):
    if isinstance(case, CacheCase):
        check_decode(case, emulator, 3, 3)
        return
    check_forward(case, DEVICE, emulator)
    check_backward(case, emulator)


@pytest.mark.parametrize("mistake", [*list(MISTAKES)[:3], *thorough(*list(MISTAKES)[3:])])
def test_is_found(mistake, tmp_path):
    case, file, text, other, found = MISTAKES[mistake]
    emulator = KernelEmulator(tmp_path, edits={(file, text): other})
    with pytest.raises(AssertionError, match=f"(?s)races in .*{found}"):
        run(case, emulator)
