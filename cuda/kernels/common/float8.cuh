// What kernels for e4m3 numbers share with jax_flash/_float8.py.
#pragma once

constexpr int rows_per_descale = 128;
