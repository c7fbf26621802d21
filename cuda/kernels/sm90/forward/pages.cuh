// A key-value cache in pages (PagedAttention, Kwon et al., arXiv:2309.06180), as the forward kernel reads it. Blocks
// start at multiples of KEYS, and are loaded in boxes, each of which is on one page.
//
// The table may hold any numbers. A page that the cache lacks is missing: TMA fills its boxes with zeros, and its keys
// are hidden from all rows. Blocks with such pages don't count as full (sm90/prefill/preprocess.cu).
#pragma once
#if PAGE
#include "ptx/descriptor.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "common/constants.cuh"
#include "sm90/forward/traits.cuh"

constexpr int boxes = Traits::keys / BOX;  // of a block
static_assert(PAGE % BOX == 0 && Traits::keys % BOX == 0, "a box is on one page, and in one block");
static_assert(BOX % 8 == 0 && boxes <= 32, "a box has whole atoms of the swizzle, and a bit of a word");

// The page of box `box` of a batch row. If the cache lacks that page, it is `cache_pages`, which is out of the tensor
// map's bounds. No row sees keys behind the table's end, so any page does for them.
__device__ __forceinline__ uint32_t page_of_box(const PageTable& table, int batch, uint32_t box) {
    const uint32_t place = min(box * BOX / PAGE, static_cast<uint32_t>(table.row_pages - 1));
    const int page = global::read_only(table.pages + static_cast<int64_t>(batch) * table.row_pages + place);
    return min(static_cast<uint32_t>(page), static_cast<uint32_t>(table.cache_pages));
}

// Boxes whose pages are looked up at the same time. With half as many, pages of 16 took 6% longer
// (docs/tuning/decode.md). Beside three consumers, or score modifications, they have no room in registers.
__device__ constexpr int looked_up_together() {
    int count = Traits::consumers < 3 && !ScoreTraits::has_score_mod ? 8 : 4;
    while (boxes % count != 0) --count;
    return count;
}

// Loads a block of K or V of a batch row, box by box. `barrier` expects its bytes.
template <int panels>
__device__ __forceinline__ void load_pages(uint32_t destination, const TensorMap& map, uint32_t barrier,
                                           const PageTable& table, int layer, int batch, int head, int block) {
    constexpr int at_once = looked_up_together();
    mbarrier::arrive_expect(barrier, panels * descriptor::panel_bytes(Traits::keys));
#pragma unroll 1  // the producer has few registers
    for (int first = 0; first < boxes; first += at_once) {
        const uint32_t first_box = static_cast<uint32_t>(block) * boxes + first;
        uint32_t pages[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) pages[i] = page_of_box(table, batch, first_box + i);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const uint32_t row = (first_box + i) * BOX % PAGE;
#pragma unroll
            for (int panel = 0; panel < panels; ++panel) {
                const int offset = panel * descriptor::panel_bytes(Traits::keys) + i * descriptor::panel_bytes(BOX);
                tma::load(destination + first * descriptor::panel_bytes(BOX) + offset, map, barrier,
                          panel * Traits::panel_columns, head, row, pages[i], layer);
            }
        }
    }
}

// Sets the scores of a block's keys that are on missing pages to -inf.
template <int count>
__device__ __forceinline__ void mask_missing_pages(float (&scores)[count], const PageTable& table, int batch,
                                                   int block) {
    const int lane = threadIdx.x % 32;
    const bool misses = lane < boxes && page_of_box(table, batch, block * boxes + lane) == table.cache_pages;
    const uint32_t missing = __ballot_sync(all_lanes, misses);
    if (missing == 0) return;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int box = i / 4 * 8 / BOX;  // four scores of a thread are in eight columns
        if (missing >> box & 1) scores[i] = -infinity;
    }
}
#endif
