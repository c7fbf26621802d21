// What keeps NaN and infinities from the gradients of queries and keys that don't see them.
//
// A pair that is masked has P = dS = 0, but 0 times NaN or infinity is NaN. So where pairs may be masked
// (Traits::isolates), no such operand is left when a product contracts over its row:
//
//   Q, dO   backward_preprocess finds rows that aren't finite. Their lse is NaN, so P is NaN in all pairs that they
//           see; their Q and dO are set to zero by the thread that loads the block, in shared memory, before others
//           see it.
//   K       No score of a key that isn't finite is finite. So the consumer of the first block's scores looks at one
//           score of each key and, if any isn't finite, makes its warp's keys finite in shared memory. Queries that
//           see such a key have a lse of NaN.
//   V       no product contracts over its rows.
//   dS      is P times dP less delta, and dP isn't finite of keys whose V isn't: there dP is set to zero where P is.
#pragma once
#include "ptx/descriptor.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "common/finite.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/products.cuh"

// Sets rows of Q or dO to zero whose lse is NaN, once TMA has brought them, and the lse, and completed `landed`. Then
// completes `full`, for which the consumers wait. One thread.
__device__ __forceinline__ void clean_block(const SharedMemory& shared, int stage, int offset, int panels,
                                            uint32_t landed, uint32_t full) {
    mbarrier::wait(landed, 0);
    mbarrier::arrive(landed);  // completes another phase, so that the next round has the same parity
    mbarrier::wait(landed, 1);
    const float* lse = reinterpret_cast<const float*>(shared.lse(stage));
#pragma unroll 1
    for (int row = 0; row < Traits::queries; ++row) {
        const float row_lse = lse[lse_delta_slot(row)];
        if (row_lse == row_lse) continue;
#pragma unroll 1
        for (int i = 0; i < panels * (descriptor::row_bytes / 16); ++i) {
            const int panel = i / (descriptor::row_bytes / 16), chunk = i % (descriptor::row_bytes / 16);
            const int at = panel * descriptor::panel_bytes(Traits::queries) + row * descriptor::row_bytes + chunk * 16;
            *reinterpret_cast<uint4*>(shared.data + offset + at) = {0, 0, 0, 0};
        }
    }
    fence_shared_for_async();
    mbarrier::arrive(full);
}

// What becomes of infinity: a number so large that a score which was -inf still has no probability, but, where the
// element type has room for that, so small that sums of its products don't overflow.
template <class Element>
constexpr uint32_t large_bits = is_same<Element, bfloat16> ? 0x7180 /* 2^100 */ : 0x7bff /* 65504 */;

// Replaces NaN by 0 and infinities by large numbers, in a pair of elements.
template <class Element>
__device__ __forceinline__ uint32_t finite_pair(uint32_t pair) {
#pragma unroll
    for (int shift = 0; shift < 32; shift += 16) {
        const uint32_t magnitude = pair >> shift & 0x7fff;
        if (magnitude == infinity_bits<Element>) pair ^= (infinity_bits<Element> ^ large_bits<Element>) << shift;
        if (magnitude > infinity_bits<Element>) pair &= 0xffff0000u >> shift;
    }
    return pair;
}

// Makes 16 bytes of K finite. Says whether they were not.
__device__ __forceinline__ bool make_finite(uint4& chunk) {
    using Element = Traits::Element;
    if ((finite_halves<Element>(chunk.x) & finite_halves<Element>(chunk.y) & finite_halves<Element>(chunk.z) &
         finite_halves<Element>(chunk.w)) == all_finite) {
        return false;
    }
    chunk = {finite_pair<Element>(chunk.x), finite_pair<Element>(chunk.y), finite_pair<Element>(chunk.z),
             finite_pair<Element>(chunk.w)};
    return true;
}

// Makes K of a warp's 16 keys finite if one of their scores is not: Sᵀ of the tile's first block, which is there. One
// score of each key tells, as all queries are finite. Those scores that are NaN become 0, so that rows of the block
// that are not there have P = 0 as ever. Before the next product that reads K, the warpgroup has to meet.
__device__ __forceinline__ void isolate_keys(float (&scores)[score_count], unsigned char* key_rows) {
    auto is_finite = [](float x) { return fabsf(x) < infinity; };
    if (!__any_sync(all_lanes, !is_finite(scores[0]) || !is_finite(scores[2]))) return;
    constexpr int chunks = 16 * descriptor::row_bytes / 16;  // of a panel
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < Traits::key_panels * chunks; i += 32) {
        uint4* chunk = reinterpret_cast<uint4*>(key_rows + i / chunks * descriptor::panel_bytes(Traits::cta_keys)) +
                       i % chunks;
        uint4 values = *chunk;
        if (make_finite(values)) *chunk = values;
    }
    fence_shared_for_async();
#pragma unroll
    for (int i = 0; i < score_count; ++i) scores[i] = scores[i] == scores[i] ? scores[i] : 0;
}

// Makes what is here of the other CTA's K finite, of which no scores are computed here. A warpgroup.
__device__ __forceinline__ void isolate_peer_keys(const SharedMemory& shared) {
    uint4* chunks = reinterpret_cast<uint4*>(shared.data + SharedMemory::peer_key) + threadIdx.x % 128;
    bool found = false;
#pragma unroll
    for (int i = 0; i < Traits::peer_key_bytes / 16; i += 128) {
        uint4 values = chunks[i];
        if (!make_finite(values)) continue;
        chunks[i] = values;
        found = true;
    }
    if (found) fence_shared_for_async();
}

// Sets dPᵀ to zero where Pᵀ is, if V of one of a warp's keys isn't finite: then no dP of that key is, of which a thread
// has the first of two keys. `probabilities` are operands, negative or −0 where dropout drops them. Queries that see
// such a value have a P of NaN. Called where a product has just been waited for: elsewhere the branch would part what
// is scheduled as one, or take registers.
__device__ __forceinline__ void zero_where_hidden(float (&d_probabilities)[score_count],
                                                  const uint32_t (&probabilities)[query_steps][4]) {
    const bool spoiled = !(fabsf(d_probabilities[0]) + fabsf(d_probabilities[2]) < infinity);
    if (!__any_sync(all_lanes, spoiled)) return;
#pragma unroll
    for (int i = 0; i < score_count; i += 2) {
        const uint32_t pair = probabilities[i / 8][i / 2 % 4];
        if ((pair & 0x7fff) == 0) d_probabilities[i] = 0;
        if ((pair & 0x7fff0000) == 0) d_probabilities[i + 1] = 0;
    }
}
