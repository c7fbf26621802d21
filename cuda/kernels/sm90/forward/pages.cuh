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
#include "common/key_place.cuh"
#include "sm90/forward/traits.cuh"

constexpr int boxes = Traits::keys / BOX;  // of a block
static_assert(PAGE % BOX == 0 && Traits::keys % BOX == 0, "a box is on one page, and in one block");
static_assert(BOX % 8 == 0 && boxes <= 32, "a box has whole atoms of the swizzle, and a bit of a word");

constexpr int missing_page = -1;

// The page of key `key` of a batch row.
__device__ __forceinline__ int page_of(const PageTable& table, int batch, int key) {
    const int place = key / PAGE;
    if (place >= table.row_pages) return missing_page;
    const int page = global::read_only(table.pages + static_cast<int64_t>(batch) * table.row_pages + place);
    return static_cast<uint32_t>(page) < static_cast<uint32_t>(table.cache_pages) ? page : missing_page;
}

// Loads the block that starts at key `first_key` of a batch row, box by box. `barrier` expects its bytes. `first_page`
// is that of the layer.
__device__ __forceinline__ void load_pages(uint32_t destination, const TensorMap& map, uint32_t barrier, int panels,
                                           const PageTable& table, int first_page, int batch, int head,
                                           int first_key) {
    constexpr int at_once = boxes % 4 == 0 ? 4 : boxes % 3 == 0 ? 3 : 1;  // boxes whose pages are looked up together
    mbarrier::arrive_expect(barrier, panels * descriptor::panel_bytes(Traits::keys));
#pragma unroll 1  // the producer has few registers
    for (int first = 0; first < boxes; first += at_once) {
        int pages[at_once];
#pragma unroll
        for (int i = 0; i < at_once; ++i) pages[i] = page_of(table, batch, first_key + (first + i) * BOX);
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
            const int key = (first + i) * BOX;
            const int page = pages[i] == missing_page ? -1 : first_page + pages[i];  // no array has anything at -1
#pragma unroll
            for (int panel = 0; panel < panels; ++panel) {
                tma::load(destination + panel * descriptor::panel_bytes(Traits::keys) + descriptor::panel_bytes(key),
                          map, barrier, panel * Traits::panel_columns, head, (first_key + key) % PAGE, page);
            }
        }
    }
}

// Sets the scores of keys on missing pages to -inf, in the block that starts at key `first_key` of a batch row.
template <int count>
__device__ __forceinline__ void mask_missing_pages(float (&scores)[count], const PageTable& table, int batch,
                                                   int first_key) {
    const int lane = threadIdx.x % 32;
    const bool misses = lane < boxes && page_of(table, batch, first_key + lane * BOX) == missing_page;
    const uint32_t missing = __ballot_sync(all_lanes, misses);
    if (missing == 0) return;
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const int box = i / 4 * 8 / BOX;  // four scores of a thread are in eight columns
        if (missing >> box & 1) scores[i] = -infinity;
    }
}
#endif
