// What consumers of the decode kernel know of the call.
#pragma once
#include "ptx/global.cuh"
#include "common/user_row.cuh"
#include "sm90/decode/rotary.cuh"
#include "sm90/decode/store.cuh"

struct ConsumerCall {
    const SharedMemory& shared;
    const Shape& shape;
    const Rotary& rotary;
    const Results results;
    const float* const sinks;  // (N); null if there are none
    const TilePartials partials;
    const Descales& descales;
    const float scale;     // what a score is multiplied by first; with a soft cap the product is in units of the cap
    const float soft_cap;
    const float* const slopes;  // ALiBi's, (B | 1, N)
    const int slopes_stride;    // from batch row to batch row
    const Division& division;
#if SCORE_MOD
    const UserScoreMod& user;
#endif
};

// What numbers of a key head are multiplied by. `descales` (K) is null if that is 1.
__device__ __forceinline__ float descale_of(const float* descales, int key_head) {
    return descales ? global::read_only(descales + key_head) : 1;
}
