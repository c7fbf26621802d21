"""Factors between the natural base and base 2, in which kernels take exponentials."""

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
