// What the consumers share that split the products of a block of 64 keys: one computes Sᵀ and P, and owns dV
// (value_consumer.cuh); the other computes dPᵀ and dS, and owns dK (key_consumer.cuh).
//
// A CTA has room for 64 keys, and above head dim 128 additions to the float32 sums of dQ are the limit. So there two
// CTAs, a cluster, hold the 128 keys of a tile and visit the same blocks of queries. They exchange dS, and each
// computes half of dQ's columns, over both CTAs' keys: a block's sums are added to once for 128 keys. Blocks are loaded
// once for both, too.
//
// So that the tensor cores have work while a consumer waits or computes, the order within a block is
//
//   consumer 0: hand P over | dV, next S, dQ over own keys, over the other CTA's | next P beside these | add dQ
//   consumer 1: dS, tell and send it | dK, dQ over own keys, half of next dP, dQ over the other CTA's keys, other half
//               of next dP | add dQ beside this
//
// Consumer 1 may need the derivative of logits by scores beside P (soft cap, score_mod; Traits::hands_score_grad): in
// memory of its own or, where there is none, in the place of P once that is read, beside dV and the next S.
//
// P lies where its dS will. There the next P goes as soon as both products over own keys are done and dS has arrived in
// the other CTA; that one's place for it only has to be free when the next dS is sent.
#pragma once
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/backward/call.cuh"
#include "sm90/backward/d_query.cuh"
#include "sm90/backward/products.cuh"

// First of the CTA's keys.
__device__ __forceinline__ int cta_first_key(const KeyTile& tile) {
    return Traits::cluster == 1 ? tile.first_key : tile.first_key + cluster::rank() * Traits::cta_keys;
}

// The address in the cluster's other CTA of what lies at `address` here.
__device__ __forceinline__ uint32_t in_peer(uint32_t address) {
    return cluster::address_in(cluster::rank() ^ 1, address);
}

// The columns of a block's dQ that this consumer computes. Consumer 0 has the first two panels, of smaller head dims
// the first or a half or quarter of it, consumer 1 the rest; of each, two CTAs have a panel each, or halves of the last
// one.
template <int consumer>
struct DqPart {
    static constexpr int panel_columns = descriptor::panel_columns;
    static constexpr int head_dim = Traits::head_dim;
    static constexpr int first_part = head_dim > 128 ? 128 : head_dim > 64 ? 64 : head_dim > 32 ? 32 : 16;
    static constexpr int rest = head_dim - first_part;
    static constexpr int of_cluster = consumer == 0 || rest == 0 ? first_part : rest;  // the least one has no rest
    static constexpr int columns = Traits::cluster == 1          ? of_cluster
                                   : of_cluster > panel_columns ? panel_columns
                                                                : of_cluster / 2;
    static constexpr bool staged = Traits::d_query_bytes > 0;
    static constexpr int staging_offset = consumer * 64 * (first_part / Traits::cluster) * 4;

    const int first_column = first_part * consumer + (Traits::cluster == 1 ? 0 : cluster::rank() * columns);
    bool added = false;  // to a block before

    __device__ __forceinline__ int panel() const { return first_column / panel_columns; }
    __device__ __forceinline__ int column_bytes() const { return first_column % panel_columns * 2; }

