// The CUDA driver, opened when first used.
//
// Nothing links with libcuda, so the module imports on a machine without a GPU. Every function used
// exists since CUDA 12.0, the first with tensor maps and clusters.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

namespace jax_flash {

struct Driver {
    decltype(&::cuGetErrorName) get_error_name;
    decltype(&::cuGetErrorString) get_error_string;
    decltype(&::cuDriverGetVersion) driver_get_version;
    decltype(&::cuCtxGetId) ctx_get_id;
    decltype(&::cuCtxGetDevice) ctx_get_device;
    decltype(&::cuDeviceGetAttribute) device_get_attribute;
    decltype(&::cuDeviceGetName) device_get_name;
    decltype(&::cuModuleLoadData) module_load_data;
    decltype(&::cuModuleUnload) module_unload;
    decltype(&::cuModuleGetFunction) module_get_function;
    decltype(&::cuFuncSetAttribute) func_set_attribute;
    decltype(&::cuTensorMapEncodeTiled) tensor_map_encode_tiled;
    decltype(&::cuTensorMapReplaceAddress) tensor_map_replace_address;
    decltype(&::cuMemsetD8Async) memset_d8_async;
    decltype(&::cuLaunchKernelEx) launch_kernel_ex;
};

// The driver's functions. Throws std::runtime_error where there is no driver, or one older than
// CUDA 12.0; a later call tries again.
//
// The environment variable JAX_FLASH_LIBCUDA names another library than libcuda.so.1.
const Driver& GetDriver();

// Throws std::runtime_error naming the driver call, its error and `subject` unless `result` is success.
void Check(CUresult result, const char* call, const std::string& subject);

// The current context, by cuCtxGetId. Throws std::runtime_error where there is none.
std::uint64_t CurrentContext();

}  // namespace jax_flash
