#include "handlers.h"

#include <pybind11/pybind11.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "plan.h"
#include "registry.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;
namespace py = pybind11;

// The plan that `text` means. A program loaded from jax.export or from the compilation cache was
// traced in another process, so its plans may be unknown to this one: then Python builds the plan,
// which compiles its kernels or finds them in the cache.
const Plan& Resolve(std::string_view text) {
    if (const Plan* plan = FindPlan(text)) return *plan;
    {
        py::gil_scoped_acquire gil;
        try {
            py::module_::import("jax_flash.cuda.call").attr("resolve")(py::str(text.data(), text.size()));
        } catch (py::error_already_set& error) {
            // Copy the message out while the GIL is held; the exception itself holds Python objects.
            throw std::runtime_error(error.what());
        }
    }
    const Plan* plan = FindPlan(text);
    if (plan == nullptr) throw std::runtime_error("resolve() registered no plan for this call");
    return *plan;
}

void Expect(const std::string& what, std::size_t got, std::size_t want) {
    if (got != want) {
        throw std::invalid_argument(what + ": the call has " + std::to_string(got) + " and its launch plan " +
                                    std::to_string(want));
    }
}

// The addresses of the call's buffers, which must have the sizes that `plan` was made for.
std::vector<CUdeviceptr> Addresses(const Plan& plan, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    const auto& operand_bytes = plan.operand_bytes();
    const auto& result_bytes = plan.result_bytes();
    Expect("number of operands", operands.size(), operand_bytes.size());
    Expect("number of results", results.size(), result_bytes.size());

    std::vector<CUdeviceptr> addresses;
    addresses.reserve(operands.size() + results.size());
    for (std::size_t i = 0; i < operands.size(); ++i) {
        const ffi::AnyBuffer buffer = operands.get<ffi::AnyBuffer>(i).value();
        Expect("bytes of operand " + std::to_string(i), buffer.size_bytes(), operand_bytes[i]);
        addresses.push_back(reinterpret_cast<CUdeviceptr>(buffer.untyped_data()));
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
        const ffi::AnyBuffer buffer = *results.get<ffi::AnyBuffer>(i).value();
        Expect("bytes of result " + std::to_string(i), buffer.size_bytes(), result_bytes[i]);
        addresses.push_back(reinterpret_cast<CUdeviceptr>(buffer.untyped_data()));
    }
    return addresses;
}

template <typename Function>
ffi::Error ReturnErrors(Function&& function) {
    try {
        function();
        return ffi::Error::Success();
    } catch (const std::invalid_argument& error) {
        return ffi::Error::InvalidArgument(std::string("jax_flash: ") + error.what());
    } catch (const std::exception& error) {
        return ffi::Error::Internal(std::string("jax_flash: ") + error.what());
    }
}

ffi::Error InitializeImpl(ffi::RemainingArgs, ffi::RemainingRets, std::string_view text) {
    return ReturnErrors([&] { Resolve(text).Load(); });
}

ffi::Error ExecuteImpl(CUstream stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                       std::string_view text) {
    return ReturnErrors([&] {
        const Plan& plan = Resolve(text);
        plan.Run(Addresses(plan, operands, results), stream);
    });
}

}  // namespace

XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* call_frame) {
    static auto* handler = ffi::Ffi::BindInitialize()
                               .RemainingArgs()
                               .RemainingRets()
                               .Attr<std::string_view>("plan")
                               .To(InitializeImpl, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(call_frame);
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* call_frame) {
    static auto* handler = ffi::Ffi::BindExecute()
                               .Ctx<ffi::PlatformStream<CUstream>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .Attr<std::string_view>("plan")
                               .To(ExecuteImpl, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(call_frame);
}

}  // namespace jax_flash
