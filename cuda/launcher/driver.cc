#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>

namespace jax_flash {
namespace {

template <typename Function>
void Find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
        throw std::runtime_error(std::string("the CUDA driver has no ") + name +
                                 "; jax_flash needs a driver for CUDA 12.0 or later");
    }
}

Driver OpenDriver() {
    const char* override = std::getenv("JAX_FLASH_LIBCUDA");
    const char* path = override != nullptr ? override : "libcuda.so.1";
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(std::string("there is no CUDA driver: ") + dlerror());
    }
    Driver driver;
// cuda.h renames some functions with a version suffix: expand the name before it becomes a string.
#define JAX_FLASH_STRING(name) #name
#define JAX_FLASH_FIND(name, member) Find(library, JAX_FLASH_STRING(name), driver.member)
    JAX_FLASH_FIND(cuGetErrorName, get_error_name);
    JAX_FLASH_FIND(cuGetErrorString, get_error_string);
    JAX_FLASH_FIND(cuDriverGetVersion, driver_get_version);
    JAX_FLASH_FIND(cuCtxGetId, ctx_get_id);
    JAX_FLASH_FIND(cuCtxGetDevice, ctx_get_device);
    JAX_FLASH_FIND(cuDeviceGetAttribute, device_get_attribute);
    JAX_FLASH_FIND(cuDeviceGetName, device_get_name);
    JAX_FLASH_FIND(cuModuleLoadData, module_load_data);
    JAX_FLASH_FIND(cuModuleUnload, module_unload);
    JAX_FLASH_FIND(cuModuleGetFunction, module_get_function);
    JAX_FLASH_FIND(cuFuncSetAttribute, func_set_attribute);
    JAX_FLASH_FIND(cuTensorMapEncodeTiled, tensor_map_encode_tiled);
    JAX_FLASH_FIND(cuTensorMapReplaceAddress, tensor_map_replace_address);
    JAX_FLASH_FIND(cuMemsetD8Async, memset_d8_async);
    JAX_FLASH_FIND(cuLaunchKernelEx, launch_kernel_ex);
#undef JAX_FLASH_FIND
#undef JAX_FLASH_STRING
    return driver;
}

}  // namespace

const Driver& GetDriver() {
    static const Driver driver = OpenDriver();
    return driver;
}

void Check(CUresult result, const char* call, const std::string& subject) {
    if (result == CUDA_SUCCESS) return;
    const char* name = nullptr;
    const char* text = nullptr;
    GetDriver().get_error_name(result, &name);
    GetDriver().get_error_string(result, &text);
    throw std::runtime_error(std::string(call) + " failed with " +
                             (name != nullptr ? name : std::to_string(result).c_str()) + " (" +
                             (text != nullptr ? text : "unknown to this driver") + "): " + subject);
}

std::uint64_t CurrentContext() {
    unsigned long long id = 0;
    const CUresult result = GetDriver().ctx_get_id(nullptr, &id);
    if (result != CUDA_SUCCESS) Check(result, "cuCtxGetId", "no CUDA context is current");
    return id;
}

}  // namespace jax_flash
