// The emulator itself: threads, what they wait for, and the products of tensor cores. Copies are in copies.cc.
#include "emulator.h"

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <utility>
#include <vector>

#include "machine.h"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "races.h"

Dim3 threadIdx, blockIdx, gridDim;
Cluster* group;
Cta* cta;

namespace {

constexpr int max_threads = 1024;
constexpr int patience = 1000;  // rounds without progress that are a deadlock, as rounds leave warps out

Action body;
jmp_buf scheduler;
int64_t progress;
uint64_t random_state;

void enter() {
    body();
    cta->fibers[threadIdx.x].done = true;
    --cta->running;
    emulator::progressed();
    _longjmp(scheduler, 1);
}

// Runs a thread until it waits. Contexts are only for its start: to switch between them takes system calls.
void run_until_it_waits(Fiber& fiber) {
    if (_setjmp(scheduler) != 0) return;
    if (std::exchange(fiber.started, true)) _longjmp(fiber.place, 1);
    setcontext(&fiber.context);
}

MBarrier& mbarrier_at(uint32_t address) {
    Cta& owner = cta_at(address);
    auto found = owner.mbarriers.find(address & 0xffffff);
    if (found == owner.mbarriers.end()) emulator::fail("an mbarrier that was not initialised");
    return found->second;
}

void arrive(NamedBarrier& barrier, int threads) {
    races::release(barrier.order);
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.any[++barrier.round % 2] = false;
        races::complete_round(barrier.order);
    }
    emulator::progressed();
}

void settle(MBarrier& barrier) {
    if (barrier.pending < 0) emulator::fail("more arrivals at an mbarrier than it counts");
    if (barrier.pending == 0 && barrier.bytes == 0) {
        barrier.parity ^= 1;
        barrier.was_seen = false;
        barrier.pending = barrier.arrivals;
        races::complete_phase(barrier.order);
    }
    emulator::progressed();
}

// Makes the fibers and the memory of a CTA.
void prepare(Cta& state, int rank, int threads) {
    state.rank = rank;
    state.shared_memory.reset(new char[emulator::shared_bytes + 1024]);
    char* const memory = state.shared_memory.get();
    state.shared = reinterpret_cast<unsigned char*>(memory + -reinterpret_cast<uintptr_t>(memory) % 1024);
    memset(state.shared, 0xff, emulator::shared_bytes);  // NaN
    state.running = threads;
    state.stacks.reset(new char[threads * emulator::stack_bytes]);
    state.fibers.resize(threads);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = state.fibers[i];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = state.stacks.get() + i * emulator::stack_bytes;
        fiber.context.uc_stack.ss_size = emulator::stack_bytes;
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
    state.clocks = races::clocks_of(ctas, threads);
    for (int rank = 0; rank < ctas; ++rank) {
        prepare(state.ctas[rank], rank, threads);
        state.ctas[rank].cells = races::cells_of_shared_memory();
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
            run_until_it_waits(cta->fibers[i]);
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
    group = nullptr;
}

}  // namespace

Cta& cta_at(uint32_t address) {
    const size_t rank = (address >> 24) - 1;
    if (address >> 24 == 0) return *cta;
    if (rank >= group->ctas.size()) emulator::fail("an address in a CTA that there is not");
    if (group->ctas[rank].running == 0) emulator::fail("an access to a CTA that has ended");
    return group->ctas[rank];
}

namespace emulator {

const void* called_from;

void run(Action kernel, int grid, int cluster, int resident, int block, uint64_t seed) {
    gridDim = {grid, 1, 1};
    random_state = seed | 1;
    body = std::move(kernel);
    run_grid(grid, cluster, resident, block);
}

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
    if (_setjmp(cta->fibers[me.x].place) == 0) _longjmp(scheduler, 1);
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
        called_from = __builtin_return_address(0);
        for (int i = 0; i < scope / 32; ++i) races::carry_out_together(threadIdx.x / scope * (scope / 32) + i);
        act(meeting.brought.data());
    } else {
        for (const int64_t round = meeting.round; meeting.round == round;) yield();
    }
}

