// From a call's attribute to its plan.
#pragma once

#include <memory>
#include <string_view>

#include "plan.h"

namespace jax_flash {

// The plan that `text` describes, built by Python, which compiles its kernels or finds them in the cache: the program
// may have been traced in another process.
//
// Throws std::invalid_argument where it is none that may run, std::runtime_error on any other error.
std::shared_ptr<Plan> Resolve(std::string_view text);

}  // namespace jax_flash
