// The range of segment ids in each block of positions. It runs before mask_metadata_forward and mask_metadata_backward,
// if the call has segments.
#include "parameters.cuh"
#include "ptx/dependent_launch.cuh"
#include "common/segment_ranges.cuh"

constexpr int threads = 128;

// A warp summarises a block.
extern "C" __global__ void __launch_bounds__(threads)
    segment_ranges(const __grid_constant__ Parameters parameters) {
    wait_for_previous_kernel();
    allow_next_kernel();
    const int lane = threadIdx.x % 32, index = blockIdx.x * (threads / 32) + threadIdx.x / 32;
    const int batch_row = index / parameters.blocks, block = index % parameters.blocks;
    if (batch_row >= parameters.batch) return;
    const int* ids = parameters.ids + static_cast<int64_t>(batch_row) * parameters.positions;
    SegmentRange range;
    const int end = min((block + 1) * parameters.size, parameters.positions);
    for (int position = block * parameters.size + lane; position < end; position += 32) range.add(ids[position]);
    range.reduce();
    if (lane == 0) parameters.block_segments[index] = range;
}
