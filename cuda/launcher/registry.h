// Plans by their text, as the attribute of a custom call carries it.
#pragma once

#include <memory>
#include <string_view>

#include "plan.h"

namespace jax_flash {

// Makes `text` mean `plan` from now on. The first plan given for a text stays.
void RegisterPlan(std::string_view text, std::shared_ptr<const Plan> plan);

// The plan that `text` means, or null. Valid for the life of the process.
const Plan* FindPlan(std::string_view text);

}  // namespace jax_flash
