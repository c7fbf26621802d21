// The two stages of every custom call of jax_flash, as XLA calls them.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jax_flash {

// Resolves the call's plan and loads its kernels: all that may compile, load or allocate.
XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* call_frame);

// Runs the plan on XLA's stream. Compatible with command buffers.
XLA_FFI_Error* Execute(XLA_FFI_CallFrame* call_frame);

}  // namespace jax_flash
