// A launch plan, decoded: the C++ form of jax_flash.cuda.launch_plan.LaunchPlan.
//
// Buffers are numbered, operands first and results after them.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "driver.h"

namespace jax_flash {

// Bytes of a kernel's parameter struct, at most, in every supported driver.
constexpr std::size_t kMaxParameterBytes = 4096;
// Operands and results of a call, at most. Their addresses lie on the stack during a run.
constexpr std::size_t kMaxBuffers = 64;
// The largest cluster that every device can launch. Larger ones, up to 16, have to be allowed for a kernel, and may not
// fit the device.
constexpr unsigned kPortableCluster = 8;

// One compiled entry point, loaded once in each context that it runs in. Shared by all plans that
// launch it; safe to use from many threads.
class Kernel {
  public:
    // `description` says in errors which kernel it was.
    Kernel(std::string cubin, std::string entry, std::string description);

    // The function in the context `context`, which must be current, allowed `shared_bytes` of dynamic
    // shared memory at least, and clusters of `cluster`. Loads the module when this context has not seen it
    // yet.
    CUfunction Load(std::uint64_t context, unsigned shared_bytes, unsigned cluster);

    const std::string& description() const { return description_; }

  private:
    struct Loaded {
        CUfunction function;
        unsigned shared_bytes;       // what the function is allowed so far
        bool allows_large_clusters;  // likewise
    };

    const std::string cubin_;
    const std::string entry_;
    const std::string description_;
    std::mutex mutex_;
    // By cuCtxGetId, which unlike the handle is never used again for another context. Modules are not
    // unloaded: they end with their context.
    std::unordered_map<std::uint64_t, Loaded> loaded_;
};

// Field of a kernel's parameter struct: the address of a buffer, `offset` bytes from the start.
struct Pointer {
    std::size_t offset;
    std::size_t buffer;
};

// Field of a kernel's parameter struct: a tensor map over a buffer. Axes are innermost first;
// `strides` are bytes and start with axis 1.
struct TensorMap {
    std::size_t offset;
    std::size_t buffer;
    CUtensorMapDataType dtype;
    std::vector<cuuint64_t> sizes;
    std::vector<cuuint64_t> strides;
    std::vector<cuuint32_t> box;
    CUtensorMapSwizzle swizzle;
};

struct Launch {
    std::shared_ptr<Kernel> kernel;
    unsigned grid[3];
    unsigned block;
    unsigned shared_bytes;
    unsigned cluster;
    bool overlap_previous;
    std::string parameters;  // the struct's bytes, but for those of these fields:
    std::vector<Pointer> pointers;
    std::vector<TensorMap> tensor_maps;
};

// Fills a buffer with zero bytes.
struct Zero {
    std::size_t buffer;
};

// A launch prepared for one context: everything that need not be done in each run.
struct PreparedLaunch {
    CUfunction function;
    CUlaunchConfig config;  // but for its stream and attributes
    CUlaunchAttribute attributes[2];
    // The parameter struct, with tensor maps over buffers of an earlier run, and no other addresses.
    std::vector<CUtensorMap> parameters;  // by its type, for its alignment
};

// A plan in one context. Immutable once it is published.
struct PreparedPlan {
    std::uint64_t context;                 // by cuCtxGetId
    std::vector<PreparedLaunch> launches;  // of the plan's steps, in order; empty ones for those that launch nothing
    const PreparedPlan* next;              // of another context
};

using ComputeCapability = std::pair<int, int>;

// Safe to use from many threads. Only `Prepare` allocates, loads or locks.
class Plan {
  public:
    // `planned_for` is the compute capability of the devices that may run the plan.
    //
    // Throws std::invalid_argument where a step names a buffer or a field that is not there.
    Plan(ComputeCapability planned_for, std::vector<std::size_t> operand_bytes, std::vector<std::size_t> result_bytes,
         std::vector<std::variant<Launch, Zero>> steps);
    ~Plan();
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    const std::vector<std::size_t>& operand_bytes() const { return operand_bytes_; }
    const std::vector<std::size_t>& result_bytes() const { return result_bytes_; }

    // The plan in `context`, or null where it has not been prepared there.
    const PreparedPlan* Find(std::uint64_t context) const {
        const PreparedPlan* found = prepared_.load(std::memory_order_acquire);
        while (found != nullptr && found->context != context) found = found->next;
        return found;
    }

    // The same, prepared now: kernels loaded and tensor maps encoded over `buffers`, as many addresses as
    // there are operands and results. `context` is current.
    //
    // Throws std::runtime_error on a CUDA error, std::invalid_argument on a device of another compute capability.
    const PreparedPlan& Prepare(std::uint64_t context, const CUdeviceptr* buffers);

    // Runs the steps on `stream`, of the context that `prepared` is for. Throws std::runtime_error on a CUDA error.
    void Run(const PreparedPlan& prepared, const CUdeviceptr* buffers, CUstream stream) const;

    // Plans of this process that are not freed yet.
    static int alive() { return alive_.load(); }

  private:
    void CheckDevice() const;
    PreparedLaunch PrepareLaunch(const Launch& launch, std::uint64_t context, const CUdeviceptr* buffers) const;
    std::size_t BytesOf(std::size_t buffer) const;

    static std::atomic<int> alive_;

    const ComputeCapability planned_for_;
    const std::vector<std::size_t> operand_bytes_;
    const std::vector<std::size_t> result_bytes_;
    const std::vector<std::variant<Launch, Zero>> steps_;
    std::atomic<const PreparedPlan*> prepared_{nullptr};  // the first of a list that only grows
    std::mutex preparing_;
};

}  // namespace jax_flash
