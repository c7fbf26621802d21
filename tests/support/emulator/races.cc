// races.h, and what the compiler calls for accesses of threads.
#include "races.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <set>
#include <string>

#include "emulator.h"
#include "machine.h"

namespace races {

constexpr int copies = 192;  // under way at once, of a cluster
constexpr int cell_bytes = 4;
constexpr size_t most_reported = 40;

bool sought = false;

// What is kept of a warp, so that it isn't found anew where nothing has changed.
struct Warp {
    Clock joined;                  // what came before for any lane; empty where a lane's clock has changed since
    bool reads_are_known = false;  // to all lanes, of each other
};

// Actors are numbered: threads of all CTAs; the stores of each thread, or its copies, as no thread stores before it has
// waited for its copies, and none copies after it has stored (copies.cc); tensor cores by warp; copies by TMA, whose
// numbers are used again.
struct Clocks {
    int ctas, threads;
    std::vector<Clock> of_threads;
    std::vector<uint32_t> steps;  // that each actor has taken
    std::vector<Warp> warps;
    std::deque<int> free;

    int stores(int thread) const { return ctas * threads + thread; }
    int products(int warp) const { return 2 * ctas * threads + warp; }
    int first_copy() const { return 2 * ctas * threads + ctas * threads / 32; }
    int count() const { return first_copy() + copies; }
};

namespace {

std::set<std::string> found;
std::set<std::pair<const void*, const void*>> found_places;

void join_numbers(std::vector<uint32_t>& mine, const std::vector<uint32_t>& others) {
    if (mine.size() < others.size()) mine.resize(others.size());
    for (size_t i = 0; i < others.size(); ++i) mine[i] = std::max(mine[i], others[i]);
}

Clocks& clocks() { return *group->clocks; }
int actor_of(int thread) { return cta->rank * clocks().threads + thread; }
int me() { return actor_of(threadIdx.x); }
const Clock& clock_of(int actor) { return clocks().of_threads[actor]; }
Clock& changing(int actor) {
    Warp& warp = clocks().warps[actor / 32];
    warp.joined.clear();
    warp.reads_are_known = false;
    return clocks().of_threads[actor];
}

void step(int actor) {
    Clock& own = changing(actor);
    own.seen[actor] = own.read[actor] = ++clocks().steps[actor];
}

// The running thread knows of that actor's steps.
void know(int actor, uint32_t steps) {
    Clock& own = changing(me());
    for (auto* of_all : {&own.seen, &own.read}) (*of_all)[actor] = std::max((*of_all)[actor], steps);
}

std::string name_of(int actor) {
    const Clocks& all = clocks();
    char text[80];
    const int of_ctas = all.ctas * all.threads;
    if (actor < 2 * of_ctas) {
        const int thread = actor % of_ctas % all.threads, rank = actor % of_ctas / all.threads;
        const char* what = actor < of_ctas ? "" : "a store or copy by ";
        snprintf(text, sizeof(text), "%sthread %d of CTA %d", what, thread, rank);
    } else if (actor < all.first_copy()) {
        const int warps = all.threads / 32, warp = actor - 2 * of_ctas;
        snprintf(text, sizeof(text), "tensor cores of warp %d of CTA %d", warp % warps, warp / warps);
    } else {
        snprintf(text, sizeof(text), "a copy");
    }
    return text;
}

std::string place_of(const void* from) {
    Dl_info info;
    char text[40] = "?";
    if (from != nullptr && dladdr(from, &info)) {
        const size_t offset = static_cast<const char*>(from) - static_cast<char*>(info.dli_fbase);
        snprintf(text, sizeof(text), "%#zx", offset);
    }
    return text;
}

// One line for each pair of places in the kernel.
void report(const char* what, const Epoch& first, const Epoch& second, uint32_t offset) {
    if (found.size() >= most_reported || !found_places.insert({first.from, second.from}).second) return;
    char at[40];
    snprintf(at, sizeof(at), " (byte %u)", offset);
    found.insert(std::string(what) + "|" + name_of(first.actor) + "|" + place_of(first.from) + "|" +
                 name_of(second.actor) + at + "|" + place_of(second.from));
}

// Reports the last write, if nothing orders it before an access.
void check_last_write(const Cell& cell, const char* and_what, const Epoch& by, const Clock& before, bool generic,
                      uint32_t offset) {
    const Epoch& last = cell.write;
    if (!last.meets(by)) return;
    const bool is_seen = before.seen[last.actor] >= last.step;
    const bool lacks_fence = !generic && cell.generic && before.fenced[last.actor] < last.step;
    if (is_seen && !lacks_fence) return;
    const std::string what = std::string("a write and a ") + and_what + (is_seen ? " by another proxy" : "");
    report(what.c_str(), last, by, offset);
}

void read(Cell& cell, const Epoch& by, const Clock& before, bool generic, uint32_t offset) {
    check_last_write(cell, "read", by, before, generic, offset);
    for (Epoch& one : cell.reads) {
        if (one.actor != by.actor) continue;
        const uint8_t bytes = one.step == by.step ? one.bytes | by.bytes : by.bytes;
        one = by;
        one.bytes = bytes;
        return;
    }
    cell.reads.push_back(by);
}

void write(Cell& cell, const Epoch& by, const Clock& before, bool generic, uint32_t offset) {
    check_last_write(cell, "write", by, before, generic, offset);
    for (const Epoch& one : cell.reads) {
        if (one.meets(by) && before.read[one.actor] < one.step) report("a read and a write", one, by, offset);
    }
    cell.reads.clear();
    cell.write = by;
    cell.generic = generic;
}

template <bool is_write>
void access(Cta& owner, uint32_t offset, uint32_t bytes, const Epoch& by, const Clock& before, bool generic) {
    const uint32_t end = offset + bytes;
    for (uint32_t at = offset / cell_bytes * cell_bytes; at < end; at += cell_bytes) {
        Epoch here = by;
        here.bytes = 0;
        for (uint32_t i = 0; i < cell_bytes; ++i) here.bytes |= (at + i >= offset && at + i < end) << i;
        (is_write ? write : read)(owner.cells[at / cell_bytes], here, before, generic, at);
    }
}

Operation begin(int actor, const Clock& before, const void* from) {
    Operation operation{actor, ++clocks().steps[actor], before, from};
    operation.before.seen[actor] = operation.before.read[actor] = operation.step;
    return operation;
}

// An access of the running thread, if it is to shared memory of the cluster.
template <bool is_write>
void of_thread(const void* address, uint32_t bytes, const void* from) {
    if (!sought || group == nullptr) return;
    const size_t on_stack = static_cast<const char*>(address) - cta->stacks.get() - threadIdx.x * emulator::stack_bytes;
    if (on_stack < emulator::stack_bytes) return;  // most are to the thread's own stack
    for (Cta& owner : group->ctas) {
        const size_t offset = static_cast<const unsigned char*>(address) - owner.shared;
        if (offset >= emulator::shared_bytes) continue;
        const int actor = me();
        if (!is_write) clocks().warps[actor / 32].reads_are_known = false;
        access<is_write>(owner, offset, bytes, {actor, clock_of(actor).seen[actor], from}, clock_of(actor), true);
        return;
    }
}

}  // namespace

void Clock::join(const Clock& other) {
    join_numbers(seen, other.seen);
    join_numbers(read, other.read);
    join_numbers(fenced, other.fenced);
}
void Clock::clear() {
    seen.clear();
    read.clear();
    fenced.clear();
}

std::shared_ptr<Clocks> clocks_of(int ctas, int threads) {
    if (!sought) return nullptr;
    auto all = std::make_shared<Clocks>();
    all->ctas = ctas, all->threads = threads;
    all->steps.assign(all->count(), 0);
    all->of_threads.resize(ctas * threads);
    all->warps.resize(ctas * threads / 32);
    for (int actor = 0; actor < ctas * threads; ++actor) {
        Clock& own = all->of_threads[actor];
        for (auto* steps : {&own.seen, &own.read, &own.fenced}) steps->assign(all->count(), 0);
        own.seen[actor] = own.read[actor] = all->steps[actor] = 1;
    }
    for (int i = 0; i < copies; ++i) all->free.push_back(all->first_copy() + i);
    return all;
}

std::vector<Cell> cells_of_shared_memory() {
    return std::vector<Cell>(sought ? emulator::shared_bytes / cell_bytes : 0);
}

void release(Order& order) {
    if (!sought) return;
    order.gathered.join(clock_of(me()));
    step(me());
}
void release(Order& order, const Operation& operation) {
    if (sought) order.gathered.join(operation.before);
}
void acquire(const Order& order) {
    if (sought) changing(me()).join(order.released);
}
void waits(Order& order) {
    if (sought) order.waiting.push_back(me());
}
void complete_round(Order& order) {
    if (!sought) return;
    for (int actor : order.waiting) changing(actor).join(order.gathered);
    order.waiting.clear();
    order.gathered.clear();
}
void complete_phase(Order& order) {
    if (!sought) return;
    order.released.join(order.gathered);
    order.gathered.clear();
}
void fence_proxy() {
    if (sought) changing(me()).fenced = clock_of(me()).seen;
}
void meet(int warp) {
    if (!sought) return;
    Clock all;
    for (int lane = 0; lane < 32; ++lane) all.join(clock_of(actor_of(warp * 32 + lane)));
    for (int lane = 0; lane < 32; ++lane) {
        changing(actor_of(warp * 32 + lane)) = all;
        step(actor_of(warp * 32 + lane));
    }
}
void carry_out_together(int warp) {
    if (!sought) return;
    bool& done = clocks().warps[actor_of(warp * 32) / 32].reads_are_known;
    if (done) return;
    std::vector<uint32_t> all;
    for (int lane = 0; lane < 32; ++lane) join_numbers(all, clock_of(actor_of(warp * 32 + lane)).read);
    for (int lane = 0; lane < 32; ++lane) {
        changing(actor_of(warp * 32 + lane)).read = all;
        step(actor_of(warp * 32 + lane));
    }
    done = true;
}

void reads(int thread, Cta& owner, uint32_t offset, uint32_t bytes) {
    if (!sought) return;
    const int actor = actor_of(thread);
    access<false>(owner, offset, bytes, {actor, clock_of(actor).seen[actor], emulator::called_from}, clock_of(actor),
                  true);
}
void writes(int thread, Cta& owner, uint32_t offset, uint32_t bytes) {
    if (!sought) return;
    const int actor = actor_of(thread);
    access<true>(owner, offset, bytes, {actor, clock_of(actor).seen[actor], emulator::called_from}, clock_of(actor),
                 true);
}

void writes_by_copy(Cta& owner, uint32_t offset, uint32_t bytes, const void* from) {
    if (!sought) return;
    const int actor = clocks().stores(me());
    access<true>(owner, offset, bytes, {actor, ++clocks().steps[actor], from}, clock_of(me()), true);
}
Operation copies_of_thread() {
    if (!sought) return {};
    const int actor = clocks().stores(me());
    Operation begun{actor, clocks().steps[actor]};
    for (auto* steps : {&begun.before.seen, &begun.before.read}) steps->assign(actor + 1, 0);
    begun.before.seen[actor] = begun.before.read[actor] = begun.step;
    return begun;
}
Operation copy_of_thread(const void* from) {
    if (!sought) return {};
    if (clocks().free.empty()) emulator::fail("more copies under way than races.cc counts");
    const int actor = clocks().free.front();
    clocks().free.pop_front();
    Operation copy = begin(actor, clock_of(me()), from);
    step(me());
    return copy;
}
void end(const Operation& copy) {
    if (sought) clocks().free.push_back(copy.actor);
}
Operation store_of_thread(const void* from) {
    if (!sought) return {};
    Operation store = begin(clocks().stores(me()), clock_of(me()), from);
    step(me());
    return store;
}
Operation product_of_warp(int warp, const void* from) {
    if (!sought) return {};
    const int of_all = actor_of(warp * 32) / 32;
    Clock& before = clocks().warps[of_all].joined;  // the instruction comes after what any lane did
    if (before.seen.empty()) {
        for (int lane = 0; lane < 32; ++lane) before.join(clock_of(of_all * 32 + lane));
    }
    return begin(clocks().products(of_all), before, from);
}
void reads(const Operation& operation, Cta& owner, uint32_t offset, uint32_t bytes) {
    if (!sought) return;
    access<false>(owner, offset, bytes, {operation.actor, operation.step, operation.from}, operation.before, false);
}
void writes(const Operation& operation, Cta& owner, uint32_t offset, uint32_t bytes) {
    if (!sought) return;
    access<true>(owner, offset, bytes, {operation.actor, operation.step, operation.from}, operation.before, false);
}
void stores_are_done(uint32_t steps) {
    if (!sought) return;
    know(clocks().stores(me()), steps);
}
void products_are_done(uint32_t steps) {
    if (!sought) return;
    know(clocks().products(me() / 32), steps);
}

}  // namespace races

