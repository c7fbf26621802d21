"""What every test starts from.

Eight virtual CPU devices, so that sharding is tested on any machine. The number is fixed before
JAX starts its backends, and concerns the CPU alone: where there is a GPU it stays JAX's default.
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)
