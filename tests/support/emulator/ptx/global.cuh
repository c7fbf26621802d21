// cuda/kernels/ptx/global.cuh, emulated.
#pragma once
#include "types.cuh"

namespace global {

template <class T>
T read_only(const T* address) {
    return *address;
}
inline void load_no_earlier(int&) {}
inline void count(int* address) {
    ++*address;
    emulator::progressed();
}
inline bool has_reached(const int* address, int value) {
    if (*address < value) emulator::yield();
    return *address >= value;
}
inline void prefetch(const void*) {}
inline uint64_t compare_and_swap(uint64_t* address, uint64_t expected, uint64_t next) {
    emulator::yield();  // others may be first
    const uint64_t was = *address;
    if (was == expected) *address = next;
    emulator::progressed();
    return was;
}
inline void replace(uint64_t* address, uint64_t expected, uint64_t next) { compare_and_swap(address, expected, next); }
inline uint64_t fetch_and_count(uint64_t* address) {
    for (int i = emulator::random() % 64; i > 0; --i) emulator::yield();  // others may be first
    emulator::progressed();
    return (*address)++;
}

}  // namespace global
