#include "plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace jax_flash {
namespace {

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

// Throws unless `size` bytes at `offset` lie in a struct of `bytes`, aligned.
void ExpectField(std::size_t offset, std::size_t size, std::size_t bytes) {
    if (offset % std::min(size, alignof(CUtensorMap)) != 0 || offset > bytes || size > bytes - offset) {
        throw std::invalid_argument("a field of " + std::to_string(size) + " bytes at " + std::to_string(offset) +
                                    " of " + std::to_string(bytes));
    }
}

void ExpectParameters(const Launch& launch, std::size_t buffers) {
    const std::size_t bytes = launch.parameters.size();
    if (bytes > kMaxParameterBytes) {
        throw std::invalid_argument("parameters are " + std::to_string(bytes) + " bytes; they may be up to " +
                                    std::to_string(kMaxParameterBytes));
    }
    auto expect = [&](const auto& field, std::size_t size) {
        if (field.buffer >= buffers) {
            throw std::invalid_argument("buffer " + std::to_string(field.buffer) + " of " + std::to_string(buffers));
        }
        ExpectField(field.offset, size, bytes);
    };
    for (const Pointer& pointer : launch.pointers) expect(pointer, sizeof(CUdeviceptr));
    for (const TensorMap& map : launch.tensor_maps) expect(map, sizeof(CUtensorMap));
}

void RunZero(std::size_t buffer, std::size_t bytes, CUdeviceptr address, CUstream stream) {
    const CUresult result = GetDriver().memset_d8_async(address, 0, bytes, stream);
    if (result != CUDA_SUCCESS) Check(result, "cuMemsetD8Async", "zeroing buffer " + std::to_string(buffer));
}

void RunLaunch(const Launch& launch, const PreparedLaunch& prepared, const CUdeviceptr* buffers, CUstream stream) {
    const Driver& driver = GetDriver();
    const std::string& subject = launch.kernel->description();
    alignas(CUtensorMap) unsigned char parameters[kMaxParameterBytes];
    std::memcpy(parameters, prepared.parameters.data(), launch.parameters.size());
    for (const Pointer& pointer : launch.pointers) {
        std::memcpy(parameters + pointer.offset, &buffers[pointer.buffer], sizeof(CUdeviceptr));
    }
    for (const TensorMap& map : launch.tensor_maps) {
        Check(driver.tensor_map_replace_address(reinterpret_cast<CUtensorMap*>(parameters + map.offset),
                                                reinterpret_cast<void*>(buffers[map.buffer])),
              "cuTensorMapReplaceAddress", subject);
    }
    CUlaunchConfig config = prepared.config;
    config.hStream = stream;
    config.attrs = const_cast<CUlaunchAttribute*>(prepared.attributes);
    void* addresses[] = {parameters};
    Check(driver.launch_kernel_ex(&config, prepared.function, addresses, nullptr), "cuLaunchKernelEx", subject);
}

}  // namespace

Kernel::Kernel(std::string cubin, std::string entry, std::string description)
    : cubin_(std::move(cubin)), entry_(std::move(entry)), description_(std::move(description)) {}

CUfunction Kernel::Load(std::uint64_t context, unsigned shared_bytes, unsigned cluster) {
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
        found = loaded_.emplace(context, Loaded{function, 0, false}).first;
    }
    Loaded& loaded = found->second;
    if (shared_bytes > loaded.shared_bytes) {
        Check(driver.func_set_attribute(loaded.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                        static_cast<int>(shared_bytes)),
              "cuFuncSetAttribute",
              description_ + ", " + std::to_string(shared_bytes) + " bytes of dynamic shared memory");
        // A multiprocessor divides its memory into L1 and shared memory, for all its CTAs alike. If kernels that need
        // shared memory prefer different divisions, the first CTAs of one can't start beside the last of another.
        if (loaded.shared_bytes == 0) {
            Check(driver.func_set_attribute(loaded.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                            CU_SHAREDMEM_CARVEOUT_MAX_SHARED),
                  "cuFuncSetAttribute", description_ + ", preference for shared memory");
        }
        loaded.shared_bytes = shared_bytes;
    }
    if (cluster > kPortableCluster && !loaded.allows_large_clusters) {
        Check(driver.func_set_attribute(loaded.function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
              "cuFuncSetAttribute", description_ + ", clusters of " + std::to_string(cluster));
        loaded.allows_large_clusters = true;
    }
    return loaded.function;
}

std::atomic<int> Plan::alive_{0};

