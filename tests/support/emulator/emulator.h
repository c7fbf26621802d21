// Runs CUDA kernels of cuda/kernels on a CPU: what their sources need of CUDA, and what the emulated PTX
// layer (ptx/) is built on.
//
// Every CUDA thread is a fiber; one OS thread runs those of the clusters at work in turn, warps in random order, and
// switches only where a thread waits. What the hardware does asynchronously happens at a random moment between its
// issue and the wait that the program makes for it, so that a wait that is missing shows, sooner or later, as a
// wrong number. Where nobody can go on that is reported as a deadlock, and so is an access to a CTA that has ended.
// Races in shared memory are found by the order that the program makes (races.h). Registers and speed are not emulated.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __restrict__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static  // for kernels whose CTAs run one after the other

struct Dim3 {
    int x, y, z;
};
extern Dim3 threadIdx, blockIdx, gridDim;

struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

template <class T>
T min(T a, T b) {
    return a < b ? a : b;
}
template <class T>
T max(T a, T b) {
    return a > b ? a : b;
}
template <class To, class From>
To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __int_as_float(int x) { return bit_cast<float>(x); }
inline float __uint_as_float(uint32_t x) { return bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return bit_cast<uint32_t>(x); }

namespace emulator {

constexpr int shared_bytes = 227 * 1024;
constexpr size_t stack_bytes = 256 << 10;  // of a thread

// Ends the process: a kernel did what the hardware forbids.
[[noreturn]] void fail(const char* what);
// Lets other threads run.
void yield();
// Notes that somebody got on: there is no deadlock.
void progressed();
uint32_t random();
int warpgroup();
int threads();

enum Scope { warp = 32, warpgroup_scope = 128 };
// Runs a kernel: clusters of `cluster` CTAs, at most `resident` of them at once.
void run(std::function<void()> kernel, int grid, int cluster, int resident, int block, uint64_t seed);

// Where in the kernel the last instruction is that threads carry out together.
extern const void* called_from;

// Waits until every thread of the warp or warpgroup is here; the last one runs `act` on what each brought.
void together(Scope scope, void* mine, const std::function<void(void** of_each)>& act);
// The same of a warp, whose memory accesses it orders.
void sync_warp();
// Runs `act` at some later moment.
void later(std::function<void()> act);

}  // namespace emulator

void __syncthreads();
int __syncthreads_or(int value);
inline void __syncwarp() { emulator::sync_warp(); }
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// The float32 product rounded up; the double one is exact.
inline float __fadd_rd(float a, float b) {
    const double exact = static_cast<double>(a) + b;
    const float nearest = static_cast<float>(exact);
    return nearest > exact ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __fmul_ru(float a, float b) {
    const double exact = static_cast<double>(a) * b;
    const float nearest = static_cast<float>(exact);
    return nearest < exact ? std::nextafter(nearest, INFINITY) : nearest;
}

// To nearest, and for what is too large to the nearest there is.
inline int64_t __float2ll_rn(float x) {
    if (!(fabsf(x) < 0x1p63f)) return x > 0 ? INT64_MAX : INT64_MIN;
    return llrintf(x);
}

// Nobody is switched to meanwhile, and atomics don't race with each other.
template <class T>
__attribute__((no_sanitize_thread)) T atomicAdd(T* address, T value) {
    const T before = *address;
    *address += value;
    return before;
}
template <class T>
__attribute__((no_sanitize_thread)) T atomicOr(T* address, T value) {
    const T before = *address;
    *address |= value;
    return before;
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
    struct Exchange {
        bool given;
        uint32_t taken;
    } mine{value, 0};
    emulator::together(emulator::warp, &mine, [](void** of_each) {
        uint32_t all = 0;
        for (int lane = 0; lane < 32; ++lane) all |= uint32_t{static_cast<Exchange*>(of_each[lane])->given} << lane;
        for (int lane = 0; lane < 32; ++lane) static_cast<Exchange*>(of_each[lane])->taken = all;
    });
    return mine.taken;
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }

inline void __threadfence() {}
inline void __nanosleep(unsigned) { emulator::yield(); }

template <class T>
T __shfl_sync(uint32_t, T value, int source) {
    struct Exchange {
        T given, taken;
        int source;
    } mine{value, 0, source};
    emulator::together(emulator::warp, &mine, [](void** of_each) {
        for (int lane = 0; lane < 32; ++lane) {
            Exchange* const taker = static_cast<Exchange*>(of_each[lane]);
            taker->taken = static_cast<Exchange*>(of_each[taker->source])->given;
        }
    });
    return mine.taken;
}
template <class T>
T __shfl_up_sync(uint32_t, T value, int distance) {
    struct Exchange {
        T given, taken;
    } mine{value, 0};
    emulator::together(emulator::warp, &mine, [distance](void** of_each) {
        for (int lane = 0; lane < 32; ++lane) {
            const int source = lane < distance ? lane : lane - distance;
            static_cast<Exchange*>(of_each[lane])->taken = static_cast<Exchange*>(of_each[source])->given;
        }
    });
    return mine.taken;
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, int distance) {
    struct Exchange {
        T given, taken;
    } mine{value, 0};
    emulator::together(emulator::warp, &mine, [distance](void** of_each) {
        for (int lane = 0; lane < 32; ++lane) {
            static_cast<Exchange*>(of_each[lane])->taken = static_cast<Exchange*>(of_each[lane ^ distance])->given;
        }
    });
    return mine.taken;
}
inline int reduce(int value, int (*combine)(int, int)) {
    struct Exchange {
        int given, taken;
    } mine{value, 0};
    emulator::together(emulator::warp, &mine, [combine](void** of_each) {
        int all = static_cast<Exchange*>(of_each[0])->given;
        for (int lane = 1; lane < 32; ++lane) all = combine(all, static_cast<Exchange*>(of_each[lane])->given);
        for (int lane = 0; lane < 32; ++lane) static_cast<Exchange*>(of_each[lane])->taken = all;
    });
    return mine.taken;
}
inline int __reduce_min_sync(uint32_t, int value) { return reduce(value, min<int>); }
inline int __reduce_max_sync(uint32_t, int value) { return reduce(value, max<int>); }
