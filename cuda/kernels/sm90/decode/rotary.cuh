// Rotary embeddings: pairs of a row's first columns are turned by the angle of the row's position.
#pragma once
#include "parameters.cuh"
#include "ptx/math.cuh"
#include "ptx/types.cuh"

// `Rotary`, a part of the kernels' parameters: tables (positions, half) of cosines and sines.

// Which columns make a pair: the values of the define ROTARY.
enum RotaryPairs { no_rotary = 0, halves = 1, neighbours = 2 };

constexpr float float_nan = __builtin_bit_cast(float, 0x7fffffff);

template <class Element>
__device__ __forceinline__ float element_at(const Element* row, int column) {
    return to_floats<Element>(row[column].bits).x;
}

// Column `column` of a row, turned.
template <class Element, int pairs>
__device__ __forceinline__ float turned(const Element* row, int column, const Rotary& rotary, int position) {
    const float own = element_at(row, column);
    if (column >= 2 * rotary.half) return own;
    const bool is_first = pairs == neighbours ? column % 2 == 0 : column < rotary.half;
    const int distance = pairs == neighbours ? 1 : rotary.half;
    const int pair = pairs == neighbours ? column / 2 : is_first ? column : column - rotary.half;
    const float other = element_at(row, is_first ? column + distance : column - distance);
    float cosine = float_nan, sine = float_nan;  // where the tables lack the position
    if (static_cast<uint32_t>(position) < static_cast<uint32_t>(rotary.positions)) {
        const int64_t index = static_cast<int64_t>(position) * rotary.half + pair;
        cosine = rotary.cos[index], sine = rotary.sin[index];
    }
    return is_first ? own * cosine - other * sine : own * cosine + other * sine;
}

// Chunk `chunk` of 8 columns of a row, turned in float32 and rounded once.
template <class Element, int pairs>
__device__ __forceinline__ uint4 rotated_chunk(const Element* row, int chunk, const Rotary& rotary, int position) {
    if constexpr (pairs == no_rotary) {
        return reinterpret_cast<const uint4*>(row)[chunk];
    } else {
        if (8 * chunk >= 2 * rotary.half) return reinterpret_cast<const uint4*>(row)[chunk];
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = 8 * chunk + 2 * i;
            words[i] = convert<Element>(turned<Element, pairs>(row, column, rotary, position),
                                        turned<Element, pairs>(row, column + 1, rotary, position));
        }
        return {words[0], words[1], words[2], words[3]};
    }
}
