// wgmma: D[64×N] (+)= A[64×16] · B[16×N], float32 accumulators in registers, 16-bit operands (PTX ISA,
// "Asynchronous Warpgroup Level Matrix Instructions"). One specialisation of `Wgmma` for each N. Of 8-bit operands a
// step contracts 32 elements, and both must be K-major.
//
// Accumulator layout: element i of a thread lies in row 16·warp + lane/4 + 8·(i/2 % 2), column
// 8·(i/4) + 2·(lane%4) + i%2. The A fragment of k16 step s holds the elements of columns 16·s … 16·s+15,
// packed in pairs, in that same order: accumulators become A operands with no shuffle. With e4m3 elements, register r
// of the A fragment of step s holds four of row lane/4 + 8·(r%2), from column 32·s + 16·(r/2) + 4·(lane%4) on.
#pragma once
#include "types.cuh"

namespace wgmma {

// Orders earlier register writes before the wgmmas that follow.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the wgmmas issued so far as a group.
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` groups are unfinished.
template <int pending>
__device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses of accumulators across wgmma::fence or wgmma::wait.
template <int count>
__device__ __forceinline__ void pin(float (&registers)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Keeps a following `wait` behind the computation of `sum`, which must never be negative. ptxas treats the wait as
// arithmetic, and hoists it as far as registers allow, but not over an access to shared memory. This store to
// `address`, any valid one, is such an access, and is never executed.
__device__ __forceinline__ void hold_wait_behind(float sum, uint32_t address) {
    asm volatile(
        "{\n.reg .pred never;\n"
        "setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.volatile.shared.f32 [%1], %0;\n}\n" ::"f"(sum),
        "r"(address)
        : "memory");
}

// Says that of operands A in shared memory the first rows alone are in use. It doesn't matter what the others hold, nor
// who writes there meanwhile. Nothing happens here: it is for the emulator, which looks for races
// (tests/support/emulator).
__device__ __forceinline__ void use_first_rows(int) {}

enum class Major { K = 0, MN = 1 };  // which axis of a shared-memory operand is contiguous

template <class Element>
constexpr bool is_e4m3 = is_same<Element, float8_e4m3fn>;

template <int N>
struct Wgmma;

// C = N/8 selects the lists of the N/2 accumulators. The numbers are those of the operands after them.
#define JAX_FLASH_WGMMA_SS(N, C, TYPE, I0, I1, I2, I3, I4)                                                           \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" I2 ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" JAX_FLASH_REGS##C              \
                 "}, %" I0 ", %" I1 ", accumulate, 1, 1, %" I3 ", %" I4 ";\n}\n"                                     \
                 : JAX_FLASH_OUT##C                                                                                  \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(static_cast<int>(a_major)), "n"(static_cast<int>(b_major)))
#define JAX_FLASH_WGMMA_RS(N, C, TYPE, I0, I1, I2, I3, I4, I5, I6)                                                   \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" I5 ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" JAX_FLASH_REGS##C              \
                 "}, {%" I0 ", %" I1 ", %" I2 ", %" I3 "}, %" I4 ", accumulate, 1, 1, %" I6 ";\n}\n"                 \
                 : JAX_FLASH_OUT##C                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                              \
                   "n"(static_cast<int>(b_major)))
#define JAX_FLASH_WGMMA_FP8_SS(N, C, I0, I1, I2)                                                                     \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" I2 ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" JAX_FLASH_REGS##C                      \
                 "}, %" I0 ", %" I1 ", accumulate, 1, 1;\n}\n"                                                       \
                 : JAX_FLASH_OUT##C                                                                                  \
                 : "l"(a), "l"(b), "r"(accumulate))
#define JAX_FLASH_WGMMA_FP8_RS(N, C, I0, I1, I2, I3, I4, I5)                                                         \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" I5 ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" JAX_FLASH_REGS##C                      \
                 "}, {%" I0 ", %" I1 ", %" I2 ", %" I3 "}, %" I4 ", accumulate, 1, 1;\n}\n"                          \
                 : JAX_FLASH_OUT##C                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define JAX_FLASH_WGMMA(N, C, I0, I1, I2, I3, I4, I5, I6)                                                            \
    template <>                                                                                                      \
    struct Wgmma<N> {                                                                                                \
        /* A and B from shared memory, by descriptor */                                                              \
        template <class Element, Major a_major, Major b_major>                                                       \
        static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {    \
            static_assert(!is_e4m3<Element> || (a_major == Major::K && b_major == Major::K), "8 bits are K-major");  \
            if constexpr (is_e4m3<Element>) {                                                                        \
                JAX_FLASH_WGMMA_FP8_SS(N, C, I0, I1, I2);                                                            \
            } else if constexpr (is_same<Element, bfloat16>) {                                                       \
                JAX_FLASH_WGMMA_SS(N, C, "bf16", I0, I1, I2, I3, I4);                                                \
            } else {                                                                                                 \
                JAX_FLASH_WGMMA_SS(N, C, "f16", I0, I1, I2, I3, I4);                                                 \
            }                                                                                                        \
        }                                                                                                            \
        /* A from registers */                                                                                       \
        template <class Element, Major b_major>                                                                      \
        static __device__ __forceinline__ void issue(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,          \
                                                     int accumulate) {                                               \
            static_assert(!is_e4m3<Element> || b_major == Major::K, "8 bits are K-major");                            \
            if constexpr (is_e4m3<Element>) {                                                                        \
                JAX_FLASH_WGMMA_FP8_RS(N, C, I0, I1, I2, I3, I4, I5);                                                \
            } else if constexpr (is_same<Element, bfloat16>) {                                                       \
                JAX_FLASH_WGMMA_RS(N, C, "bf16", I0, I1, I2, I3, I4, I5, I6);                                        \
            } else {                                                                                                 \
                JAX_FLASH_WGMMA_RS(N, C, "f16", I0, I1, I2, I3, I4, I5, I6);                                         \
            }                                                                                                        \
        }                                                                                                            \
    };

// The accumulators of the first n·8 columns, as text and as constraints.
#define JAX_FLASH_REGS1 "%0, %1, %2, %3"
#define JAX_FLASH_REGS2 JAX_FLASH_REGS1 ", %4, %5, %6, %7"
#define JAX_FLASH_REGS3 JAX_FLASH_REGS2 ", %8, %9, %10, %11"
#define JAX_FLASH_REGS4 JAX_FLASH_REGS3 ", %12, %13, %14, %15"
#define JAX_FLASH_REGS5 JAX_FLASH_REGS4 ", %16, %17, %18, %19"
#define JAX_FLASH_REGS6 JAX_FLASH_REGS5 ", %20, %21, %22, %23"
#define JAX_FLASH_REGS7 JAX_FLASH_REGS6 ", %24, %25, %26, %27"
#define JAX_FLASH_REGS8 JAX_FLASH_REGS7 ", %28, %29, %30, %31"
#define JAX_FLASH_REGS9 JAX_FLASH_REGS8 ", %32, %33, %34, %35"
#define JAX_FLASH_REGS10 JAX_FLASH_REGS9 ", %36, %37, %38, %39"
#define JAX_FLASH_REGS11 JAX_FLASH_REGS10 ", %40, %41, %42, %43"
#define JAX_FLASH_REGS12 JAX_FLASH_REGS11 ", %44, %45, %46, %47"
#define JAX_FLASH_REGS13 JAX_FLASH_REGS12 ", %48, %49, %50, %51"
#define JAX_FLASH_REGS14 JAX_FLASH_REGS13 ", %52, %53, %54, %55"
#define JAX_FLASH_REGS15 JAX_FLASH_REGS14 ", %56, %57, %58, %59"
#define JAX_FLASH_REGS16 JAX_FLASH_REGS15 ", %60, %61, %62, %63"
#define JAX_FLASH_REGS17 JAX_FLASH_REGS16 ", %64, %65, %66, %67"
#define JAX_FLASH_REGS18 JAX_FLASH_REGS17 ", %68, %69, %70, %71"
#define JAX_FLASH_REGS19 JAX_FLASH_REGS18 ", %72, %73, %74, %75"
#define JAX_FLASH_REGS20 JAX_FLASH_REGS19 ", %76, %77, %78, %79"
#define JAX_FLASH_REGS21 JAX_FLASH_REGS20 ", %80, %81, %82, %83"
#define JAX_FLASH_REGS22 JAX_FLASH_REGS21 ", %84, %85, %86, %87"
#define JAX_FLASH_REGS23 JAX_FLASH_REGS22 ", %88, %89, %90, %91"
#define JAX_FLASH_REGS24 JAX_FLASH_REGS23 ", %92, %93, %94, %95"
#define JAX_FLASH_REGS25 JAX_FLASH_REGS24 ", %96, %97, %98, %99"
#define JAX_FLASH_REGS26 JAX_FLASH_REGS25 ", %100, %101, %102, %103"
#define JAX_FLASH_REGS27 JAX_FLASH_REGS26 ", %104, %105, %106, %107"
#define JAX_FLASH_REGS28 JAX_FLASH_REGS27 ", %108, %109, %110, %111"
#define JAX_FLASH_REGS29 JAX_FLASH_REGS28 ", %112, %113, %114, %115"
#define JAX_FLASH_REGS30 JAX_FLASH_REGS29 ", %116, %117, %118, %119"
#define JAX_FLASH_REGS31 JAX_FLASH_REGS30 ", %120, %121, %122, %123"
#define JAX_FLASH_REGS32 JAX_FLASH_REGS31 ", %124, %125, %126, %127"
#define JAX_FLASH_OUT1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define JAX_FLASH_OUT2 JAX_FLASH_OUT1, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define JAX_FLASH_OUT3 JAX_FLASH_OUT2, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define JAX_FLASH_OUT4 JAX_FLASH_OUT3, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define JAX_FLASH_OUT5 JAX_FLASH_OUT4, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define JAX_FLASH_OUT6 JAX_FLASH_OUT5, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define JAX_FLASH_OUT7 JAX_FLASH_OUT6, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define JAX_FLASH_OUT8 JAX_FLASH_OUT7, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define JAX_FLASH_OUT9 JAX_FLASH_OUT8, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define JAX_FLASH_OUT10 JAX_FLASH_OUT9, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define JAX_FLASH_OUT11 JAX_FLASH_OUT10, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define JAX_FLASH_OUT12 JAX_FLASH_OUT11, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define JAX_FLASH_OUT13 JAX_FLASH_OUT12, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define JAX_FLASH_OUT14 JAX_FLASH_OUT13, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define JAX_FLASH_OUT15 JAX_FLASH_OUT14, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define JAX_FLASH_OUT16 JAX_FLASH_OUT15, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define JAX_FLASH_OUT17 JAX_FLASH_OUT16, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define JAX_FLASH_OUT18 JAX_FLASH_OUT17, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define JAX_FLASH_OUT19 JAX_FLASH_OUT18, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define JAX_FLASH_OUT20 JAX_FLASH_OUT19, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define JAX_FLASH_OUT21 JAX_FLASH_OUT20, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define JAX_FLASH_OUT22 JAX_FLASH_OUT21, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define JAX_FLASH_OUT23 JAX_FLASH_OUT22, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define JAX_FLASH_OUT24 JAX_FLASH_OUT23, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define JAX_FLASH_OUT25 JAX_FLASH_OUT24, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define JAX_FLASH_OUT26 JAX_FLASH_OUT25, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define JAX_FLASH_OUT27 JAX_FLASH_OUT26, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define JAX_FLASH_OUT28 JAX_FLASH_OUT27, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define JAX_FLASH_OUT29 JAX_FLASH_OUT28, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define JAX_FLASH_OUT30 JAX_FLASH_OUT29, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define JAX_FLASH_OUT31 JAX_FLASH_OUT30, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define JAX_FLASH_OUT32 JAX_FLASH_OUT31, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

JAX_FLASH_WGMMA(8, 1, "4", "5", "6", "7", "8", "9", "10")
JAX_FLASH_WGMMA(16, 2, "8", "9", "10", "11", "12", "13", "14")
JAX_FLASH_WGMMA(24, 3, "12", "13", "14", "15", "16", "17", "18")
JAX_FLASH_WGMMA(32, 4, "16", "17", "18", "19", "20", "21", "22")
JAX_FLASH_WGMMA(40, 5, "20", "21", "22", "23", "24", "25", "26")
JAX_FLASH_WGMMA(48, 6, "24", "25", "26", "27", "28", "29", "30")
JAX_FLASH_WGMMA(56, 7, "28", "29", "30", "31", "32", "33", "34")
JAX_FLASH_WGMMA(64, 8, "32", "33", "34", "35", "36", "37", "38")
JAX_FLASH_WGMMA(72, 9, "36", "37", "38", "39", "40", "41", "42")
JAX_FLASH_WGMMA(80, 10, "40", "41", "42", "43", "44", "45", "46")
JAX_FLASH_WGMMA(88, 11, "44", "45", "46", "47", "48", "49", "50")
JAX_FLASH_WGMMA(96, 12, "48", "49", "50", "51", "52", "53", "54")
JAX_FLASH_WGMMA(104, 13, "52", "53", "54", "55", "56", "57", "58")
JAX_FLASH_WGMMA(112, 14, "56", "57", "58", "59", "60", "61", "62")
JAX_FLASH_WGMMA(120, 15, "60", "61", "62", "63", "64", "65", "66")
JAX_FLASH_WGMMA(128, 16, "64", "65", "66", "67", "68", "69", "70")
JAX_FLASH_WGMMA(136, 17, "68", "69", "70", "71", "72", "73", "74")
JAX_FLASH_WGMMA(144, 18, "72", "73", "74", "75", "76", "77", "78")
JAX_FLASH_WGMMA(152, 19, "76", "77", "78", "79", "80", "81", "82")
JAX_FLASH_WGMMA(160, 20, "80", "81", "82", "83", "84", "85", "86")
JAX_FLASH_WGMMA(168, 21, "84", "85", "86", "87", "88", "89", "90")
JAX_FLASH_WGMMA(176, 22, "88", "89", "90", "91", "92", "93", "94")
JAX_FLASH_WGMMA(184, 23, "92", "93", "94", "95", "96", "97", "98")
JAX_FLASH_WGMMA(192, 24, "96", "97", "98", "99", "100", "101", "102")
JAX_FLASH_WGMMA(200, 25, "100", "101", "102", "103", "104", "105", "106")
JAX_FLASH_WGMMA(208, 26, "104", "105", "106", "107", "108", "109", "110")
JAX_FLASH_WGMMA(216, 27, "108", "109", "110", "111", "112", "113", "114")
JAX_FLASH_WGMMA(224, 28, "112", "113", "114", "115", "116", "117", "118")
JAX_FLASH_WGMMA(232, 29, "116", "117", "118", "119", "120", "121", "122")
JAX_FLASH_WGMMA(240, 30, "120", "121", "122", "123", "124", "125", "126")
JAX_FLASH_WGMMA(248, 31, "124", "125", "126", "127", "128", "129", "130")
JAX_FLASH_WGMMA(256, 32, "128", "129", "130", "131", "132", "133", "134")

}  // namespace wgmma
