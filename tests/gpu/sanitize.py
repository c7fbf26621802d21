"""A forward and backward pass small enough to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py

XLA's own kernels are kept out of it: inputs are copied from the host, and everything but the custom
calls happens there. `test_sanitizer.py` runs it and reads the verdict.
"""

import os
import sys

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

# Lengths end inside a tile, and there are more tiles than one, on both sides.
CASES = {
    "d64": {"H": 64, "T": 200, "S": 150, "N": 2, "K": 1, "is_causal": True},
    "d128": {"H": 128, "T": 150, "S": 300, "N": 2, "K": 2},
    "d128-window": {"H": 128, "T": 300, "S": 300, "N": 1, "K": 1, "local_window_size": (70, 20)},
    "d256": {"H": 256, "T": 100, "S": 200, "N": 2, "K": 1},
}


def run(H, T, S, N, K, **options):
    generator = np.random.default_rng()
    shapes = ((1, T, N, H), (1, S, K, H), (1, S, K, H), (1, T, N, H))
    query, key, value, d_out = (
        jax.device_put(generator.standard_normal(shape).astype(jnp.bfloat16)) for shape in shapes
    )

    @jax.jit
    def forward_and_backward(query, key, value, d_out):
        def attend(*inputs):
            return jax_flash.flash_attention(*inputs, implementation="cuda", **options)

        out, vjp = jax.vjp(attend, query, key, value)
        return out, vjp(d_out)

    results = jax.tree.map(np.asarray, forward_and_backward(query, key, value, d_out))
    if not all(np.all(np.isfinite(x.astype(np.float32))) for x in jax.tree.leaves(results)):
        sys.exit("results are not finite")


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        run(**CASES[name])
        print(name, "done", flush=True)
