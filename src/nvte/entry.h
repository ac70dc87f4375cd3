// What every entry point does once it has gathered its call.
#pragma once
#include "core/error.h"
#include "nvte/call.h"

namespace tea::nvte {

// Reads the sizes from the tensors, chooses the backend, and goes on. `pack`: what forward left.
void enter(const ForwardCall& call);
void enter(BackwardCall call, const NVTETensorPack& pack);

template <class Pack>
Pack& needed_pack(Pack* pack) {
  TEA_REQUIRE(pack, "Aux_CTX_Tensors", pack, "an NVTETensorPack");
  return *pack;
}

}  // namespace tea::nvte
