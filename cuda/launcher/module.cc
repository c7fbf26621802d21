// The Python module jax_flash.cuda._launcher.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "handlers.h"
#include "plan.h"

namespace jax_flash {
namespace {

namespace py = pybind11;

CUtensorMapDataType ElementType(const std::string& dtype) {
    if (dtype == "bfloat16") return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    if (dtype == "float16") return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    if (dtype == "float32") return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    if (dtype == "int32") return CU_TENSOR_MAP_DATA_TYPE_INT32;
    if (dtype == "uint8" || dtype == "float8_e4m3fn") return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    throw std::invalid_argument("dtype is \"" + dtype + "\"; it may be bfloat16, float16, float32, int32 or uint8");
}

CUtensorMapSwizzle Swizzle(int bytes) {
    switch (bytes) {
        case 0:
            return CU_TENSOR_MAP_SWIZZLE_NONE;
        case 32:
            return CU_TENSOR_MAP_SWIZZLE_32B;
        case 64:
            return CU_TENSOR_MAP_SWIZZLE_64B;
        case 128:
            return CU_TENSOR_MAP_SWIZZLE_128B;
    }
    throw std::invalid_argument("swizzle is " + std::to_string(bytes) + "; it may be 0, 32, 64 or 128");
}

TensorMap MakeTensorMap(std::size_t offset, std::size_t buffer, const std::string& dtype, std::vector<cuuint64_t> sizes,
                        std::vector<cuuint64_t> strides, std::vector<cuuint32_t> box, int swizzle) {
    // The driver reads as many strides and box sizes as there are axes.
    if (sizes.empty() || sizes.size() > 5 || strides.size() != sizes.size() - 1 || box.size() != sizes.size()) {
        throw std::invalid_argument(
            "a tensor map has 1 to 5 sizes, one stride fewer, and as many box "
            "sizes; got " +
            std::to_string(sizes.size()) + ", " + std::to_string(strides.size()) + " and " +
            std::to_string(box.size()));
    }
    return TensorMap{offset,          buffer, ElementType(dtype), std::move(sizes), std::move(strides), std::move(box),
                     Swizzle(swizzle)};
}

Launch MakeLaunch(std::shared_ptr<Kernel> kernel, std::array<unsigned, 3> grid, unsigned block, unsigned shared_bytes,
                  unsigned cluster, bool overlap_previous, const py::bytes& parameters,
                  std::vector<Pointer> pointers, std::vector<TensorMap> tensor_maps) {
    return Launch{std::move(kernel), {grid[0], grid[1], grid[2]}, block, shared_bytes, cluster,
                  overlap_previous,  std::string(parameters), std::move(pointers), std::move(tensor_maps)};
}

// A handler as jax.ffi.register_ffi_target takes it.
py::capsule HandlerCapsule(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    return py::capsule(reinterpret_cast<void*>(handler));
}

PYBIND11_MODULE(_launcher, m) {
    m.doc() = "Runs launch plans on XLA's stream through the CUDA driver.";

    py::class_<Kernel, std::shared_ptr<Kernel>>(m, "Kernel")
        .def(py::init([](const py::bytes& cubin, std::string entry, std::string description) {
                 return std::make_shared<Kernel>(std::string(cubin), std::move(entry), std::move(description));
             }),
             py::arg("cubin"), py::arg("entry"), py::arg("description"));

    py::class_<Pointer>(m, "Pointer")
        .def(py::init([](std::size_t offset, std::size_t buffer) { return Pointer{offset, buffer}; }),
             py::arg("offset"), py::arg("buffer"));
    py::class_<TensorMap>(m, "TensorMap")
        .def(py::init(&MakeTensorMap), py::arg("offset"), py::arg("buffer"), py::arg("dtype"), py::arg("sizes"),
             py::arg("strides"), py::arg("box"), py::arg("swizzle"));

    py::class_<Launch>(m, "Launch")
        .def(py::init(&MakeLaunch), py::arg("kernel"), py::arg("grid"), py::arg("block"), py::arg("shared_bytes"),
             py::arg("cluster"), py::arg("overlap_previous"), py::arg("parameters"), py::arg("pointers"),
             py::arg("tensor_maps"));
    py::class_<Zero>(m, "Zero").def(py::init([](std::size_t buffer) { return Zero{buffer}; }), py::arg("buffer"));

    py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
        .def(py::init<ComputeCapability, std::vector<std::size_t>, std::vector<std::size_t>,
                      std::vector<std::variant<Launch, Zero>>>(),
             py::arg("compute_capability"), py::arg("operand_bytes"), py::arg("result_bytes"), py::arg("steps"))
        .def_static("alive", &Plan::alive, "How many plans this process holds: those of executables, and Python's.");

    m.def(
        "handlers",
        [] {
            py::dict stages;
            stages["instantiate"] = HandlerCapsule(&Instantiate);
            stages["initialize"] = HandlerCapsule(&Initialize);
            stages["execute"] = HandlerCapsule(&Execute);
            return stages;
        },
        "The stages of every custom call, for jax.ffi.register_ffi_target.");
    m.def(
        "state_type",
        [] {
            py::dict type;
            type["type_id"] = py::capsule(static_cast<void*>(StateTypeId()));
            type["type_info"] = py::capsule(const_cast<XLA_FFI_TypeInfo*>(StateTypeInfo()));
            return type;
        },
        "The type of what a custom call keeps from stage to stage, for jax.ffi.register_ffi_type.");
    m.def(
        "driver_version",
        [] {
            int version = 0;
            Check(GetDriver().driver_get_version(&version), "cuDriverGetVersion", "asking for the version");
            return std::make_pair(version / 1000, version % 1000 / 10);
        },
        "The newest CUDA (major, minor) that the driver supports; RuntimeError where there is none.");
}

}  // namespace
}  // namespace jax_flash
