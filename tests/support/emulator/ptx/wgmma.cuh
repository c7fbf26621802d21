// Emulation of cuda/kernels/ptx/wgmma.cuh: operands are read as the descriptor says, when the group is
// carried out.
#pragma once
#include <vector>

#include "math.cuh"
#include "types.cuh"

// How many bits of a sum the tensor cores keep of products in 8 bits, accumulators included. 0: all.
#ifndef SUM_BITS
#define SUM_BITS 0
#endif

namespace wgmma {

void commit();
void wait_for_groups(int pending);
inline void fence() {}
void use_first_rows(int rows);
template <int pending>
void wait() {
    wait_for_groups(pending);
}
template <int count>
void pin(float (&)[count]) {}
inline void hold_wait_behind(float, uint32_t) {}

enum class Major { K = 0, MN = 1 };

struct Operands {
    uint64_t a, b;  // descriptors; 0 of an operand in registers
    Major a_major, b_major;
    int columns;
};
void issue(std::function<void()> product, const Operands& operands);  // by one thread for its warpgroup

// The element at row or column `mn` and contraction index `k` of a shared-memory operand.
uint16_t operand_bits(uint64_t descriptor, Major major, int mn, int k);  // of 16 bits
unsigned char operand_byte(uint64_t descriptor, int mn, int k);          // of 8 bits, K-major

template <class Element>
float operand(uint64_t descriptor, Major major, int mn, int k) {
    if constexpr (sizeof(Element) == 1) return widen_e4m3(operand_byte(descriptor, mn, k));
    return widen<Element>(operand_bits(descriptor, major, mn, k));
}

template <int N>
struct Wgmma {
    struct Thread {
        float* d;
        const uint32_t* a_registers;
        uint64_t a, b;
        int accumulate;
    };

    template <class Element, Major a_major, Major b_major>
    static void issue(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
        issue_together<Element, a_major, b_major>({d, nullptr, a, b, accumulate});
    }
    template <class Element, Major b_major>
    static void issue(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {
        issue_together<Element, Major::K, b_major>({d, a, 0, b, accumulate});
    }

   private:
    template <class Element, Major a_major, Major b_major>
    static void issue_together(Thread mine) {
        emulator::together(emulator::warpgroup_scope, &mine, [](void** of_each) {
            std::vector<Thread> threads;
            for (int i = 0; i < 128; ++i) {
                threads.push_back(*static_cast<Thread*>(of_each[i]));
                if (threads[i].a != threads[0].a || threads[i].b != threads[0].b) {
                    emulator::fail("descriptors differ within a warpgroup");
                }
            }
            const bool in_registers = threads[0].a_registers != nullptr;
            wgmma::issue([threads] { multiply<Element, a_major, b_major>(threads); },
                         {in_registers ? 0 : threads[0].a, threads[0].b, a_major, b_major, N});
        });
    }

    // Element (m, k) of an A operand that is in registers.
    template <class Element>
    static float of_registers(const std::vector<Thread>& threads, int m, int k) {
        constexpr int of_register = 4 / sizeof(Element);
        const Thread& thread = threads[m / 16 * 32 + m % 8 * 4 + k / of_register % 4];
        const uint32_t bits = thread.a_registers[m % 16 / 8 + k / (4 * of_register) * 2];
        if constexpr (sizeof(Element) == 1) return widen_e4m3(bits >> k % 4 * 8);
        return widen<Element>(bits >> k % 2 * 16);
    }

    // What is left of `before` and of products if all are cut off at the same place, SUM_BITS from the largest's first.
    template <int depth>
    static float cut_off_sum(float before, const float* a, const float* b, int stride) {
        float largest = fabsf(before);
        for (int k = 0; k < depth; ++k) largest = std::max(largest, fabsf(a[k] * b[k * stride]));
        if (!(largest > 0) || std::isinf(largest)) return before;
        const float unit = ldexpf(1, std::ilogb(largest) - SUM_BITS + 1);
        double sum = std::trunc(before / unit);
        for (int k = 0; k < depth; ++k) sum += std::trunc(a[k] * b[k * stride] / unit);
        return static_cast<float>(sum * unit);
    }

    // Its reads of shared memory are told as a whole (Operands).
    template <class Element, Major a_major, Major b_major>
    __attribute__((no_sanitize_thread)) static void multiply(const std::vector<Thread>& threads) {
        constexpr int depth = 32 / sizeof(Element);
        static float a[64][depth], b[depth][N], d[64][N];
        for (int k = 0; k < depth; ++k) {
            for (int n = 0; n < N; ++n) b[k][n] = operand<Element>(threads[0].b, b_major, n, k);
            for (int m = 0; m < 64; ++m) {
                if (threads[0].a_registers == nullptr) {
                    a[m][k] = operand<Element>(threads[0].a, a_major, m, k);
                } else {
                    a[m][k] = of_registers<Element>(threads, m, k);
                }
            }
        }
        for (int m = 0; m < 64; ++m) {
            for (int n = 0; n < N; ++n) d[m][n] = 0;
            if (SUM_BITS && sizeof(Element) == 1) continue;
            for (int k = 0; k < depth; ++k) {
                for (int n = 0; n < N; ++n) d[m][n] += a[m][k] * b[k][n];
            }
        }
        for (int i = 0; i < 128; ++i) {
            for (int j = 0; j < N / 2; ++j) {
                const int row = i / 32 * 16 + i % 32 / 4 + j / 2 % 2 * 8, column = j / 4 * 8 + i % 4 * 2 + j % 2;
                const float before = threads[i].accumulate ? threads[i].d[j] : 0;
                if (SUM_BITS && sizeof(Element) == 1) {
                    threads[i].d[j] = cut_off_sum<depth>(before, a[row], &b[0][column], N);
                } else {
                    threads[i].d[j] = d[row][column] + before;
                }
            }
        }
    }
};

}  // namespace wgmma
