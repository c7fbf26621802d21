#include "registry.h"

#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace jax_flash {
namespace {

struct Entry {
    std::unique_ptr<const std::string> text;  // what the key points at
    std::shared_ptr<const Plan> plan;
};

struct Registry {
    std::shared_mutex mutex;
    std::unordered_map<std::string_view, Entry> entries;
};

// Never destroyed: XLA's threads may still run while the process ends.
Registry& GetRegistry() {
    static Registry& registry = *new Registry;
    return registry;
}

}  // namespace

void RegisterPlan(std::string_view text, std::shared_ptr<const Plan> plan) {
    Registry& registry = GetRegistry();
    auto owned = std::make_unique<const std::string>(text);
    const std::string_view key = *owned;
    std::unique_lock<std::shared_mutex> lock(registry.mutex);
    registry.entries.try_emplace(key, Entry{std::move(owned), std::move(plan)});
}

const Plan* FindPlan(std::string_view text) {
    Registry& registry = GetRegistry();
    std::shared_lock<std::shared_mutex> lock(registry.mutex);
    const auto found = registry.entries.find(text);
    return found == registry.entries.end() ? nullptr : found->second.plan.get();
}

}  // namespace jax_flash
