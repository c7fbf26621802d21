// A CUDA driver that records what it is asked and runs nothing, for tests of the launcher.
//
// Each call appends one line of JSON to a log. A kernel's parameter struct carries no types through the
// driver API, so a test first says its fields, one letter each: p address, i int32, u uint32, l int64,
// f float32, m tensor map (its number and address).
#include <cuda.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace {

std::mutex mutex;
std::ostringstream calls;
std::string log_copy;
std::string layout;
std::string failing_call;
unsigned long long context = 1;
thread_local unsigned long long thread_context = 0;  // in place of `context`, unless 0
bool keeps_log = true;
int capability[2] = {9, 0};  // of the device of every context
unsigned long long count = 0;  // of modules, functions and tensor maps: their handles
std::map<CUfunction, std::string> functions;

CUresult Record(const std::string& call, const std::string& fields) {
    if (keeps_log) calls << "{\"call\": \"" << call << "\"" << (fields.empty() ? "" : ", ") << fields << "}\n";
    return call == failing_call ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

bool IsAligned(const CUtensorMap* map) { return reinterpret_cast<size_t>(map) % alignof(CUtensorMap) == 0; }

template <typename T>
std::string List(const T* values, unsigned size) {
    std::ostringstream text;
    for (unsigned i = 0; i < size; ++i) text << (i ? ", " : "[") << values[i];
    if (size == 0) text << "[";
    return text.str() + "]";
}

// The next field of a struct; moves `address` behind it.
template <typename T>
T Read(const char*& address) {
    address += -reinterpret_cast<size_t>(address) % alignof(T);
    const T value = *reinterpret_cast<const T*>(address);
    address += sizeof(T);
    return value;
}

}  // namespace

extern "C" {

void fake_reset(const char* parameter_layout, unsigned long long current_context, const char* call_that_fails) {
    std::lock_guard<std::mutex> lock(mutex);
    calls.str("");
    layout = parameter_layout;
    context = current_context;
    failing_call = call_that_fails;
}

// From here on: the context of this thread alone; and nothing is logged, as many threads would fill the memory.
void fake_thread_context(unsigned long long id) {
    std::lock_guard<std::mutex> lock(mutex);
    thread_context = id;
    keeps_log = false;
}

void fake_device(int major, int minor) {
    std::lock_guard<std::mutex> lock(mutex);
    capability[0] = major, capability[1] = minor;
}

const char* fake_log() {
    std::lock_guard<std::mutex> lock(mutex);
    log_copy = calls.str();
    return log_copy.c_str();
}

CUresult cuGetErrorName(CUresult, const char** text) {
    *text = "CUDA_ERROR_INVALID_VALUE";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "invalid argument";
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    *version = 12080;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext, unsigned long long* id) {
    std::lock_guard<std::mutex> lock(mutex);
    *id = thread_context ? thread_context : context;
    return failing_call == "cuCtxGetId" ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    std::lock_guard<std::mutex> lock(mutex);
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = capability[0];
    if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = capability[1];
    return failing_call == "cuDeviceGetAttribute" ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    std::snprintf(name, length, "Fake GPU");
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    std::lock_guard<std::mutex> lock(mutex);
    *module = reinterpret_cast<CUmodule>(++count);
    return Record("cuModuleLoadData", "\"image\": \"" + std::string(static_cast<const char*>(image), 4) + "\"");
}

CUresult cuModuleUnload(CUmodule) {
    std::lock_guard<std::mutex> lock(mutex);
    return Record("cuModuleUnload", "");
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    std::lock_guard<std::mutex> lock(mutex);
    *function = reinterpret_cast<CUfunction>(++count);
    functions[*function] = name;
    return Record("cuModuleGetFunction", "\"name\": \"" + std::string(name) + "\"");
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
    std::lock_guard<std::mutex> lock(mutex);
    return Record("cuFuncSetAttribute",
                  "\"attribute\": " + std::to_string(attribute) + ", \"value\": " + std::to_string(value));
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill) {
    std::lock_guard<std::mutex> lock(mutex);
    *map = CUtensorMap{};
    map->opaque[0] = ++count;
    map->opaque[1] = reinterpret_cast<size_t>(address);
    std::ostringstream fields;
    fields << "\"id\": " << count << ", \"aligned\": " << IsAligned(map) << ", \"type\": " << type
           << ", \"address\": " << reinterpret_cast<size_t>(address)
           << ", \"sizes\": " << List(sizes, rank) << ", \"strides\": " << List(strides, rank - 1)
           << ", \"box\": " << List(box, rank) << ", \"element_strides\": " << List(element_strides, rank)
           << ", \"swizzle\": " << swizzle << ", \"l2_promotion\": " << l2_promotion;
    return Record("cuTensorMapEncodeTiled", fields.str());
}

CUresult cuTensorMapReplaceAddress(CUtensorMap* map, void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    map->opaque[1] = reinterpret_cast<size_t>(address);
    std::ostringstream fields;
    fields << "\"id\": " << map->opaque[0] << ", \"aligned\": " << IsAligned(map)
           << ", \"address\": " << reinterpret_cast<size_t>(address);
    return Record("cuTensorMapReplaceAddress", fields.str());
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream) {
    std::lock_guard<std::mutex> lock(mutex);
    std::ostringstream fields;
    fields << "\"address\": " << address << ", \"value\": " << int(value) << ", \"bytes\": " << size
           << ", \"stream\": " << reinterpret_cast<size_t>(stream);
    return Record("cuMemsetD8Async", fields.str());
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
    std::lock_guard<std::mutex> lock(mutex);
    if (extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
    const unsigned grid[] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    const unsigned block[] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    std::ostringstream fields;
    fields << "\"name\": \"" << functions[function] << "\", \"grid\": " << List(grid, 3)
           << ", \"block\": " << List(block, 3) << ", \"shared_bytes\": " << config->sharedMemBytes
           << ", \"stream\": " << reinterpret_cast<size_t>(config->hStream);
    for (unsigned i = 0; i < config->numAttrs; ++i) {
        const CUlaunchAttribute& attribute = config->attrs[i];
        if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            fields << ", \"cluster\": " << List(&attribute.value.clusterDim.x, 3);
        } else if (attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
            fields << ", \"overlap\": " << attribute.value.programmaticStreamSerializationAllowed;
        }
    }
    fields << ", \"parameters\": [";
    const char* field = static_cast<const char*>(parameters[0]);
    for (size_t i = 0; i < layout.size(); ++i) {
        fields << (i ? ", " : "");
        switch (layout[i]) {
            case 'p':
                fields << Read<CUdeviceptr>(field);
                break;
            case 'i':
                fields << Read<int>(field);
                break;
            case 'u':
                fields << Read<unsigned>(field);
                break;
            case 'l':
                fields << Read<long long>(field);
                break;
            case 'f':
                fields << Read<float>(field);
                break;
            case 'm': {
                const CUtensorMap map = Read<CUtensorMap>(field);
                fields << "[" << map.opaque[0] << ", " << map.opaque[1] << "]";
                break;
            }
        }
    }
    fields << "]";
    return Record("cuLaunchKernelEx", fields.str());
}

}  // extern "C"
