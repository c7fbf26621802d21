// Before the backward kernel: for each query delta = rowsum(dO ∘ O) − d_lse and its lse in base 2, in blocks as
// the backward kernel loads them, and what it adds to and counts with (DqAccum, KeySums) set to zero. Where queries may
// not see all keys, also which rows aren't finite (isolation.cuh), and the zeros of dK and dV of empty tiles.
#include "common/block_range.cuh"
#include "parameters.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "sm90/backward/traits.cuh"

constexpr int threads = 256;
constexpr float not_a_number = __builtin_bit_cast(float, 0x7fffffff);
// Lanes that share a row: each takes 8 elements, 16 bytes.
constexpr int row_lanes = Traits::value_dim <= 64 ? 8 : Traits::value_dim <= 128 ? 16 : 32;
constexpr int pass_rows = threads / row_lanes;
constexpr int all_passes = Traits::queries / pass_rows;
constexpr int passes = all_passes < 4 ? all_passes : 4;  // whose loads are under way at once
constexpr int resident_ctas = all_passes == passes ? 4 : 3;  // of a multiprocessor: more, and registers spill
static_assert(Traits::queries % pass_rows == 0 && Traits::queries <= threads, "every thread has a row in every pass");

__device__ __forceinline__ float dot(uint4 a, uint4 b) {
    const uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 x = to_floats<Traits::Element>(left[i]), y = to_floats<Traits::Element>(right[i]);
        sum += x.x * y.x + x.y * y.y;
    }
    return sum;
}

// lse in base 2. Where it is so large that its own rounding moves exponents by whole numbers, a few units
// more: probabilities are then too small, but never infinite. Rounded up, the lowest floats stay finite.
__device__ __forceinline__ float to_base_2(float lse) {
    const float rounded = __fmul_ru(lse, log2_e), size = fabsf(rounded);
    return size < 0x1p27f ? lse * log2_e : rounded + size * 0x1p-21f;
}

// What the main kernel adds to and counts with, set to zero. All threads of all CTAs.
__device__ __forceinline__ void set_to_zero(const Parameters& parameters, int head_index, int block, int query_blocks) {
    const int64_t block_index = blockIdx.x;
    if (blockIdx.x == 0 && threadIdx.x == 0 && parameters.next_tile != nullptr) *parameters.next_tile = 0;
    // The block's sums lie as far apart as there are blocks, of all heads.
    auto block_of_sum = [&](int sum) { return static_cast<int64_t>(sum) * gridDim.x + block_index; };
    if (threadIdx.x < Traits::dq_sums && parameters.dq_semaphore != nullptr) {
        parameters.dq_semaphore[block_of_sum(threadIdx.x % Traits::dq_sums)] = 0;
    }
    constexpr int sum_vectors = DqBlock::elements / 4;
    if (head_index < parameters.zeroed_heads) {
#pragma unroll 1
        for (int sum = 0; sum < Traits::dq_sums; ++sum) {
            float4* sums = parameters.dq_accum + block_of_sum(sum) * sum_vectors;
            for (int i = threadIdx.x; i < sum_vectors; i += threads) sums[i] = {0, 0, 0, 0};
        }
    }
    if (parameters.arrived != nullptr && threadIdx.x == 0) {
        if (block % DqBlock::span == 0) {
            parameters.arrived[head_index * ceil_div(query_blocks, DqBlock::span) + block / DqBlock::span] = 0;
        }
        if (block == 0) parameters.written[head_index] = 0;
        if (blockIdx.x == 0) *parameters.next_job = 0;
    }

    if (parameters.key_sums.d_key != nullptr) {
        // In 64 bits: a call may have few keys, whose tiles units share, and very many queries.
        const int64_t thread = static_cast<int64_t>(blockIdx.x) * threads + threadIdx.x;
        const int64_t all_threads = static_cast<int64_t>(gridDim.x) * threads;
        const KeySums& sums = parameters.key_sums;
        auto zero = [&](float* sum, int columns) {
            float4* vectors = reinterpret_cast<float4*>(sum);
            const int64_t count = static_cast<int64_t>(parameters.key_groups) * (64 * columns / 4);
            for (int64_t i = thread; i < count; i += all_threads) vectors[i] = {0, 0, 0, 0};
        };
        zero(sums.d_key, Traits::head_dim);
        zero(sums.d_value, Traits::value_dim);
        if (sums.d_key_semaphores != nullptr) {
            for (int64_t i = thread; i < parameters.key_groups; i += all_threads) {
                sums.d_key_semaphores[i] = sums.d_value_semaphores[i] = 0;
            }
        }
    }
}

