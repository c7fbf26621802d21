// The emulator itself, compiled together with one kernel: -DSOURCE=… -DENTRY=….
#include "emulator.h"

#include <cstdio>
#include <cstdlib>
#include <list>
#include <utility>
#include <vector>

#include "machine.h"
#include "ptx/async_copy.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

Dim3 threadIdx, blockIdx, gridDim;

namespace {

constexpr int max_threads = 1024;
constexpr size_t stack_bytes = 256 << 10;
constexpr int patience = 1000;  // rounds without progress that are a deadlock, as rounds leave warps out

Action body;
ucontext_t scheduler;
int64_t progress;
Cluster* group;  // that runs at the moment
Cta* cta;        // of it
uint64_t random_state;

void enter() {
    body();
    cta->fibers[threadIdx.x].done = true;
    --cta->running;
    emulator::progressed();
    swapcontext(&cta->fibers[threadIdx.x].context, &scheduler);
}

// The CTA that an address of the cluster lies in.
Cta& cta_at(uint32_t address) {
    const size_t rank = (address >> 24) - 1;
    if (address >> 24 == 0) return *cta;
    if (rank >= group->ctas.size()) emulator::fail("an address in a CTA that there is not");
    if (group->ctas[rank].running == 0) emulator::fail("an access to a CTA that has ended");
    return group->ctas[rank];
}

MBarrier& mbarrier_at(uint32_t address) {
    Cta& owner = cta_at(address);
    auto found = owner.mbarriers.find(address & 0xffffff);
    if (found == owner.mbarriers.end()) emulator::fail("an mbarrier that was not initialised");
    return found->second;
}

void settle(MBarrier& barrier) {
    if (barrier.pending < 0) emulator::fail("more arrivals at an mbarrier than it counts");
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.parity ^= 1;
        barrier.pending = barrier.arrivals;
    }
    emulator::progressed();
}

// Carries the 128-byte swizzle out on an address: 16-byte chunk c of 128-byte row r is at chunk c ^ (r % 8).
uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

template <class Copy>
void for_each_box_element(const TensorMap& map, unsigned char* memory, uint32_t tile, std::array<int, 5> at,
                          Copy copy) {
    if (tile % 128 != 0) emulator::fail("a TMA tile off its alignment");
    if (map.box[0] * 2 != 128) emulator::fail("a TMA box of other than 128 bytes a row");
    if (map.box[3] != 1 || map.box[4] != 1) emulator::fail("a TMA box of several batch rows");
    for (int row = 0; row < map.box[1] * map.box[2]; ++row) {
        for (int column = 0; column < map.box[0]; ++column) {
            const std::array<int, 5> element{at[0] + column, static_cast<int>(at[1] + row % map.box[1]),
                                             static_cast<int>(at[2] + row / map.box[1]), at[3], at[4]};
            bool inside = true;
            for (int axis = 0; axis < 5; ++axis) inside &= element[axis] >= 0 && element[axis] < map.sizes[axis];
            char* global = map.base + element[0] * 2;
            for (int axis = 1; axis < 5; ++axis) global += element[axis] * map.strides[axis - 1];
            copy(memory + swizzled(tile + row * 128 + column * 2), inside ? global : nullptr);
        }
    }
}

void check_bulk(const void* global, uint32_t shared, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || shared % 16 != 0 || bytes % 16 != 0) {
        emulator::fail("a bulk copy off its alignment");
    }
}

// Makes the fibers and the memory of a CTA.
void prepare(Cta& state, int rank, int threads) {
    state.rank = rank;
    state.shared_memory.reset(new char[emulator::shared_bytes + 1024]);
    char* const memory = state.shared_memory.get();
    state.shared = reinterpret_cast<unsigned char*>(memory + -reinterpret_cast<uintptr_t>(memory) % 1024);
    memset(state.shared, 0xff, emulator::shared_bytes);  // NaN
    state.running = threads;
    state.stacks.reset(new char[threads * stack_bytes]);
    state.fibers.resize(threads);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = state.fibers[i];
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = state.stacks.get() + i * stack_bytes;
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
}

void enter_cta(Cta& next) {
    cta = &next;
    blockIdx = {group->first_index + next.rank, 0, 0};
}

// Carries out something that `state` has in flight.
void act_for(Cta& state) {
    std::swap(state.in_flight[emulator::random() % state.in_flight.size()], state.in_flight.back());
    Action act = std::move(state.in_flight.back());
    state.in_flight.pop_back();
    act();
}

void check_end(Cta& state) {
    if (!state.in_flight.empty()) emulator::fail("the CTA ended before its TMA loads");
    for (auto& [thread, copies] : state.copies) {
        if (!copies.empty()) emulator::fail("nobody waits for an asynchronous copy");
    }
    for (auto& [thread, groups] : state.bulk) {
        if (!groups.open.empty() || !groups.to_read.empty()) emulator::fail("the CTA ended before its TMA stores");
        groups.write_until(0);
    }
}

