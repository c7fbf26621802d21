// How fast patterns of loads read a key-value cache (batch, keys, heads, bytes of a head), without any attention: what
// memory allows the decode kernel. Keys and values are an array each.
//
//   nvcc -O2 -std=c++17 -arch=sm_90a benchmarks/read_patterns.cu -o read_patterns
//   ./read_patterns $(git rev-parse HEAD) > read_patterns_h100.json
//
// A row has a call and how it is read: by boxes of `rows` keys and `panel` bytes, by `per_sm` CTAs on a multiprocessor
// that have up to `kb` KiB in flight together. CTAs have equal shares of the sequence (batch, head, block). With
// `heads_together` adjacent CTAs have the heads of a share of (batch, block); `dealt` times as
// many CTAs have such a share, and each reads every `dealt`-th block of it. `l2` is the size that the tensor map has
// L2 fetch, 0 for none; `evict_first` is a hint to L2. Rows of another kind read or copy an array by plain loads. Times
// are of CUDA events around eight launches, the median of seven.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#define CHECK(call)                                                                  \
    do {                                                                             \
        const auto status = (call);                                                  \
        if (status != 0) {                                                           \
            std::fprintf(stderr, "%s: error %d\n", #call, static_cast<int>(status)); \
            std::exit(1);                                                            \
        }                                                                            \
    } while (0)

constexpr int most_stages = 64;
constexpr int element_bytes = 2;  // of tensor maps

struct Call {
    const char* name;
    int batch, keys, heads, head_bytes;
};
struct Pattern {
    int rows, per_sm, heads_together, panel, kb, evict_first, l2, dealt = 1;
};

__device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void wait(uint64_t* barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::
            "r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row, uint64_t policy) {
    if (policy != 0) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(row), "l"(policy)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
            "l"(map), "r"(barrier), "r"(column), "r"(row)
            : "memory");
    }
}

// One thread of each CTA loads the CTA's blocks, keys and values in turn, and waits for them in order.
__global__ void read_blocks(const __grid_constant__ CUtensorMap key, const __grid_constant__ CUtensorMap value,
                            Call call, Pattern pattern, int stages) {
    extern __shared__ char unaligned[];
    __shared__ uint64_t full[most_stages];
    const uint32_t first_stage = (shared_address(unaligned) + 1023) / 1024 * 1024;
    for (int i = 0; i < stages; ++i) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&full[i])));
    asm volatile("fence.proxy.async;" ::: "memory");
    uint64_t policy = 0;
    if (pattern.evict_first) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

    const int blocks = call.keys / pattern.rows, together = pattern.heads_together ? call.heads : 1;
    const int total = call.batch * (call.heads / together) * blocks;
    const int dealt = pattern.dealt, members = together * dealt, column = blockIdx.x % members / together;
    const int shares = gridDim.x / members, own = blockIdx.x / members;
    if (own >= shares) return;
    const int share = (total + shares - 1) / shares;
    const int begin = min(own * share, total) + column, end = min(own * share + share, total);
    const int count = 2 * max((end - begin + dealt - 1) / dealt, 0);
    const int box_bytes = pattern.rows * call.head_bytes;
    int block = begin % blocks, head = together > 1 ? blockIdx.x % together : begin / blocks % call.heads;
    int row = begin / blocks / (call.heads / together) * call.keys + block * pattern.rows;
    int stage_to_load = 0, stage_to_wait = 0, parity = 0;

    auto load = [&](bool is_value) {
        const uint32_t to = first_stage + stage_to_load * box_bytes, barrier = shared_address(&full[stage_to_load]);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(box_bytes) : "memory");
        for (int byte = 0; byte < call.head_bytes; byte += pattern.panel) {
            const int column = (head * call.head_bytes + byte) / element_bytes;
            load_box(to + byte * pattern.rows, is_value ? &value : &key, barrier, column, row, policy);
        }
        if (++stage_to_load == stages) stage_to_load = 0;
        if (!is_value) return;
        row += dealt * pattern.rows;
        if (together == call.heads || ++block < blocks) return;
        block = 0;
        if (++head < call.heads)
            row -= call.keys;
        else
            head = 0;
    };
    const int ahead = min(count, stages);
    for (int i = 0; i < ahead; ++i) load(i % 2);
    for (int i = 0; i < count; ++i) {
        wait(&full[stage_to_wait], parity);
        if (++stage_to_wait == stages) stage_to_wait = 0, parity ^= 1;
        if (i + ahead < count) load((i + ahead) % 2);
    }
}