void sync_warp() {
    together(warp, nullptr, [](void**) { races::meet(threadIdx.x / 32); });
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
    arrive(barrier, threads);
}
void named_barrier_sync(int id, int threads) {
    const int64_t round = cta->named[id & 15].round;
    races::waits(cta->named[id & 15].order);
    named_barrier_arrive(id, threads);
    while (cta->named[id].round == round) emulator::yield();
    emulator::progressed();
}
bool named_barrier_any(int id, int threads, bool value) {
    bool& any = cta->named[id & 15].any[cta->named[id & 15].round % 2];
    any |= value;
    named_barrier_sync(id, threads);
    return any;
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
    emulator::together(emulator::warp, &mine, [from = __builtin_return_address(0)](void** of_each) {
        emulator::called_from = from;
        for (int row = 0; row < 32; ++row) {  // eight of each of the four matrices
            const uint32_t to = static_cast<Lane*>(of_each[row])->address;
            if (to % 16 != 0) emulator::fail("a matrix row off its alignment");
            races::writes(threadIdx.x / 32 * 32 + row, *cta, to, 16);
            for (int i = 0; i < 4; ++i) {
                memcpy(cta->shared + to + 4 * i,
                       &static_cast<Lane*>(of_each[row % 8 * 4 + i])->registers[row / 8], 4);
            }
        }
    });
}

uint2 load_matrix_x2_transposed(uint32_t address) {
    struct Lane {
        uint32_t address;
        uint16_t elements[4] = {};
    } mine{address};
    emulator::together(emulator::warp, &mine, [from = __builtin_return_address(0)](void** of_each) {
        emulator::called_from = from;
        for (int row = 0; row < 16; ++row) {  // eight of each of the two matrices
            const uint32_t at = static_cast<Lane*>(of_each[row])->address;
            if (at % 16 != 0) emulator::fail("a matrix row off its alignment");
            races::reads(threadIdx.x / 32 * 32 + row, *cta, at, 16);
            for (int column = 0; column < 8; ++column) {
                Lane& lane = *static_cast<Lane*>(of_each[column * 4 + row % 8 / 2]);
                memcpy(&lane.elements[row / 8 * 2 + row % 2], cta->shared + at + 2 * column, 2);
            }
        }
    });
    auto pair = [&](int i) { return mine.elements[i] | static_cast<uint32_t>(mine.elements[i + 1]) << 16; };
    return {pair(0), pair(2)};
}

namespace cluster {
int rank() { return cta->rank; }
uint32_t address_in(int rank, uint32_t address) { return (address & 0xffffff) | rank + 1 << 24; }
void sync() {
    NamedBarrier& barrier = group->barrier;
    const int64_t round = barrier.round;
    races::waits(barrier.order);
    ::arrive(barrier, emulator::threads() * static_cast<int>(group->ctas.size()));
    while (barrier.round == round) emulator::yield();
    emulator::progressed();
}
void store(uint32_t address, int value) {
    races::writes(threadIdx.x, cta_at(address), address & 0xffffff, sizeof(value));
    memcpy(cta_at(address).shared + (address & 0xffffff), &value, sizeof(value));
}
}  // namespace cluster

// How often somebody arrived at an mbarrier whose last phase no thread had found complete, since this was last asked.
static int phases_unseen = 0;
extern "C" int take_phases_unseen() { return std::exchange(phases_unseen, 0); }

