// What the emulator keeps of clusters, CTAs and threads at work.
#pragma once
#include <csetjmp>
#include <ucontext.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "races.h"

using Action = std::function<void()>;

struct Fiber {
    ucontext_t context;
    jmp_buf place;  // where it waits
    bool started = false, done = false;
};
struct Meeting {
    int arrived = 0;
    int64_t round = 0;
    std::array<void*, 128> brought;
};
struct NamedBarrier {
    int arrived = 0, threads = 0;
    int64_t round = 0;
    bool any[2] = {};  // what was brought to an even round, and to an odd one
    races::Order order;
};
struct MBarrier {
    int arrivals, pending;
    int64_t bytes = 0;
    uint32_t parity = 0;  // of the phase that is under way
    bool was_seen = true;  // of the phase before: that a thread has found it complete
    races::Order order;
};
struct Groups {  // of asynchronous actions: the one that is open, and those that are committed
    std::vector<Action> open;
    std::deque<std::vector<Action>> committed;

    void commit() { committed.push_back(std::exchange(open, {})); }
    void carry_out_until(size_t pending) {
        while (committed.size() > pending) {
            for (Action& act : committed.front()) act();
            committed.pop_front();
        }
    }
};

struct Steps {  // of asynchronous actions, for races.h: how many were taken, are committed with each group, are done
    uint32_t taken = 0, done = 0;
    std::vector<uint32_t> committed;

    void commit() { committed.push_back(taken); }
    void wait(size_t pending) {
        if (committed.size() > pending) done = committed[committed.size() - 1 - pending];
    }
};

struct BulkGroups {  // the same of stores and reductions: each reads its source first, and then writes
    std::vector<std::function<Action()>> open;
    std::deque<std::vector<std::function<Action()>>> to_read;
    std::deque<std::vector<Action>> to_write;

    void commit() { to_read.push_back(std::exchange(open, {})); }
    void read_until(size_t pending) {
        for (; to_read.size() > pending; to_read.pop_front()) {
            to_write.emplace_back();
            for (auto& read : to_read.front()) to_write.back().push_back(read());
        }
    }
    void write_until(size_t pending) {
        read_until(pending);
        for (; to_read.size() + to_write.size() > pending; to_write.pop_front()) {
            for (Action& write : to_write.front()) write();
        }
    }
};

struct Cta {
    int rank;
    unsigned char* shared;
    std::unique_ptr<char[]> stacks, shared_memory;
    std::vector<Fiber> fibers;
    int running;  // threads that have not ended
    std::map<std::pair<int, int>, Meeting> meetings;  // by scope and index
    std::array<NamedBarrier, 16> named;
    std::map<uint32_t, MBarrier> mbarriers;
    std::vector<Action> in_flight;     // loads of TMA, and copies to other CTAs
    std::map<int, std::vector<Action>> copies;  // begun by a thread since it last said whom to tell, or waited
    std::set<int> stores_async;        // threads that have stored to other CTAs
    std::map<int, BulkGroups> bulk;    // by thread
    std::map<int, Steps> bulk_steps;
    std::array<Groups, 8> products;    // wgmma, by warpgroup
    std::array<Steps, 8> product_steps;
    int rows_in_use = 64;              // of an operand A in shared memory
    std::vector<races::Cell> cells;    // of shared memory
};
struct Cluster {
    int first_index;  // of its CTAs
    std::vector<Cta> ctas;
    std::vector<std::pair<Cta*, int>> warps;
    const Cta* late = nullptr;  // and a warpgroup of it that the others leave behind for a while
    int late_warpgroup = 0;
    NamedBarrier barrier;
    std::shared_ptr<races::Clocks> clocks;
};

extern Cluster* group;  // that runs at the moment
extern Cta* cta;        // of it

// The CTA that an address of the cluster lies in.
Cta& cta_at(uint32_t address);

// Carries the 128-byte swizzle out on an address: 16-byte chunk c of 128-byte row r is at chunk c ^ (r % 8).
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

namespace mbarrier {
// What the hardware does when something asynchronous is done.
void complete_bytes(uint32_t barrier, uint32_t bytes, const races::Operation& operation);
void arrive(uint32_t barrier, const races::Operation& operation);
}  // namespace mbarrier
