// The table of engines: the first that accepts, runs.
#include "core/registry.h"

#include "cpu/reference.h"

namespace tea {
namespace {

constexpr Engine kEngines[] = {
    cpu::kReference,
};

}  // namespace

std::span<const Engine> engines() { return kEngines; }

}  // namespace tea