__global__ void read_vectors(const uint4* from, size_t count, uint4* never) {
    constexpr int at_once = 8;
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    uint4 sum{};
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i + 7 * stride < count;
         i += 8 * stride) {
        uint4 x[at_once];
#pragma unroll
        for (int j = 0; j < at_once; ++j) x[j] = __ldcs(from + i + j * stride);
#pragma unroll
        for (int j = 0; j < at_once; ++j) sum.x ^= x[j].x, sum.y ^= x[j].y, sum.z ^= x[j].z, sum.w ^= x[j].w;
    }
    if (sum.x == 1 && sum.y == 2 && sum.z == 3) *never = sum;  // so that the loads stay
}

__global__ void copy_vectors(const uint4* from, uint4* to, size_t count) {
    const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) to[i] = from[i];
}

template <class Launch>
double microseconds(Launch launch) {
    constexpr int launches = 8, rounds = 7;
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    float times[rounds];
    for (float& time : times) {
        CHECK(cudaEventRecord(start));
        for (int i = 0; i < launches; ++i) launch();
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&time, start, end));
    }
    CHECK(cudaGetLastError());
    std::sort(times, times + rounds);
    return times[rounds / 2] / launches * 1e3;
}

void print_rate(double bytes, double us) { std::printf("\"us\": %.1f, \"tb_s\": %.3f}", us, bytes / us / 1e6); }

CUtensorMap tensor_map(const Call& call, const Pattern& pattern, void* array) {
    static void* encode = [] {
        void* found;
        cudaDriverEntryPointQueryResult result;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
        return found;
    }();
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(call.heads) * call.head_bytes;
    const cuuint64_t sizes[2] = {row_bytes / element_bytes, static_cast<cuuint64_t>(call.batch) * call.keys};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(pattern.panel / element_bytes),
                               static_cast<cuuint32_t>(pattern.rows)};
    const cuuint32_t unit[2] = {1, 1};
    const auto promotion = pattern.l2 == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                           : pattern.l2 == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                           : pattern.l2 == 64  ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B
                                               : CU_TENSOR_MAP_L2_PROMOTION_NONE;
    CUtensorMap map;
    CHECK(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, array, sizes, &row_bytes, box, unit, CU_TENSOR_MAP_INTERLEAVE_NONE,
        pattern.panel == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE, promotion,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    return map;
}

void measure(const Call& call, const Pattern& pattern, void* key, void* value, int sm_count) {
    const int box_bytes = pattern.rows * call.head_bytes;
    const int stages = std::min(most_stages, pattern.kb / pattern.per_sm * 1024 / box_bytes);
    const CUtensorMap key_map = tensor_map(call, pattern, key), value_map = tensor_map(call, pattern, value);
    const double us = microseconds([&] {
        read_blocks<<<sm_count * pattern.per_sm, 1, stages * box_bytes + 1024>>>(key_map, value_map, call, pattern,
                                                                                 stages);
    });
    std::printf(
        ",\n{\"case\": \"%s\", \"rows\": %d, \"per_sm\": %d, \"heads_together\": %d, \"panel\": %d, \"kb\": %d, "
        "\"evict_first\": %d, \"l2\": %d, \"dealt\": %d, ",
        call.name, pattern.rows, pattern.per_sm, pattern.heads_together, pattern.panel, pattern.kb, pattern.evict_first,
        pattern.l2, pattern.dealt);
    print_rate(2.0 * call.batch * call.keys * call.heads * call.head_bytes, us);
}

