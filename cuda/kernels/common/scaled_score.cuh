// A score as users' functions take it (jax_flash/cuda/functions/source.py).
#pragma once

struct ScaledScore {
    float unscaled, scale;

    __device__ float scaled() const { return unscaled * scale; }
    // The scaled score times a factor that many scores share: scale times factor is computed once for them all.
    __device__ float times(float factor) const { return unscaled * (scale * factor); }
};
