// Copies by TMA, in bulk and by threads, and asynchronous stores: each happens at some moment between its issue and the
// wait for it.
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "emulator.h"
#include "machine.h"
#include "ptx/async_copy.cuh"
#include "ptx/bulk.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

namespace {

template <class Copy>
void for_each_box_element(const TensorMap& map, unsigned char* memory, uint32_t tile, std::array<int, 5> at,
                          Copy copy) {
    if (tile % 128 != 0) emulator::fail("a TMA tile off its alignment");
    const int row_bytes = map.box[0] * map.element_bytes;
    if (map.swizzle != 0 && row_bytes != 128) emulator::fail("a swizzled TMA box of other than 128 bytes a row");
    if (map.box[3] != 1 || map.box[4] != 1) emulator::fail("a TMA box of several batch rows");
    for (int row = 0; row < map.box[1] * map.box[2]; ++row) {
        for (int column = 0; column < map.box[0]; ++column) {
            const std::array<int, 5> element{at[0] + column, static_cast<int>(at[1] + row % map.box[1]),
                                             static_cast<int>(at[2] + row / map.box[1]), at[3], at[4]};
            bool inside = true;
            for (int axis = 0; axis < 5; ++axis) inside &= element[axis] >= 0 && element[axis] < map.sizes[axis];
            char* global = map.base + element[0] * map.element_bytes;
            for (int axis = 1; axis < 5; ++axis) global += element[axis] * map.strides[axis - 1];
            const uint32_t place = tile + row * row_bytes + column * map.element_bytes;
            copy(memory + (map.swizzle == 0 ? place : swizzled(place)), inside ? global : nullptr);
        }
    }
}

int64_t box_bytes(const TensorMap& map) { return map.box[0] * map.box[1] * map.box[2] * map.element_bytes; }

void check_bulk(const void* global, uint32_t shared, uint32_t bytes) {
    if (reinterpret_cast<uintptr_t>(global) % 16 != 0 || shared % 16 != 0 || bytes % 16 != 0) {
        emulator::fail("a bulk copy off its alignment");
    }
}

// Begins a store of the running thread, which reads `bytes` of shared memory.
void begin_store(uint32_t source, uint32_t bytes, const void* from, std::function<Action()> read) {
    if (cta->copies.count(threadIdx.x)) emulator::fail("a bulk store by a thread that copies");  // see races.cc
    races::reads(races::store_of_thread(from), *cta, source, bytes);
    ++cta->bulk_steps[threadIdx.x].taken;
    cta->bulk[threadIdx.x].open.push_back(std::move(read));
}

// Begins a copy that writes `bytes` of shared memory, and tells `barrier`, in the same CTA.
void begin_copy(uint32_t destination, uint32_t bytes, uint32_t barrier, races::Operation copy, Action act) {
    races::writes(copy, cta_at(destination), destination & 0xffffff, bytes);
    emulator::later([=] {
        act();
        mbarrier::complete_bytes(barrier, bytes, copy);
        races::end(copy);
    });
}

}  // namespace

namespace tma {
namespace {
void load_box(uint32_t destination, const TensorMap& map, uint32_t barrier, uint16_t ctas, std::array<int, 5> at,
              const void* from) {
    if (map.swizzle != 0 && destination % 1024 != 0) {
        emulator::fail("a swizzled tile that starts within a period of the swizzle");
    }
    const TensorMap tensor = map;
    for (int rank = 0; rank < 16; ++rank) {
        if ((ctas >> rank & 1) == 0) continue;
        const uint32_t there = cluster::address_in(rank, destination);
        begin_copy(there, box_bytes(map), cluster::address_in(rank, barrier), races::copy_of_thread(from), [=] {
            const auto copy = [bytes = tensor.element_bytes](unsigned char* to, char* from) {
                if (from != nullptr) memcpy(to, from, bytes);
                if (from == nullptr) memset(to, 0, bytes);
            };
            for_each_box_element(tensor, cta_at(there).shared, destination, at, copy);
        });
    }
}
}  // namespace
void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    load_box(destination, map, barrier, 1 << cta->rank, {c0, c1, c2, c3, 0}, __builtin_return_address(0));
}
void load(uint32_t destination, const TensorMap& map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4) {
    load_box(destination, map, barrier, 1 << cta->rank, {c0, c1, c2, c3, c4}, __builtin_return_address(0));
}
void load_multicast(uint32_t destination, const TensorMap& map, uint32_t barrier, uint16_t ctas, int c0, int c1, int c2,
                    int c3) {
    load_box(destination, map, barrier, ctas, {c0, c1, c2, c3, 0}, __builtin_return_address(0));
}
void store(const TensorMap& map, uint32_t source, int c0, int c1, int c2, int c3) {
    const TensorMap tensor = map;
    if (map.element_bytes != 2) emulator::fail("a TMA store of other than 16-bit elements");
    begin_store(source, box_bytes(map), __builtin_return_address(0), [=]() -> Action {
        std::vector<std::pair<char*, uint16_t>> elements;
        for_each_box_element(tensor, cta->shared, source, {c0, c1, c2, c3, 0},
                             [&](const unsigned char* from, char* to) {
                                 if (to == nullptr) return;
                                 elements.push_back({to, 0});
                                 memcpy(&elements.back().second, from, 2);
                             });
        return [elements = std::move(elements)] {
            for (auto [global, bits] : elements) memcpy(global, &bits, 2);
        };
    });
}
void commit_group() {
    cta->bulk[threadIdx.x].commit();
    cta->bulk_steps[threadIdx.x].commit();
}
void wait_for_reads(int pending) {
    cta->bulk[threadIdx.x].read_until(pending);
    cta->bulk_steps[threadIdx.x].wait(pending);
    races::stores_are_done(cta->bulk_steps[threadIdx.x].done);
}
void wait_for_groups(int pending) {
    cta->bulk[threadIdx.x].write_until(pending);
    cta->bulk_steps[threadIdx.x].wait(pending);
    races::stores_are_done(cta->bulk_steps[threadIdx.x].done);
}
}  // namespace tma

