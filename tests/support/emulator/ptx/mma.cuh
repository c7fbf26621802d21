// Emulation of cuda/kernels/ptx/mma.cuh.
#pragma once
#include "math.cuh"
#include "types.cuh"

uint2 load_matrix_x2_transposed(uint32_t address);

inline void mma_float16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_upper, uint32_t b_lower) {
    struct Lane {
        float* d;
        uint32_t a[4], b[2];
    } mine{d, {a[0], a[1], a[2], a[3]}, {b_upper, b_lower}};
    emulator::together(emulator::warp, &mine, [](void** of_each) {
        auto half = [](uint32_t pair, int i) { return widen<float16>(static_cast<uint16_t>(pair >> 16 * i)); };
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; ++lane) {
            const Lane& of = *static_cast<Lane*>(of_each[lane]);
            for (int i = 0; i < 8; ++i) {
                const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
                a[lane / 4 + i / 2 % 2 * 8][column] = half(of.a[i / 2], i % 2);
            }
            for (int i = 0; i < 4; ++i) b[i / 2 * 8 + 2 * (lane % 4) + i % 2][lane / 4] = half(of.b[i / 2], i % 2);
        }
        for (int lane = 0; lane < 32; ++lane) {
            for (int i = 0; i < 4; ++i) {
                const int row = lane / 4 + i / 2 * 8, column = 2 * (lane % 4) + i % 2;
                float sum = static_cast<Lane*>(of_each[lane])->d[i];
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
                static_cast<Lane*>(of_each[lane])->d[i] = sum;
            }
        }
    });
}

inline uint32_t pairs_of_columns(uint32_t word) {
    return (word & 0xff0000ff) | (word >> 8 & 0xff00) | (word & 0xff00) << 8;
}