// Stores dK and dV of empty tiles, which the main kernel skips (Traits::skips_empty_tiles): zeros. All threads of all
// CTAs.
__device__ __forceinline__ void zero_empty_tiles(const EmptyTiles& empty) {
    if (!Traits::persistent || empty.tile_blocks == nullptr) return;
    const int key_tiles = ceil_div(empty.keys, Traits::keys);
#pragma unroll 1
    for (int index = blockIdx.x; index < empty.tiles; index += gridDim.x) {
        const int head_index = index / key_tiles, tile = index % key_tiles;
        const int batch = head_index / empty.key_heads, head = head_index % empty.key_heads;
        const Interval blocks = read_only(empty.tile_blocks + batch * key_tiles + tile);
        if (blocks.begin < blocks.end) continue;
        const int first_key = tile * Traits::keys, rows = min(Traits::keys, empty.keys - first_key);
        const int64_t first_row = (static_cast<int64_t>(batch) * empty.keys + first_key) * empty.key_heads + head;
        auto zero = [&](uint4* gradient, int vectors) {
#pragma unroll 1
            for (int row = threadIdx.x / row_lanes; row < rows; row += pass_rows) {
                uint4* there = gradient + (first_row + static_cast<int64_t>(row) * empty.key_heads) * vectors;
                for (int i = threadIdx.x % row_lanes; i < vectors; i += row_lanes) there[i] = {0, 0, 0, 0};
            }
        };
        zero(empty.d_key, empty.key_vectors);
        zero(empty.d_value, empty.value_vectors);
    }
}

// What one thread knows of one row of the block, loaded ahead.
struct RowStatistics {
    float lse, d_lse;
    uint32_t hash;  // of dropout
};

__device__ __forceinline__ RowStatistics load_row(const Parameters& parameters, int head_index, int query) {
    RowStatistics row = {-infinity, 0, 0};  // of rows that are not there
    if (query >= parameters.queries) return row;
    const int64_t index = static_cast<int64_t>(head_index) * parameters.queries + query;
    row.lse = global::read_only(parameters.lse + index);
    if (parameters.d_lse != nullptr) row.d_lse = global::read_only(parameters.d_lse + index);
    if constexpr (Traits::dropout) row.hash = global::read_only(parameters.dropout_rows + index);
    return row;
}

// Stores what the main kernel reads of a row, whose rowsum(dO ∘ O) is `sum`. Says whether the row isn't finite.
__device__ __forceinline__ bool store_row(const Parameters& parameters, const RowStatistics& row, float sum,
                                          float* lse_delta) {
    // A row that attends to nothing, or is not there, takes no part: P = 2^(x − ∞) = 0.
    const bool attends = row.lse != -infinity;
    if (attends) sum -= row.d_lse;
    float lse_2 = attends ? to_base_2(row.lse) : infinity;
    // A row that isn't finite is kept apart: P is NaN in all pairs that it sees, see isolation.cuh.
    bool is_spoiled = false;
    if (parameters.spoiled != nullptr) {
        is_spoiled = !(fabsf(sum) < infinity) || (attends && !(fabsf(row.lse) < infinity));
        if (is_spoiled) lse_2 = not_a_number, sum = 0;
    }
    lse_delta[0] = lse_2;
    if constexpr (Traits::dropout) {
        sum *= parameters.kept;
        lse_delta[Traits::queries] = __uint_as_float(row.hash);
    }
    lse_delta[(Traits::per_query_values - 1) * Traits::queries] = attends ? sum : 0;
    return is_spoiled;
}

// The passes whose query isn't finite and has nothing else that tells so. A query that sees keys has a lse that tells
// whether it is finite. One that sees none, or that is infinite and has no score above -inf, has a lse of -inf or that
// of a sink, and O = 0. `attending`: passes in which the thread's part of O isn't zero; `idle`: in which it has none.
template <class IsQuerySpoiled>
__device__ __forceinline__ uint32_t spoiled_queries(const Parameters& parameters, int queries, int first_query,
                                                    uint32_t attending, uint32_t idle,
                                                    const IsQuerySpoiled& is_query_spoiled) {
    uint32_t spoiled = 0;
    constexpr uint32_t every_pass = (1u << passes) - 1;
    if (parameters.spoiled != nullptr && __any_sync(all_lanes, (attending | idle) != every_pass)) {
        // Of the row: bits of its lanes, which are neighbours.
#pragma unroll
        for (int distance = row_lanes / 2; distance > 0; distance /= 2) {
            attending |= __shfl_xor_sync(all_lanes, attending, distance);
        }
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const int query = first_query + pass * pass_rows;
            const bool is_alone = query < queries && (attending >> pass & 1) == 0;
            if (is_alone && is_query_spoiled(query)) spoiled |= 1u << pass;
        }
    }
    return spoiled;
}

