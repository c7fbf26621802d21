// The stages of every custom call of jax_flash, as XLA calls them.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_flash {

// Once for each call site of an executable: decodes the launch plan, its attribute, and compiles its kernels. XLA keeps
// the plan as the call's state, and frees it with the executable.
XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* call_frame);

// Before each run: in a context that the call has not run in, loads kernels and encodes tensor maps.
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* call_frame);

// Runs the plan on XLA's stream. Compatible with command buffers.
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* call_frame);

// The type of the call's state. XLA writes its number for it to `StateTypeId()` when it registers the type.
XLA_FFI_TypeId* StateTypeId();
const XLA_FFI_TypeInfo* StateTypeInfo();

}  // namespace jax_flash
