// The engines of this build in order of preference: the first that accepts a problem runs it.
#include "core/registry.h"

#include "cpu/flash.h"
#include "cpu/reference.h"
#if defined(TE_ATTENTION_CUDA)
#include "composite/hopper.h"
#include "composite/portable.h"
#include "portable/engine.h"
#if defined(TE_ATTENTION_CUDNN)
#include "cudnn/engine.h"
#endif
#endif

namespace tea {
namespace {

constexpr Engine kEngines[] = {
#if defined(TE_ATTENTION_CUDNN)
    composite::kHopperCudnn,
    composite::kHopper,
    composite::kPortableCudnn,
    portable::kPortable,
    cudnn::kCudnn,
#elif defined(TE_ATTENTION_CUDA)
    composite::kHopper, portable::kPortable,
#endif
    cpu::kFlash,
    cpu::kFlashAmx,
    cpu::kFlashAvx512Bf16,
    cpu::kFlashAvx512,
    cpu::kFlashAvx2,
    cpu::kFlashGeneric,
    cpu::kReference,
};

}  // namespace

std::span<const Engine> engines() { return kEngines; }

}  // namespace tea