// One CTA a block of queries, head and batch row. Of a row's sum each thread computes a part; then one thread has the
// row. Loads are under way before what depends on none of them is stored.
extern "C" __global__ void __launch_bounds__(threads, resident_ctas)
    backward_preprocess(const __grid_constant__ Parameters parameters) {
    __shared__ float row_sums[Traits::queries];
    const int queries = parameters.queries, query_heads = parameters.query_heads, columns = parameters.columns;
    const int query_blocks = ceil_div(queries, Traits::queries);
    const int head_index = blockIdx.x / query_blocks, block = blockIdx.x % query_blocks;
    const int head = head_index % query_heads, batch = head_index / query_heads;
    const int lane = threadIdx.x % row_lanes, pass_row = threadIdx.x / row_lanes;

    if (parameters.block_tiles != nullptr) {
        const Interval tiles = read_only(parameters.block_tiles + static_cast<int64_t>(batch) * query_blocks + block);
        if (tiles.begin >= tiles.end) {  // of a block that no tile visits, nothing but its sums is read
            set_to_zero(parameters, head_index, block, query_blocks);
            zero_empty_tiles(parameters.empty_tiles);
            return;
        }
    }

    // Whether a thread's elements of the query aren't all finite.
    auto is_query_spoiled = [&](int query) {
        const int columns = parameters.query_columns;
        const int64_t element = ((static_cast<int64_t>(batch) * queries + query) * query_heads + head) * columns;
        bool finite = true;
#pragma unroll 1
        for (int column = lane * 8; column < columns; column += row_lanes * 8) {
            const uint4 x = global::read_only(parameters.query + (element + column) / 8);
            finite = finite && dot(x, uint4{}) == 0;
        }
        return !finite;
    };
    RowStatistics own_row = {};
    if (threadIdx.x < Traits::queries) {
        own_row = load_row(parameters, head_index, block * Traits::queries + static_cast<int>(threadIdx.x));
    }
#pragma unroll 1
    for (int first_row = pass_row; first_row < Traits::queries; first_row += passes * pass_rows) {
        const int first_query = block * Traits::queries + first_row;
        uint4 out[passes], d_out[passes];
        uint32_t attending = 0, idle = 0;  // passes in which the thread's part of O isn't zero, or has nothing of it
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            const int query = first_query + pass * pass_rows;
            out[pass] = d_out[pass] = {0, 0, 0, 0};
            if (query < queries && lane * 8 < columns) {
                const int64_t element =
                    ((static_cast<int64_t>(batch) * queries + query) * query_heads + head) * columns;
                out[pass] = global::read_only(parameters.out + element / 8 + lane);
                d_out[pass] = global::read_only(parameters.d_out + element / 8 + lane);
            } else {
                idle |= 1u << pass;
            }
        }
        if (first_row == pass_row) {
            set_to_zero(parameters, head_index, block, query_blocks);
            zero_empty_tiles(parameters.empty_tiles);
        }
        float sums[passes];
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            sums[pass] = dot(out[pass], d_out[pass]);
            const uint4& x = out[pass];
            if (((x.x | x.y | x.z | x.w) & 0x7fff7fff) != 0) attending |= 1u << pass;
        }
        const uint32_t spoiled_passes =
            spoiled_queries(parameters, queries, first_query, attending, idle, is_query_spoiled);
#pragma unroll
        for (int pass = 0; pass < passes; ++pass) {
            float sum = spoiled_passes >> pass & 1 ? not_a_number : sums[pass];
#pragma unroll
            for (int distance = row_lanes / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(all_lanes, sum, distance);
            }
            if (lane == 0) row_sums[first_row + pass * pass_rows] = sum;
        }
    }
    __syncthreads();
    bool spoiled = false;
    if (threadIdx.x < Traits::queries) {
        const int64_t first = static_cast<int64_t>(blockIdx.x) * (Traits::per_query_values * Traits::queries);
        float* lse_delta = parameters.lse_delta + first + lse_delta_slot(threadIdx.x);
        spoiled = store_row(parameters, own_row, row_sums[threadIdx.x], lse_delta);
    }
    if (parameters.spoiled != nullptr) {
        spoiled = __syncthreads_or(spoiled);
        if (threadIdx.x == 0) parameters.spoiled[blockIdx.x] = spoiled;
    }
}