Plan::Plan(ComputeCapability planned_for, std::vector<std::size_t> operand_bytes,
           std::vector<std::size_t> result_bytes, std::vector<std::variant<Launch, Zero>> steps)
    : planned_for_(planned_for),
      operand_bytes_(std::move(operand_bytes)),
      result_bytes_(std::move(result_bytes)),
      steps_(std::move(steps)) {
    const std::size_t count = operand_bytes_.size() + result_bytes_.size();
    if (count > kMaxBuffers) {
        throw std::invalid_argument("a plan has up to " + std::to_string(kMaxBuffers) + " buffers; got " +
                                    std::to_string(count));
    }
    for (const auto& step : steps_) {
        if (const Launch* launch = std::get_if<Launch>(&step)) {
            ExpectParameters(*launch, count);
        } else if (std::get<Zero>(step).buffer >= count) {
            throw std::invalid_argument("buffer " + std::to_string(std::get<Zero>(step).buffer) + " of " +
                                        std::to_string(count));
        }
    }
    ++alive_;
}

Plan::~Plan() {
    const PreparedPlan* prepared = prepared_.load();
    while (prepared != nullptr) delete std::exchange(prepared, prepared->next);
    --alive_;
}

std::size_t Plan::BytesOf(std::size_t buffer) const {
    const std::size_t operands = operand_bytes_.size();
    return buffer < operands ? operand_bytes_[buffer] : result_bytes_[buffer - operands];
}

void Plan::CheckDevice() const {
    const Driver& driver = GetDriver();
    CUdevice device;
    char name[128] = "";
    int major = 0, minor = 0;
    Check(driver.ctx_get_device(&device), "cuCtxGetDevice", "asking for the device of the call");
    Check(driver.device_get_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device),
          "cuDeviceGetAttribute", "asking for the compute capability");
    Check(driver.device_get_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device),
          "cuDeviceGetAttribute", "asking for the compute capability");
    if (ComputeCapability{major, minor} == planned_for_) return;
    Check(driver.device_get_name(name, sizeof name, device), "cuDeviceGetName", "asking for the device's name");
    throw std::invalid_argument("the program was traced for a device of compute capability " +
                                std::to_string(planned_for_.first) + "." + std::to_string(planned_for_.second) +
                                ", and this one, " + name + ", has " + std::to_string(major) + "." +
                                std::to_string(minor) + "; trace it again on this device");
}

PreparedLaunch Plan::PrepareLaunch(const Launch& launch, std::uint64_t context, const CUdeviceptr* buffers) const {
    PreparedLaunch prepared = {};
    prepared.function = launch.kernel->Load(context, launch.shared_bytes, launch.cluster);
    CUlaunchConfig& config = prepared.config;
    config.gridDimX = launch.grid[0];
    config.gridDimY = launch.grid[1];
    config.gridDimZ = launch.grid[2];
    config.blockDimX = launch.block;
    config.blockDimY = 1;
    config.blockDimZ = 1;
    config.sharedMemBytes = launch.shared_bytes;
    if (launch.cluster > 1) {
        CUlaunchAttribute& attribute = prepared.attributes[config.numAttrs++];
        attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attribute.value.clusterDim.x = launch.cluster;
        attribute.value.clusterDim.y = 1;
        attribute.value.clusterDim.z = 1;
    }
    if (launch.overlap_previous) {
        CUlaunchAttribute& attribute = prepared.attributes[config.numAttrs++];
        attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
    }

    const std::size_t bytes = launch.parameters.size();
    prepared.parameters.resize((bytes + sizeof(CUtensorMap) - 1) / sizeof(CUtensorMap));
    auto* parameters = reinterpret_cast<unsigned char*>(prepared.parameters.data());
    std::memcpy(parameters, launch.parameters.data(), bytes);
    for (const TensorMap& map : launch.tensor_maps) {
        const CUtensorMap encoded = Encode(map, buffers[map.buffer], launch.kernel->description());
        std::memcpy(parameters + map.offset, &encoded, sizeof encoded);
    }
    return prepared;
}

const PreparedPlan& Plan::Prepare(std::uint64_t context, const CUdeviceptr* buffers) {
    std::lock_guard<std::mutex> lock(preparing_);
    if (const PreparedPlan* found = Find(context)) return *found;
    CheckDevice();
    auto prepared = std::make_unique<PreparedPlan>();
    prepared->context = context;
    for (const auto& step : steps_) {
        const Launch* launch = std::get_if<Launch>(&step);
        prepared->launches.push_back(launch ? PrepareLaunch(*launch, context, buffers) : PreparedLaunch{});
    }
    prepared->next = prepared_.load(std::memory_order_relaxed);
    const PreparedPlan* published = prepared.release();
    prepared_.store(published, std::memory_order_release);
    return *published;
}

void Plan::Run(const PreparedPlan& prepared, const CUdeviceptr* buffers, CUstream stream) const {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
        if (const Launch* launch = std::get_if<Launch>(&steps_[i])) {
            RunLaunch(*launch, prepared.launches[i], buffers, stream);
        } else {
            const std::size_t buffer = std::get<Zero>(steps_[i]).buffer;
            RunZero(buffer, BytesOf(buffer), buffers[buffer], stream);
        }
    }
}

}  // namespace jax_flash
