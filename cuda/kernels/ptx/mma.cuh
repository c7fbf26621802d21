// mma: D[16×8] += A[16×16] · B[16×8] of a warp, float16 operands and float32 accumulators in registers (PTX ISA,
// "Matrix fragments for mma.m16n8k16"), and how a warp loads transposed matrices from shared memory.
//
// Of D a thread has elements (row, column) = (lane/4, 2·(lane%4) + 0, 1), and the same eight rows below. A is two such
// tiles side by side, packed in pairs, so that accumulators become operands with no shuffle. Of B it has rows
// 2·(lane%4) + 0, 1 of column lane/4, and the same eight rows below.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void mma_float16(float (&d)[4], const uint32_t (&a)[4], uint32_t b_upper, uint32_t b_lower) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_upper), "r"(b_lower));
}

// Two 8×8 matrices of 16-bit elements. Lane r < 16 gives the address of row r % 8 of matrix r / 8. A thread gets of
// each the elements of column lane/4 in rows 2·(lane%4) and 2·(lane%4) + 1.
__device__ __forceinline__ uint2 load_matrix_x2_transposed(uint32_t address) {
    uint2 pairs;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(pairs.x), "=r"(pairs.y)
                 : "r"(address)
                 : "memory");
    return pairs;
}

// The word's bytes 0, 2, 1, 3: of two neighbours from each of two rows, pairs from one column each.
__device__ __forceinline__ uint32_t pairs_of_columns(uint32_t word) {
    uint32_t pairs;
    asm("prmt.b32 %0, %1, %1, 0x3120;" : "=r"(pairs) : "r"(word));
    return pairs;
}
