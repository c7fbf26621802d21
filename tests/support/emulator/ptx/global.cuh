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
inline void fence_proxy_async() {}

}  // namespace global