void start(Cluster& state, int first_index, int ctas, int threads) {
    state.first_index = first_index;
    state.ctas.resize(ctas);
    for (int rank = 0; rank < ctas; ++rank) {
        prepare(state.ctas[rank], rank, threads);
        for (int warp = 0; warp < threads / 32; ++warp) state.warps.push_back({&state.ctas[rank], warp});
    }
}

// Lets most warps of a cluster run until they wait.
void run_on(Cluster& state) {
    group = &state;
    if (emulator::random() % 16 == 0) {
        const size_t ctas = state.ctas.size(), warpgroups = ceil_div(state.warps.size() / ctas, 4);
        state.late = emulator::random() % 2 == 0 ? nullptr : &state.ctas[emulator::random() % ctas];
        state.late_warpgroup = emulator::random() % warpgroups;
    }
    for (size_t i = state.warps.size(); i > 1; --i) std::swap(state.warps[i - 1], state.warps[emulator::random() % i]);
    for (auto [owner, warp] : state.warps) {
        if (emulator::random() % 3 == 0 || owner == state.late && warp / 4 == state.late_warpgroup) continue;
        enter_cta(*owner);
        for (int i = warp * 32; i < warp * 32 + 32; ++i) {
            if (cta->fibers[i].done) continue;
            threadIdx = {i, 0, 0};
            swapcontext(&scheduler, &cta->fibers[i].context);
        }
    }
    for (Cta& each : state.ctas) {
        enter_cta(each);
        if (!each.in_flight.empty() && emulator::random() % 2 == 0) act_for(each);
        if (each.running == 0) check_end(each);
    }
}

// Runs all clusters of a grid, at most `resident` of them at once. They start in a random order, as CUDA promises none.
void run_grid(int grid, int ctas, size_t resident, int threads) {
    std::list<Cluster> at_work;
    const Cluster* late = nullptr;  // that the others leave behind for a while
    std::vector<int> waiting;       // clusters that have not started, by the index of their first CTA
    for (int first = 0; first < grid; first += ctas) waiting.push_back(first);
    for (size_t i = waiting.size(); i > 1; --i) std::swap(waiting[i - 1], waiting[emulator::random() % i]);
    for (int idle = 0; !waiting.empty() || !at_work.empty();) {
        for (; !waiting.empty() && at_work.size() < resident; waiting.pop_back()) {
            start(at_work.emplace_back(), waiting.back(), ctas, threads);
        }
        const int64_t before = progress;
        if (resident > 1 && emulator::random() % 64 == 0) {
            late = &*std::next(at_work.begin(), emulator::random() % at_work.size());
            if (emulator::random() % 2 == 0) late = nullptr;
        }
        bool in_flight = false;
        for (auto each = at_work.begin(); each != at_work.end();) {
            bool running = &*each == late;
            if (!running) run_on(*each);
            for (Cta& of_it : each->ctas) {
                running |= of_it.running > 0;
                in_flight |= !of_it.in_flight.empty();
            }
            each = running ? std::next(each) : at_work.erase(each);
        }
        // Others may have nothing to do while one is left behind.
        idle = progress == before && !in_flight ? idle + (late == nullptr) : 0;
        if (idle > patience) emulator::fail("deadlock");
    }
}

template <class P>
void launch_entry(void (*entry)(P), int grid, int cluster, int resident, int block, const void* parameters) {
    body = [=] { entry(*static_cast<const P*>(parameters)); };
    run_grid(grid, cluster, resident, block);
}

}  // namespace

namespace emulator {

void fail(const char* what) {
    fprintf(stderr, "kernel emulator: %s, in thread %d of CTA %d\n", what, threadIdx.x, blockIdx.x);
    for (int id = 0; id < 16; ++id) {
        const NamedBarrier& barrier = cta->named[id];
        if (barrier.arrived) fprintf(stderr, "  barrier %d: %d of %d\n", id, barrier.arrived, barrier.threads);
    }
    abort();
}

void yield() {
    const Dim3 me = threadIdx;
    swapcontext(&cta->fibers[me.x].context, &scheduler);
}

void progressed() { ++progress; }

uint32_t random() {  // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 20;
}

int warpgroup() { return threadIdx.x / 128; }
int threads() { return cta->fibers.size(); }

void together(Scope scope, void* mine, const std::function<void(void**)>& act) {
    Meeting& meeting = cta->meetings[{scope, threadIdx.x / scope}];
    meeting.brought[threadIdx.x % scope] = mine;
    progressed();
    if (++meeting.arrived == scope) {
        meeting.arrived = 0;
        ++meeting.round;
        act(meeting.brought.data());
    } else {
        for (const int64_t round = meeting.round; meeting.round == round;) yield();
    }
}

void later(Action act) {
    cta->in_flight.push_back(std::move(act));
    progressed();
}

}  // namespace emulator

