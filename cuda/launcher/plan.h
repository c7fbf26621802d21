// A launch plan, ready to run: the C++ form of jax_flash.cuda.launch_plan.LaunchPlan.
//
// Buffers are numbered, operands first and results after them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "driver.h"

namespace jax_flash {

// One compiled entry point, loaded once in each context that it runs in. Shared by all plans that
// launch it; safe to use from many threads.
class Kernel {
  public:
    // `description` says in errors which kernel it was.
    Kernel(std::string cubin, std::string entry, std::string description);

    // The function in the context `context`, which must be current, allowed `shared_bytes` of dynamic
    // shared memory at least. Loads the module when this context has not seen it yet.
    CUfunction Load(std::uint64_t context, unsigned shared_bytes);

    const std::string& description() const { return description_; }

  private:
    struct Loaded {
        CUfunction function;
        unsigned shared_bytes;  // what the function is allowed so far
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

// Field of a kernel's parameter struct: a tensor map over a buffer. Axes are innermost first; `strides` are bytes and
// start with axis 1.
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

class Plan {
  public:
    // Throws std::invalid_argument where a step names a buffer that is not there.
    Plan(std::vector<std::size_t> operand_bytes, std::vector<std::size_t> result_bytes,
         std::vector<std::variant<Launch, Zero>> steps);

    const std::vector<std::size_t>& operand_bytes() const { return operand_bytes_; }
    const std::vector<std::size_t>& result_bytes() const { return result_bytes_; }

    // Loads every kernel in the current context, so that Run allocates and loads nothing on the device.
    void Load() const;

    // Runs the steps on `stream`, of the current context. `buffers` holds as many addresses as there
    // are operands and results. Throws std::runtime_error on a CUDA error.
    void Run(const std::vector<CUdeviceptr>& buffers, CUstream stream) const;

  private:
    void RunStep(const Launch& launch, std::uint64_t context, const std::vector<CUdeviceptr>& buffers,
                 CUstream stream) const;
    void RunStep(const Zero& zero, std::uint64_t context, const std::vector<CUdeviceptr>& buffers,
                 CUstream stream) const;
    std::size_t BytesOf(std::size_t buffer) const;

    const std::vector<std::size_t> operand_bytes_;
    const std::vector<std::size_t> result_bytes_;
    const std::vector<std::variant<Launch, Zero>> steps_;
};

}  // namespace jax_flash
