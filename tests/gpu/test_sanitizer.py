"""compute-sanitizer finds nothing in our kernels, whatever the options: accesses out of bounds (memcheck),
races in shared memory (racecheck), barriers that not all threads come to (synccheck).

It can't follow the tensor memory accelerator's copies of tensors into shared memory, so racecheck sees what
threads read and write themselves, and plain bulk copies.
"""

import pytest
import sanitize
from compute_sanitizer import TOOLS, assert_finds_nothing, needs_sanitizer


@needs_sanitizer
@pytest.mark.parametrize("group", sanitize.ALL_GROUPS)
@pytest.mark.parametrize("tool", TOOLS)
def test_finds_nothing(tool, group, record_property):
    assert_finds_nothing(tool, sanitize.__file__, group, record_property)