namespace cluster {
void store_async(uint32_t address, float4 x, uint32_t barrier) {
    if (address % 16 != 0) emulator::fail("an asynchronous store off its alignment");
    if (address >> 24 != barrier >> 24) emulator::fail("a store that completes in another CTA");
    if (cta->bulk.count(threadIdx.x) || cta->copies.count(threadIdx.x)) {
        emulator::fail("an asynchronous store by a thread that copies");  // see races.cc
    }
    cta->stores_async.insert(threadIdx.x);
    const races::Operation store = races::store_of_thread(__builtin_return_address(0));
    races::writes(store, cta_at(address), address & 0xffffff, sizeof(x));
    // The other CTA must not end before. This one may: what it stores is in registers.
    cta_at(address).in_flight.push_back([=] {
        memcpy(cta_at(address).shared + (address & 0xffffff), &x, sizeof(x));
        mbarrier::complete_bytes(barrier, sizeof(x), store);
    });
    emulator::progressed();
}
}  // namespace cluster

namespace async_copy {
void load(uint32_t destination, const void* source, bool is_there) {
    check_bulk(source, destination, 16);
    if (cta->bulk.count(threadIdx.x) || cta->stores_async.count(threadIdx.x)) {
        emulator::fail("a copy by a thread that stores asynchronously");  // see races.cc
    }
    races::writes_by_copy(*cta, destination, 16, __builtin_return_address(0));
    cta->copies[threadIdx.x].push_back([=] {
        if (is_there) memcpy(cta->shared + destination, source, 16);
        if (!is_there) memset(cta->shared + destination, 0, 16);
    });
}
void arrive_when_done(uint32_t barrier) {
    emulator::later([copies = std::exchange(cta->copies[threadIdx.x], {}), barrier, own = races::copies_of_thread()] {
        for (const Action& act : copies) act();
        mbarrier::arrive(barrier, own);
    });
}
void wait_for_own() {
    for (const Action& act : std::exchange(cta->copies[threadIdx.x], {})) act();
    cta->copies.erase(threadIdx.x);
    races::stores_are_done(races::copies_of_thread().step);
}
}  // namespace async_copy

namespace bulk {
void load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    check_bulk(source, destination, bytes);
    begin_copy(destination, bytes, barrier, races::copy_of_thread(__builtin_return_address(0)),
               [=] { memcpy(cta->shared + destination, source, bytes); });
}
void copy(uint32_t destination, uint32_t source, uint32_t bytes, uint32_t barrier) {
    check_bulk(nullptr, destination | source, bytes);
    if (destination >> 24 != barrier >> 24) emulator::fail("a copy that completes in another CTA");
    const races::Operation copy = races::copy_of_thread(__builtin_return_address(0));
    races::reads(copy, *cta, source, bytes);
    begin_copy(destination, bytes, barrier, copy,
               [=] { memcpy(cta_at(destination).shared + (destination & 0xffffff), cta->shared + source, bytes); });
}
void store(float* destination, uint32_t source, uint32_t bytes) {
    check_bulk(destination, source, bytes);
    begin_store(source, bytes, __builtin_return_address(0), [=]() -> Action {
        const unsigned char* values = cta->shared + source;
        return [destination, read = std::vector<unsigned char>(values, values + bytes)] {
            memcpy(destination, read.data(), read.size());
        };
    });
}
void reduce_add(float* destination, uint32_t source, uint32_t bytes) {
    check_bulk(destination, source, bytes);
    begin_store(source, bytes, __builtin_return_address(0), [=]() -> Action {
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
