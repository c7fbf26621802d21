#include "handlers.h"

#include <array>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "plan.h"
#include "resolve.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {
namespace {

namespace ffi = xla::ffi;

using Addresses = std::array<CUdeviceptr, kMaxBuffers>;  // operands first

// What a call site keeps from its instantiation to the end of its executable.
struct State {
    static ffi::TypeId id;

    std::shared_ptr<Plan> plan;
};
ffi::TypeId State::id = {};

ffi::Error ToError(const std::exception& error) {
    const bool invalid = dynamic_cast<const std::invalid_argument*>(&error) != nullptr;
    return ffi::Error(invalid ? ffi::ErrorCode::kInvalidArgument : ffi::ErrorCode::kInternal,
                      std::string("jax_flash: ") + error.what());
}

void Expect(std::size_t got, std::size_t want, const char* what) {
    if (got != want) {
        throw std::invalid_argument(std::string(what) + ": the call has " + std::to_string(got) +
                                    " and its launch plan " + std::to_string(want));
    }
}

// The buffers' addresses. That costs every run, so only their number is checked.
Addresses AddressesOf(const Plan& plan, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    Expect(operands.size(), plan.operand_bytes().size(), "number of operands");
    Expect(results.size(), plan.result_bytes().size(), "number of results");
    Addresses addresses;
    std::size_t next = 0;
    for (std::size_t i = 0; i < operands.size(); ++i) {
        addresses[next++] = reinterpret_cast<CUdeviceptr>(operands.get<ffi::AnyBuffer>(i)->untyped_data());
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
        addresses[next++] = reinterpret_cast<CUdeviceptr>((*results.get<ffi::AnyBuffer>(i))->untyped_data());
    }
    return addresses;
}

// The plan in the current context. The first time there, the buffers must have the sizes that the plan was made for; a
// call site's never change.
const PreparedPlan& PreparedIn(std::uint64_t context, Plan& plan, const Addresses& addresses,
                               ffi::RemainingArgs operands, ffi::RemainingRets results) {
    if (const PreparedPlan* found = plan.Find(context)) return *found;
    for (std::size_t i = 0; i < operands.size(); ++i) {
        Expect(operands.get<ffi::AnyBuffer>(i)->size_bytes(), plan.operand_bytes()[i],
               ("bytes of operand " + std::to_string(i)).c_str());
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
        Expect((*results.get<ffi::AnyBuffer>(i))->size_bytes(), plan.result_bytes()[i],
               ("bytes of result " + std::to_string(i)).c_str());
    }
    return plan.Prepare(context, addresses.data());
}

ffi::ErrorOr<std::unique_ptr<State>> InstantiateImpl(std::string_view text) {
    try {
        return std::make_unique<State>(State{Resolve(text)});
    } catch (const std::exception& error) {
        return ffi::Unexpected(ToError(error));
    }
}

ffi::Error InitializeImpl(State* state, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    try {
        const std::uint64_t context = CurrentContext();
        if (state->plan->Find(context) == nullptr) {
            const Addresses addresses = AddressesOf(*state->plan, operands, results);
            PreparedIn(context, *state->plan, addresses, operands, results);
        }
        return ffi::Error::Success();
    } catch (const std::exception& error) {
        return ToError(error);
    }
}

ffi::Error ExecuteImpl(CUstream stream, State* state, ffi::RemainingArgs operands, ffi::RemainingRets results) {
    try {
        const Addresses addresses = AddressesOf(*state->plan, operands, results);
        const PreparedPlan& prepared = PreparedIn(CurrentContext(), *state->plan, addresses, operands, results);
        state->plan->Run(prepared, addresses.data(), stream);
        return ffi::Error::Success();
    } catch (const std::exception& error) {
        return ToError(error);
    }
}

}  // namespace

XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* call_frame) {
    static auto* handler = ffi::Ffi::BindInstantiate()
                               .Attr<std::string_view>("plan")
                               .To(InstantiateImpl, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(call_frame);
}

XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* call_frame) {
    static auto* handler = ffi::Ffi::BindInitialize()
                               .Ctx<ffi::State<State>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .To(InitializeImpl, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(call_frame);
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* call_frame) {
    static auto* handler = ffi::Ffi::BindExecute()
                               .Ctx<ffi::PlatformStream<CUstream>>()
                               .Ctx<ffi::State<State>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .To(ExecuteImpl, {ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(call_frame);
}

XLA_FFI_TypeId* StateTypeId() { return &State::id; }

const XLA_FFI_TypeInfo* StateTypeInfo() {
    static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
    return &info;
}

}  // namespace jax_flash
