#include "plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace jax_flash {
namespace {

constexpr std::size_t kMaxParameterBytes = 4096;  // of a kernel, in every supported driver

std::uint64_t CurrentContext() {
    unsigned long long id = 0;
    Check(GetDriver().ctx_get_id(nullptr, &id), "cuCtxGetId", "no CUDA context is current");
    return id;
}

CUtensorMap Encode(const TensorMap& map, CUdeviceptr address, const std::string& subject) {
    static constexpr cuuint32_t kUnitStrides[5] = {1, 1, 1, 1, 1};
    CUtensorMap encoded;
    Check(GetDriver().tensor_map_encode_tiled(&encoded, map.dtype, static_cast<cuuint32_t>(map.sizes.size()),
                                              reinterpret_cast<void*>(address), map.sizes.data(), map.strides.data(),
                                              map.box.data(), kUnitStrides, CU_TENSOR_MAP_INTERLEAVE_NONE, map.swizzle,
                                              CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
          "cuTensorMapEncodeTiled", subject);
    return encoded;
}

}  // namespace

Kernel::Kernel(std::string cubin, std::string entry, std::string description)
    : cubin_(std::move(cubin)), entry_(std::move(entry)), description_(std::move(description)) {}

CUfunction Kernel::Load(std::uint64_t context, unsigned shared_bytes) {
    const Driver& driver = GetDriver();
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = loaded_.find(context);
    if (found == loaded_.end()) {
        CUmodule module;
        Check(driver.module_load_data(&module, cubin_.data()), "cuModuleLoadData", description_);
        CUfunction function;
        const CUresult result = driver.module_get_function(&function, module, entry_.c_str());
        if (result != CUDA_SUCCESS) driver.module_unload(module);
        Check(result, "cuModuleGetFunction", description_);
        found = loaded_.emplace(context, Loaded{function, 0}).first;
    }
    Loaded& loaded = found->second;
    if (shared_bytes > loaded.shared_bytes) {
        Check(driver.func_set_attribute(loaded.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        static_cast<int>(shared_bytes)),
              "cuFuncSetAttribute",
              description_ + ", " + std::to_string(shared_bytes) + " bytes of dynamic shared memory");
        loaded.shared_bytes = shared_bytes;
    }
    return loaded.function;
}

Plan::Plan(std::vector<std::size_t> operand_bytes, std::vector<std::size_t> result_bytes,
           std::vector<std::variant<Launch, Zero>> steps)
    : operand_bytes_(std::move(operand_bytes)), result_bytes_(std::move(result_bytes)), steps_(std::move(steps)) {
    const std::size_t count = operand_bytes_.size() + result_bytes_.size();
    auto expect_buffer = [count](std::size_t buffer) {
        if (buffer >= count) {
            throw std::invalid_argument("buffer " + std::to_string(buffer) + " of " + std::to_string(count));
        }
    };
    for (const auto& step : steps_) {
        if (const Zero* zero = std::get_if<Zero>(&step)) {
            expect_buffer(zero->buffer);
            continue;
        }
        const Launch& launch = std::get<Launch>(step);
        const std::size_t bytes = launch.parameters.size();
        auto expect_field = [bytes](std::size_t offset, std::size_t size) {
            if (offset % std::min<std::size_t>(size, alignof(CUtensorMap)) != 0 || offset > bytes ||
                size > bytes - offset) {
                throw std::invalid_argument("a field of " + std::to_string(size) + " bytes at " +
                                            std::to_string(offset) + " of " + std::to_string(bytes));
            }
        };
        if (bytes > kMaxParameterBytes) {
            throw std::invalid_argument("parameters are " + std::to_string(bytes) + " bytes; they may be up to " +
                                        std::to_string(kMaxParameterBytes));
        }
        for (const Pointer& pointer : launch.pointers) {
            expect_buffer(pointer.buffer);
            expect_field(pointer.offset, sizeof(CUdeviceptr));
        }
        for (const TensorMap& map : launch.tensor_maps) {
            expect_buffer(map.buffer);
            expect_field(map.offset, sizeof(CUtensorMap));
        }
    }
}

std::size_t Plan::BytesOf(std::size_t buffer) const {
    const std::size_t operands = operand_bytes_.size();
    return buffer < operands ? operand_bytes_[buffer] : result_bytes_[buffer - operands];
}

void Plan::Load() const {
    const std::uint64_t context = CurrentContext();
    for (const auto& step : steps_) {
        if (const Launch* launch = std::get_if<Launch>(&step)) {
            launch->kernel->Load(context, launch->shared_bytes);
        }
    }
}

void Plan::Run(const std::vector<CUdeviceptr>& buffers, CUstream stream) const {
    const std::uint64_t context = CurrentContext();
    for (const auto& step : steps_) {
        std::visit([&](const auto& s) { RunStep(s, context, buffers, stream); }, step);
    }
}

void Plan::RunStep(const Zero& zero, std::uint64_t, const std::vector<CUdeviceptr>& buffers, CUstream stream) const {
    const std::size_t bytes = BytesOf(zero.buffer);
    Check(GetDriver().memset_d8_async(buffers[zero.buffer], 0, bytes, stream), "cuMemsetD8Async",
          "zeroing buffer " + std::to_string(zero.buffer));
}

void Plan::RunStep(const Launch& launch, std::uint64_t context, const std::vector<CUdeviceptr>& buffers,
                   CUstream stream) const {
    const std::string& subject = launch.kernel->description();
    alignas(CUtensorMap) unsigned char parameters[kMaxParameterBytes];
    std::memcpy(parameters, launch.parameters.data(), launch.parameters.size());
    for (const Pointer& pointer : launch.pointers) {
        std::memcpy(parameters + pointer.offset, &buffers[pointer.buffer], sizeof(CUdeviceptr));
    }
    for (const TensorMap& map : launch.tensor_maps) {
        const CUtensorMap encoded = Encode(map, buffers[map.buffer], subject);
        std::memcpy(parameters + map.offset, &encoded, sizeof encoded);
    }
    void* addresses[] = {parameters};

    CUlaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (launch.cluster > 1) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim.x = launch.cluster;
        attributes[count].value.clusterDim.y = 1;
        attributes[count].value.clusterDim.z = 1;
        ++count;
    }
    if (launch.overlap_previous) {
        attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        ++count;
    }

    CUlaunchConfig config = {};
    config.gridDimX = launch.grid[0];
    config.gridDimY = launch.grid[1];
    config.gridDimZ = launch.grid[2];
    config.blockDimX = launch.block;
    config.blockDimY = 1;
    config.blockDimZ = 1;
    config.sharedMemBytes = launch.shared_bytes;
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    Check(GetDriver().launch_kernel_ex(&config, launch.kernel->Load(context, launch.shared_bytes), addresses, nullptr),
          "cuLaunchKernelEx", subject);
}

}  // namespace jax_flash
