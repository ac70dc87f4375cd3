// The table of engines: the first that accepts, runs.
#include "core/registry.h"

#include "cpu/flash.h"
#include "cpu/reference.h"
#if defined(TE_ATTENTION_CUDA)
#include "portable/engine.h"
#endif

namespace tea {
namespace {

constexpr Engine kEngines[] = {
#if defined(TE_ATTENTION_CUDA)
    portable::kPortable,
#endif

    cpu::kFlash,         cpu::kFlashAmx,     cpu::kFlashAvx512,
    cpu::kFlashAvx2,     cpu::kFlashGeneric, cpu::kReference,
};

}  // namespace

std::span<const Engine> engines() { return kEngines; }

}  // namespace tea
