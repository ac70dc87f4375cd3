// The table of engines: the first that accepts, runs.
#include "core/registry.h"

#include "cpu/flash.h"
#include "cpu/reference.h"

namespace tea {
namespace {

constexpr Engine kEngines[] = {
    cpu::kFlash,        cpu::kFlashAvx512, cpu::kFlashAvx2,
    cpu::kFlashGeneric, cpu::kReference,
};

}  // namespace

std::span<const Engine> engines() { return kEngines; }

}  // namespace tea
