// The common path of the entry points.
#pragma once
#include "core/error.h"
#include "nvte/call.h"

namespace tea::nvte {

// Reads the sizes from the tensors, selects the backend, and runs. `pack`: the result of forward.
void enter(const ForwardCall& call);
void enter(BackwardCall call, const NVTETensorPack& pack);

template <class Pack>
Pack& needed_pack(Pack* pack) {
  TEA_REQUIRE(pack, "Aux_CTX_Tensors", pack, "an NVTETensorPack");
  return *pack;
}

}  // namespace tea::nvte