int main(int, char** arguments) {
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    int driver, runtime;
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S+00:00", std::gmtime(&now));
    std::printf(
        "{\"commit\": \"%s\", \"device\": \"%s\", \"date\": \"%s\", \"versions\": {\"driver\": %d, \"cuda\": %d}, "
        "\"rows\": [\n",
        arguments[1] ? arguments[1] : "", device.name, date, driver, runtime);

    const size_t bytes_of_each = size_t{1} << 30;
    void *key, *value;
    for (void** array : {&key, &value}) {
        CHECK(cudaMalloc(array, bytes_of_each));
        CHECK(cudaMemset(*array, 1, bytes_of_each));
    }
    CHECK(cudaFuncSetAttribute(read_blocks, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 * 1024));
    const char* separator = "";
    for (size_t megabytes : {256, 1024}) {
        const size_t bytes = megabytes << 20, count = bytes / sizeof(uint4);
        auto* const from = static_cast<uint4*>(key);
        auto* const to = static_cast<uint4*>(value);
        for (int per_sm : {4, 8, 16}) {
            std::printf("%s{\"case\": \"read %zu MB, %d CTAs on a multiprocessor\", ", separator, megabytes, per_sm);
            print_rate(bytes, microseconds([&] {
                           read_vectors<<<device.multiProcessorCount * per_sm, 256>>>(from, count, to);
                       }));
            separator = ",\n";
        }
        std::printf(",\n{\"case\": \"copy %zu MB\", ", megabytes / 2);
        print_rate(bytes,
                   microseconds([&] { copy_vectors<<<device.multiProcessorCount * 16, 512>>>(from, to, count / 2); }));
    }
    const Call calls[] = {{"b16 s8192 h8 256B", 16, 8192, 8, 256},
                          {"b4 s32768 h32 256B", 4, 32768, 32, 256},
                          {"b16 s8192 h8 128B", 16, 8192, 8, 128}};
    for (const Call& call : calls) {
        for (int per_sm : {1, 2}) {
            for (int together : {0, 1}) {
                for (int kb : {200, 100}) {
                    for (int l2 : {0, 64, 128, 256})
                        measure(call, {64, per_sm, together, 128, kb, 0, l2}, key, value, device.multiProcessorCount);
                }
                for (int l2 : {128, 256}) {
                    measure(call, {64, per_sm, together, 128, 200, 1, l2}, key, value, device.multiProcessorCount);
                    if (per_sm == 1)
                        measure(call, {128, per_sm, together, 128, 200, 0, l2}, key, value, device.multiProcessorCount);
                    if (call.head_bytes == 256)
                        measure(call, {64, per_sm, together, 256, 200, 0, l2}, key, value, device.multiProcessorCount);
                }
            }
        }
    }
    const Call with_few_heads[] = {{"b16 s8192 h8 256B", 16, 8192, 8, 256}, {"b32 s8192 h4 256B", 32, 8192, 4, 256},
                                   {"b64 s8192 h2 256B", 64, 8192, 2, 256}, {"b128 s8192 h1 256B", 128, 8192, 1, 256},
                                   {"b16 s8192 h2 256B", 16, 8192, 2, 256}, {"b4 s8192 h8 256B", 4, 8192, 8, 256}};
    for (const Call& call : with_few_heads) {
        for (int dealt : {1, 2, 4, 8}) {
            if (call.heads * dealt > 8) continue;
            for (int rows : {64, 128})
                measure(call, {rows, 2, 1, 128, 128, 0, 128, dealt}, key, value, device.multiProcessorCount);
        }
    }
    std::printf("\n]}\n");
}