void named_barrier_arrive(int id, int threads) {
    if (id < 0 || id > 15 || threads % 32 != 0) emulator::fail("a named barrier that there is not");
    NamedBarrier& barrier = cta->named[id];
    if (barrier.arrived && barrier.threads != threads) emulator::fail("counts of a named barrier that differ");
    barrier.threads = threads;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.round;
    }
    emulator::progressed();
}
void named_barrier_sync(int id, int threads) {
    const int64_t round = cta->named[id & 15].round;
    named_barrier_arrive(id, threads);
    while (cta->named[id].round == round) emulator::yield();
    emulator::progressed();
}
unsigned char* dynamic_shared_memory() { return cta->shared; }
void __syncthreads() { named_barrier_sync(0, emulator::threads()); }
int __syncthreads_or(int value) {
    static int any;  // of the one CTA that is in it
    __syncthreads();
    any = 0;
    __syncthreads();
    any |= value;
    __syncthreads();
    return any;
}

void store_matrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    struct Lane {
        uint32_t address, registers[4];
    } mine{address, {a, b, c, d}};
    emulator::together(emulator::warp, &mine, [](void** of_each) {
        for (int row = 0; row < 32; ++row) {  // eight of each of the four matrices
            const uint32_t to = static_cast<Lane*>(of_each[row])->address;
            if (to % 16 != 0) emulator::fail("a matrix row off its alignment");
            for (int i = 0; i < 4; ++i) {
                memcpy(cta->shared + to + 4 * i,
                       &static_cast<Lane*>(of_each[row % 8 * 4 + i])->registers[row / 8], 4);
            }
        }
    });
}

namespace cluster {
int rank() { return cta->rank; }
uint32_t address_in(int rank, uint32_t address) { return (address & 0xffffff) | rank + 1 << 24; }
void sync() {
    NamedBarrier& barrier = group->barrier;
    const int64_t round = barrier.round;
    if (++barrier.arrived == emulator::threads() * static_cast<int>(group->ctas.size())) {
        barrier.arrived = 0;
        ++barrier.round;
    }
    emulator::progressed();
    while (barrier.round == round) emulator::yield();
    emulator::progressed();
}
void store(uint32_t address, int value) {
    memcpy(cta_at(address).shared + (address & 0xffffff), &value, sizeof(value));
}
}  // namespace cluster

namespace mbarrier {
void init(uint32_t barrier, int arrivals) { cta->mbarriers[barrier] = {arrivals, arrivals}; }
void arrive(uint32_t barrier) { arrive_expect(barrier, 0); }
void arrive_in_cluster(uint32_t barrier) { arrive_expect(barrier, 0); }
void arrive_expect(uint32_t barrier, uint32_t bytes) {
    MBarrier& at = mbarrier_at(barrier);
    at.bytes += bytes;
    if (--at.pending < 0) emulator::fail("more arrivals than a round of an mbarrier has");
    settle(at);
}
void complete_bytes(uint32_t barrier, uint32_t bytes) {
    MBarrier& at = mbarrier_at(barrier);
    at.bytes -= bytes;
    settle(at);
}
void wait(uint32_t barrier, uint32_t parity) {
    const MBarrier& at = mbarrier_at(barrier);
    while (at.parity == parity) emulator::yield();
    emulator::progressed();
}
}  // namespace mbarrier

namespace tma {
namespace {
void load_box(uint32_t destination, const TensorMap& map, uint32_t barrier, uint16_t ctas, std::array<int, 5> at) {
    if (destination % 1024 != 0) emulator::fail("a swizzled tile that starts within a period of the swizzle");
    const TensorMap tensor = map;
    for (int rank = 0; rank < 16; ++rank) {
        if ((ctas >> rank & 1) == 0) continue;
        emulator::later([=] {
            unsigned char* memory = cta_at(cluster::address_in(rank, destination)).shared;
            for_each_box_element(tensor, memory, destination, at, [](unsigned char* to, char* from) {
                if (from != nullptr) memcpy(to, from, 2);
                if (from == nullptr) memset(to, 0, 2);
            });
            mbarrier::complete_bytes(cluster::address_in(rank, barrier), tensor.box[1] * tensor.box[2] * 128);
        });
    }
}
}  // namespace
void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    load_box(destination, map, barrier, 1 << cta->rank, {c0, c1, c2, c3, 0});
}
void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4) {
    load_box(destination, map, barrier, 1 << cta->rank, {c0, c1, c2, c3, c4});
}
void load_multicast(uint32_t destination, const TensorMap& map, uint32_t barrier, uint16_t ctas, int c0, int c1,
                    int c2, int c3) {
    load_box(destination, map, barrier, ctas, {c0, c1, c2, c3, 0});
}
void store(const TensorMap& map, uint32_t source, int c0, int c1, int c2, int c3) {
    const TensorMap tensor = map;
    cta->bulk[threadIdx.x].open.push_back([=]() -> Action {
        std::vector<std::pair<char*, uint16_t>> elements;
        for_each_box_element(tensor, cta->shared, source, {c0, c1, c2, c3, 0}, [&](const unsigned char* from, char* to) {
            if (to == nullptr) return;
            elements.push_back({to, 0});
            memcpy(&elements.back().second, from, 2);
        });
        return [elements = std::move(elements)] {
            for (auto [global, bits] : elements) memcpy(global, &bits, 2);
        };
    });
}
void commit_group() { cta->bulk[threadIdx.x].commit(); }
void wait_for_reads(int pending) { cta->bulk[threadIdx.x].read_until(pending); }
void wait_for_groups(int pending) { cta->bulk[threadIdx.x].write_until(pending); }
}  // namespace tma