// Has races sought in the launches to come.
extern "C" void seek_races() { races::sought = true; }

// The races of launches since this was last asked, a line each: what; by whom, and from where in the library, one and
// the other. Fields are parted by |.
extern "C" const char* races_found() {
    static std::string text;
    text.clear();
    for (const std::string& line : races::found) text += line + "\n";
    races::found.clear();
    races::found_places.clear();
    return text.c_str();
}

#define RACES_ACCESS(bytes)                                                                                           \
    extern "C" void __tsan_read##bytes(void* at) { races::of_thread<false>(at, bytes, __builtin_return_address(0)); } \
    extern "C" void __tsan_write##bytes(void* at) { races::of_thread<true>(at, bytes, __builtin_return_address(0)); } \
    extern "C" void __tsan_unaligned_read##bytes(void* at) {                                                          \
        races::of_thread<false>(at, bytes, __builtin_return_address(0));                                              \
    }                                                                                                                 \
    extern "C" void __tsan_unaligned_write##bytes(void* at) {                                                         \
        races::of_thread<true>(at, bytes, __builtin_return_address(0));                                               \
    }
RACES_ACCESS(1)
RACES_ACCESS(2)
RACES_ACCESS(4)
RACES_ACCESS(8)
RACES_ACCESS(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) {
    races::of_thread<false>(at, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* at, size_t bytes) {
    races::of_thread<true>(at, bytes, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
