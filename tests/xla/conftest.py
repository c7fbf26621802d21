import numpy as np
import pytest
from small_blocks import small_blocks


@pytest.fixture(name="small_blocks")
def in_small_blocks():
    with small_blocks():
        yield


@pytest.fixture
def draw():
    return np.random.default_rng(0)