namespace async_copy {
void load(uint32_t destination, const void* source, bool is_there) {
    check_bulk(source, destination, 16);
    cta->copies[threadIdx.x].push_back([=] {
        if (is_there) memcpy(cta->shared + destination, source, 16);
        if (!is_there) memset(cta->shared + destination, 0, 16);
    });
}
void arrive_when_done(uint32_t barrier) {
    emulator::later([copies = std::exchange(cta->copies[threadIdx.x], {}), barrier] {
        for (const Action& act : copies) act();
        mbarrier::arrive(barrier);
    });
}
}  // namespace async_copy

namespace bulk {
void load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    check_bulk(source, destination, bytes);
    emulator::later([=] {
        memcpy(cta->shared + destination, source, bytes);
        mbarrier::complete_bytes(barrier, bytes);
    });
}
void copy(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier) {
    check_bulk(nullptr, destination | source, bytes);
    if (destination >> 24 != barrier >> 24) emulator::fail("a copy that completes in another CTA");
    emulator::later([=] {
        memcpy(cta_at(destination).shared + (destination & 0xffffff), cta->shared + source, bytes);
        mbarrier::complete_bytes(barrier, bytes);
    });
}
void store(float* destination, uint32_t source, uint32_t bytes) {
    check_bulk(destination, source, bytes);
    cta->bulk[threadIdx.x].open.push_back([=]() -> Action {
        const unsigned char* values = cta->shared + source;
        return [destination, read = std::vector<unsigned char>(values, values + bytes)] {
            memcpy(destination, read.data(), read.size());
        };
    });
}
void reduce_add(float* destination, uint32_t source, uint32_t bytes) {
    check_bulk(destination, source, bytes);
    cta->bulk[threadIdx.x].open.push_back([=]() -> Action {
        const float* values = reinterpret_cast<const float*>(cta->shared + source);
        return [destination, read = std::vector<float>(values, values + bytes / 4)] {
            for (size_t i = 0; i < read.size(); ++i) destination[i] += read[i];
        };
    });
}
void reduce_add_now(float* destination, float a, float b, float c, float d) {
    check_bulk(destination, 0, 16);
    const float values[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) destination[i] += values[i];
}
}  // namespace bulk

namespace wgmma {
uint16_t operand_bits(uint64_t descriptor, Major major, int mn, int k) {
    const uint32_t start = (descriptor & 0x3fff) << 4;
    const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) emulator::fail("a descriptor of other than the 128-byte swizzle");
    // Groups of eight rows, 128 bytes each. Along a row lies the contraction, or 64 of the other extent.
    const uint32_t offset = major == Major::K ? mn / 8 * stride + mn % 8 * 128 + k * 2
                                              : mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
    uint16_t bits;
    memcpy(&bits, cta->shared + swizzled(start + offset), 2);
    return bits;
}
void issue(Action product) { cta->products[emulator::warpgroup()].open.push_back(std::move(product)); }
void commit() {
    emulator::together(emulator::warpgroup_scope, nullptr, [](void**) {
        Groups& groups = cta->products[emulator::warpgroup()];
        groups.commit();
        if (emulator::random() % 2 == 0) groups.carry_out_until(0);
    });
}
void wait_for_groups(int pending) {
    emulator::together(emulator::warpgroup_scope, nullptr,
                       [=](void**) { cta->products[emulator::warpgroup()].carry_out_until(pending); });
}
}  // namespace wgmma

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#include TEXT(SOURCE)

// Runs the kernel with its parameter struct at `parameters`.
extern "C" void emulate(int grid, int cluster, int resident, int block, uint64_t seed, const void* parameters) {
    gridDim = {grid, 1, 1};
    random_state = seed | 1;
    launch_entry(ENTRY, grid, cluster, resident, block, parameters);
}