namespace mbarrier {
namespace {
void count_arrival(MBarrier& at) {
    phases_unseen += !at.was_seen;
    if (--at.pending < 0) emulator::fail("more arrivals than a round of an mbarrier has");
    settle(at);
}
}  // namespace
void init(uint32_t barrier, int arrivals) { cta->mbarriers[barrier] = {arrivals, arrivals}; }
void arrive(uint32_t barrier) { arrive_expect(barrier, 0); }
void arrive(uint32_t barrier, const races::Operation& operation) {
    MBarrier& at = mbarrier_at(barrier);
    races::release(at.order, operation);
    count_arrival(at);
}
void arrive_in_cluster(uint32_t barrier) { arrive_expect(barrier, 0); }
void arrive_expect(uint32_t barrier, uint32_t bytes) {
    MBarrier& at = mbarrier_at(barrier);
    at.bytes += bytes;
    races::release(at.order);
    count_arrival(at);
}
void complete_bytes(uint32_t barrier, uint32_t bytes, const races::Operation& operation) {
    MBarrier& at = mbarrier_at(barrier);
    races::release(at.order, operation);
    at.bytes -= bytes;
    settle(at);
}
void wait(uint32_t barrier, uint32_t parity) {
    MBarrier& at = mbarrier_at(barrier);
    while (at.parity == parity) emulator::yield();
    at.was_seen = true;
    races::acquire(at.order);
    emulator::progressed();
}
}  // namespace mbarrier

void fence_shared_for_async() { races::fence_proxy(); }

namespace wgmma {
namespace {
// Where an element lies in shared memory.
uint32_t operand_place(uint64_t descriptor, Major major, int mn, int k) {
    const uint32_t start = (descriptor & 0x3fff) << 4;
    const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) emulator::fail("a descriptor of other than the 128-byte swizzle");
    // Groups of eight rows, 128 bytes each. Along a row lies the contraction, or 64 of the other extent.
    const uint32_t offset = major == Major::K ? mn / 8 * stride + mn % 8 * 128 + k * 2
                                              : mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
    return swizzled(start + offset);
}
}  // namespace
uint16_t operand_bits(uint64_t descriptor, Major major, int mn, int k) {
    uint16_t bits;
    memcpy(&bits, cta->shared + operand_place(descriptor, major, mn, k), 2);
    return bits;
}
unsigned char operand_byte(uint64_t descriptor, int mn, int k) {
    // Pairs of bytes lie as 16-bit elements do.
    return cta->shared[operand_place(descriptor, Major::K, mn, k / 2) + k % 2];
}
void use_first_rows(int rows) { cta->rows_in_use = rows; }
void issue(Action product, const Operands& operands) {
    cta->products[emulator::warpgroup()].open.push_back(std::move(product));
    for (int warp = 0; warp < 4 && races::sought; ++warp) {
        const auto read = [&, by = races::product_of_warp(emulator::warpgroup() * 4 + warp, emulator::called_from)](
                              uint64_t descriptor, Major major, int mn) {
            // 16 bytes at a time: eight along the axis that lies along rows.
            const bool along_k = major == Major::K;
            for (int k = 0; k < 16 && (along_k || mn % 8 == 0); k += along_k ? 8 : 1) {
                races::reads(by, *cta, operand_place(descriptor, major, mn, k), 16);
            }
        };
        for (int n = 0; n < operands.columns; ++n) read(operands.b, operands.b_major, n);
        if (operands.a == 0) continue;  // in registers
        for (int m = warp * 16; m < min(warp * 16 + 16, cta->rows_in_use); ++m) read(operands.a, operands.a_major, m);
    }
    ++cta->product_steps[emulator::warpgroup()].taken;
}
void commit() {
    emulator::together(emulator::warpgroup_scope, nullptr, [](void**) {
        Groups& groups = cta->products[emulator::warpgroup()];
        groups.commit();
        cta->product_steps[emulator::warpgroup()].commit();
        if (emulator::random() % 2 == 0) groups.carry_out_until(0);
    });
}
void wait_for_groups(int pending) {
    emulator::together(emulator::warpgroup_scope, nullptr, [=](void**) {
        cta->products[emulator::warpgroup()].carry_out_until(pending);
        cta->product_steps[emulator::warpgroup()].wait(pending);
    });
    races::products_are_done(cta->product_steps[emulator::warpgroup()].done);
}
}  // namespace wgmma
