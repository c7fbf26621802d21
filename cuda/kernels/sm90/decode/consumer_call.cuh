// What consumers of the decode kernel know of the call.
#pragma once
#include "common/user_row.cuh"
#include "sm90/decode/descales.cuh"
#include "sm90/decode/rotary.cuh"
#include "sm90/decode/store.cuh"

struct ConsumerCall {
    const SharedMemory& shared;
    const Shape& shape;
    const Traits::Query& query;  // (B, T, N, H)
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
