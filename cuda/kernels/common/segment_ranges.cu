// Before mask_metadata_forward and mask_metadata_backward, where there are segments: the ids of each block of positions.
#include "parameters.cuh"
#include "common/segment_ranges.cuh"

constexpr int threads = 128;

// One warp a block.
extern "C" __global__ void __launch_bounds__(threads)
    segment_ranges(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    const int batch_row = index / parameters.blocks, block = index % parameters.blocks;
    if (batch_row >= parameters.batch) return;
    const int* of_row = parameters.ids + static_cast<int64_t>(batch_row) * parameters.positions;
    SegmentIds found;
    const int end = min((block + 1) * parameters.size, parameters.positions);
    for (int position = block * parameters.size + lane; position < end; position += 32) found.add(of_row[position]);
    found.gather();
    if (lane == 0) parameters.block_ids[index] = {found.least, found.greatest};
}
