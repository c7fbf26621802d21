// The launcher under many threads, and with plans that are wrong: what sanitizers watch
// (tests/cuda/test_launcher_sanitized.py). Linked with the launcher, fake_xla.cc and fake_libcuda.cc, and no Python.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "handlers.h"
#include "plan.h"
#include "resolve.h"

extern "C" {
const char* call_handler(void* handler, int stage, std::uint64_t stream, const char* plan, void** state, int operands,
                         int results, const std::uint64_t* addresses, const std::int64_t* bytes);
void register_type(void* type_id);
void delete_state(void* type_info, void* state);
void fake_thread_context(unsigned long long id);
}

namespace jax_flash {
namespace {

constexpr std::size_t kOperandBytes = 512, kResultBytes = 256;

std::shared_ptr<Kernel> SharedKernel() {
    static auto& kernel = *new std::shared_ptr<Kernel>(std::make_shared<Kernel>("CUBIN", "forward", "some kernel"));
    return kernel;
}

Launch MakeLaunch() {
    const TensorMap map{128, 1, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, {64}, {}, {64}, CU_TENSOR_MAP_SWIZZLE_NONE};
    return Launch{SharedKernel(), {4, 3, 2}, 128, 1000, 2, true, std::string(320, '\0'), {{0, 0}, {8, 1}}, {map}};
}

void Fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

const std::uint64_t kAddresses[] = {0x1000, 0x2000};
const std::int64_t kBytes[] = {kOperandBytes, kResultBytes};

void Call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), int stage, const char* text, void** state) {
    const int buffers = stage == XLA_FFI_ExecutionStage_INSTANTIATE ? 0 : 1;
    const std::string error = call_handler(reinterpret_cast<void*>(handler), stage, 77, text, state, buffers, buffers,
                                           kAddresses, kBytes);
    if (!error.empty()) Fail(error);
}

// Threads run call sites in several contexts, as XLA does on several devices; others come and go meanwhile.
void StressCallSites() {
    constexpr int kThreads = 8, kRounds = 50, kContexts = 3;
    void* shared = nullptr;
    Call(&Instantiate, XLA_FFI_ExecutionStage_INSTANTIATE, "shared", &shared);
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&shared, thread] {
            fake_thread_context(1 + thread % kContexts);
            for (int round = 0; round < kRounds; ++round) {
                void* own = nullptr;
                Call(&Instantiate, XLA_FFI_ExecutionStage_INSTANTIATE, "own", &own);
                for (void** state : {&shared, &own}) {
                    Call(&Initialize, XLA_FFI_ExecutionStage_INITIALIZE, "", state);
                    Call(&Execute, XLA_FFI_ExecutionStage_EXECUTE, "", state);
                }
                delete_state(const_cast<XLA_FFI_TypeInfo*>(StateTypeInfo()), own);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    delete_state(const_cast<XLA_FFI_TypeInfo*>(StateTypeInfo()), shared);
    if (Plan::alive() != 0) Fail("plans outlive their call sites");
}

// Plans with numbers drawn at random are refused, or run within their memory.
void StressWrongPlans() {
    std::mt19937_64 random(7);
    const std::size_t some[] = {0, 1, 4, 8, 64, 120, 128, 192, 312, 319, 320, 4000, 4096, 5000, ~0ull, ~0ull - 7};
    auto draw = [&] { return some[random() % std::size(some)]; };
    fake_thread_context(1);
    int accepted = 0, refused = 0;
    for (int i = 0; i < 20000; ++i) {
        Launch launch = MakeLaunch();
        if (random() % 2) launch.parameters.resize(std::min<std::size_t>(draw(), 6000));
        if (random() % 2) launch.pointers[0] = {draw(), random() % 3};
        if (random() % 2) launch.tensor_maps[0].offset = draw();
        if (random() % 2) launch.tensor_maps[0].buffer = random() % 3;
        try {
            Plan plan({9, 0}, {kOperandBytes}, {kResultBytes}, {launch, Zero{random() % 3}});
            const CUdeviceptr addresses[] = {kAddresses[0], kAddresses[1]};
            plan.Run(plan.Prepare(1, addresses), addresses, nullptr);
            ++accepted;
        } catch (const std::invalid_argument&) {
            ++refused;
        }
    }
    if (accepted < 100 || refused < 100) Fail("the plans drawn are all alike");
}

}  // namespace

std::shared_ptr<Plan> Resolve(std::string_view) {
    return std::make_shared<Plan>(ComputeCapability{9, 0}, std::vector<std::size_t>{kOperandBytes},
                                  std::vector<std::size_t>{kResultBytes},
                                  std::vector<std::variant<Launch, Zero>>{MakeLaunch(), Zero{1}});
}

}  // namespace jax_flash

int main() {
    register_type(jax_flash::StateTypeId());
    jax_flash::StressCallSites();
    jax_flash::StressWrongPlans();
    std::puts("done");
}
