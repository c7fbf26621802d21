// Finds races in shared memory: pairs of accesses, one of them a write, that nothing orders. They are found whether or
// not the accesses come in a harmful order in this run.
//
// Threads, their stores and copies, the tensor cores of each warp, and copies by TMA under way are actors. Each has a
// vector clock, which says how much of every other one's work came before (Lamport; FastTrack, PLDI 2009, has the
// rules). Arrivals hand a clock to a barrier, waits take it from there. What orders accesses:
//
//   program order of a thread, __syncwarp, named barriers, mbarriers, barriers of the cluster
//   an asynchronous operation comes after what its issuer did before, and before who waits for it. An arrival when a
//     thread's copies are done (cp.async) tells of these alone
//   what threads write is seen by asynchronous operations only behind a fence of the proxy (PTX ISA, "async proxy")
//
// An instruction that a warp carries out together, a shuffle or product say, orders what its lanes have read before:
// their loads are on their way, in order, when any lane goes on. It doesn't order what they have written. Accesses of
// threads are told by the compiler (-fsanitize=thread, whose calls races.cc takes), those of asynchronous operations by
// the emulator. Of each 4 bytes the last write is known, and the reads since.
//
// Not told: accesses to global memory, and to static shared memory.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

struct Cta;
struct Cluster;

namespace races {

struct Clock {
    // For each actor the number of its steps that came before: all they did; all that they read; all, and a fence of
    // the proxy behind it.
    std::vector<uint32_t> seen, read, fenced;

    void join(const Clock& other);
    void clear();
};

// The order that a barrier makes.
struct Order {
    Clock gathered, released;  // of the round under way; of those that are complete
    std::vector<int> waiting;  // threads that are at the barrier
};

// Something asynchronous: a copy, or a product of a warp's tensor cores.
struct Operation {
    int actor = -1;
    uint32_t step = 0;
    Clock before;                // with itself
    const void* from = nullptr;  // where in the kernel it was issued
};

struct Epoch {
    int actor = -1;
    uint32_t step = 0;
    const void* from = nullptr;
    uint8_t bytes = 0xff;  // of the cell, a bit each

    bool meets(const Epoch& other) const { return actor >= 0 && actor != other.actor && (bytes & other.bytes) != 0; }
};
struct Cell {
    Epoch write;
    bool generic = false;  // written by a thread
    std::vector<Epoch> reads;
};
struct Clocks;

// Whether anything is done here: all functions return at once otherwise.
extern bool sought;

std::shared_ptr<Clocks> clocks_of(int ctas, int threads);
std::vector<Cell> cells_of_shared_memory();

// By the running thread.
void release(Order& order);
void release(Order& order, const Operation& operation);
void acquire(const Order& order);
void waits(Order& order);
void fence_proxy();
// A round of a named barrier, or a phase of an mbarrier.
void complete_round(Order& order);
void complete_phase(Order& order);
// By all lanes of a warp.
void meet(int warp);
void carry_out_together(int warp);

void reads(int thread, Cta& cta, uint32_t offset, uint32_t bytes);
void writes(int thread, Cta& cta, uint32_t offset, uint32_t bytes);
// By a copy of the running thread, which is an ordinary access.
void writes_by_copy(Cta& cta, uint32_t offset, uint32_t bytes, const void* from);
Operation copies_of_thread();                           // those that the running thread has begun so far
Operation copy_of_thread(const void* from);             // told to a barrier when done
Operation store_of_thread(const void* from);            // that the thread itself waits for
Operation product_of_warp(int warp, const void* from);  // that the warp waits for
void end(const Operation& copy);
void reads(const Operation& operation, Cta& cta, uint32_t offset, uint32_t bytes);
void writes(const Operation& operation, Cta& cta, uint32_t offset, uint32_t bytes);
// The running thread knows that stores, or products of its warp, are done up to a step.
void stores_are_done(uint32_t step);
void products_are_done(uint32_t step);

}  // namespace races
