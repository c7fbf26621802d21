// Before mask_metadata_forward and mask_metadata_backward, where there are segments: the ids of each block of positions.
#include "common/segment_ranges.cuh"

constexpr int threads = 128;

// One warp a block.
extern "C" __global__ void __launch_bounds__(threads)
    segment_ranges(const int* __restrict__ ids,   // (B, positions)
                    int2* __restrict__ block_ids,  // (B, blocks): the least and the greatest
                    int batch, int positions, int blocks, int size) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    const int batch_row = index / blocks, block = index % blocks;
    if (batch_row >= batch) return;
    const int* of_row = ids + static_cast<int64_t>(batch_row) * positions;
    SegmentIds found;
    const int end = min((block + 1) * size, positions);
    for (int position = block * size + lane; position < end; position += 32) found.add(of_row[position]);
    found.gather();
    if (lane == 0) block_ids[index] = {found.least, found.greatest};
}