    // Over the CTA's own keys.
    __device__ __forceinline__ void issue(float (&d_query)[columns / 2], const SharedMemory& shared) const {
        issue_d_query<columns>(d_query, shared.d_scores_buffer(0),
                               shared.key_tile() + panel() * descriptor::panel_bytes(Traits::cta_keys) +
                                   column_bytes());
    }
    // Over those of the other CTA, whose dS is waited for, and may be overwritten there.
    __device__ __forceinline__ void issue_peer(float (&d_query)[columns / 2], const SharedMemory& shared,
                                               uint32_t parity) const {
        mbarrier::wait(shared.d_scores_full(0), parity);
        if (consumer == 0 && threadIdx.x % 128 == 0) mbarrier::arrive_in_cluster(in_peer(shared.d_scores_empty(0)));
        issue_d_query<columns>(d_query, shared.peer_d_scores_buffer(),
                               shared.peer_key_panel(consumer) + column_bytes(), true);
    }
    // With `deterministic` a consumer adds when a warp has acquired the block's semaphore (dq_accum_in_order.cuh), and
    // tells that its additions are done: those from registers at once; those from shared memory when the thread that
    // issued them has waited for them, which it does beside products of the next block. `block` is the block's place in
    // the ring that consumers and those warps share.
    __device__ __forceinline__ void tell_added(const Call& call, const BlockSlot& block) const {
        if constexpr (Traits::deterministic) {
            __syncwarp();
            if (threadIdx.x % (staged ? 128 : 32) != 0) return;
            if constexpr (staged) tma::wait_group<0>();
            mbarrier::wait(call.shared.semaphore_released(block.stage), block.parity ^ 1);
            mbarrier::arrive(call.shared.dq_added(block.stage));
        }
    }
    __device__ __forceinline__ void add(const Call& call, const float (&d_query)[columns / 2], float* sum,
                                        const BlockSlot& block) const {
        float* const destination = sum + 64 * first_column;
        if constexpr (Traits::deterministic) mbarrier::wait(call.shared.semaphore_acquired(block.stage), block.parity);
        if constexpr (staged) {
            add_from_shared(call, d_query, destination, staging_offset, own + consumer);
        } else {
            const int there = Traits::head_dim % (2 * panel_columns) == 0 ? columns : Traits::head_dim - first_column;
            add_from_registers(d_query, destination + threadIdx.x % 128 * 4, there);
            tell_added(call, block);
        }
    }
    // Beside products of the next block, `next`.
    __device__ __forceinline__ void tell_added_before(const Call& call, const BlockSlot& next) {
        if constexpr (staged) {
            if (added) tell_added(call, next.before());
            added = true;
        }
    }
};

// The panels of the other CTA's K that this one's parts of dQ need.
__device__ __forceinline__ void load_peer_keys(const Call& call, const KeyTile& tile) {
    const int panels[] = {DqPart<0>().panel(), DqPart<1>().panel()};
    const int first_key = tile.first_key + (cluster::rank() ^ 1) * Traits::cta_keys;
    mbarrier::arrive_expect(call.shared.key_full(), Traits::peer_key_bytes);
#pragma unroll
    for (int consumer = 0; consumer < Traits::consumers; ++consumer) {
        tma::load(call.shared.peer_key_panel(consumer), call.maps.key, call.shared.key_full(),
                  panels[consumer] * descriptor::panel_columns, call.shape.key_head(tile.head), first_key, tile.batch);
    }
}

// Sends the warp's rows of dS to the other CTA, as soon as there is room, and expects those of the same warp there. A
// bulk copy, as that is one instruction and asynchronous; each warp its own, as it need not wait for the others.
__device__ __forceinline__ void exchange_d_scores(const SharedMemory& shared, int warp, uint32_t parity) {
    constexpr int bytes = Traits::d_scores_bytes / 4;
    const int rows = warp * bytes;
    mbarrier::arrive_expect(shared.d_scores_full(0), bytes);
    mbarrier::wait(shared.peer_d_scores_empty(), parity ^ 1);
    bulk::copy(in_peer(shared.peer_d_scores_buffer() + rows), shared.d_scores_buffer(0) + rows, bytes,
               in_peer(shared.d_scores_full(0)));
}

// Tells all CTAs that load it that a lane's warp has read Q or dO, which `empty` is about.
__device__ __forceinline__ void release(uint32_t empty) {
    mbarrier::arrive(empty);
    if constexpr (Traits::cluster > 1) mbarrier::arrive_in_cluster(in_peer(empty));
}
