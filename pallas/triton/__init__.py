"""The lowering by Triton, for NVIDIA GPUs from Ampere on."""
