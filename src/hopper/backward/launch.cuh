// The launch of a backward kernel: tensor maps, parameters, grid.
#pragma once
#include <algorithm>

#include "hopper/backward/kernel.cuh"
#include "hopper/backward/launch.h"
#include "hopper/row_map.h"

namespace tea::hopper::backward {
namespace {

// Fails if TMA cannot address a tensor.
template <KernelConfig C>
Outcome encode_maps(KernelParams* p) {
  using T = Traits<C>;
  const AttentionArguments& a = p->args;
  const struct {
    const char* what;
    TensorMap* to;
    const StridedTensor& x;
    const SequenceLayout& layout;
    int dim, heads, box_rows;
    bool used = true;
  } tensors[] = {
      {"cuTensorMapEncodeTiled of q", &p->q, a.q, a.queries, a.dim_qk, a.heads_q, T::kBlockM},
      {"cuTensorMapEncodeTiled of k", &p->k, a.k, a.keys, a.dim_qk, a.heads_kv, kBlockN},
      {"cuTensorMapEncodeTiled of v", &p->v, a.v, a.keys, a.dim_v, a.heads_kv, kBlockN},
      {"cuTensorMapEncodeTiled of dout", &p->dout, a.dout, a.queries, a.dim_v, a.heads_q,
       T::kBlockM},
      {"cuTensorMapEncodeTiled of dk", &p->dk, a.dk, a.keys, a.dim_qk, a.heads_kv, 64,
       p->stores_by_tma},
      {"cuTensorMapEncodeTiled of dv", &p->dv, a.dv, a.keys, a.dim_v, a.heads_kv, 64,
       p->stores_by_tma},
  };
  for (const auto& t : tensors) {
    if (!t.used) continue;
    // An empty tensor may be NULL, Q too where gradients of keys are only zeros. Nothing of it is
    // accessed, but a map needs an address.
    const void* const data = t.x.data ? t.x.data : a.workspace;
    const int code = encode_rows(t.to, data, t.x, t.layout, t.dim, t.heads, a.batch, C.type,
                                 T::kSwizzle, t.box_rows);
    if (code) return failure(code, t.what);
  }
  return {};
}

}  // namespace

template <int kTile, Type kType>
Outcome launch(KernelParams* p, cudaStream_t stream) {
  constexpr KernelConfig C = kKernelConfig<kTile, kType>;
  constexpr int kSharedBytes = sizeof(typename Traits<C>::SharedStorage);
  static OncePerDevice allowed;
  const void* const kernel = reinterpret_cast<const void*>(backward_kernel<kTile, kType>);
  int sms = 0;
  if (const Outcome ready = prepare_launch(kernel, kSharedBytes, allowed, &sms); ready.code)
    return ready;
  if (const Outcome made = encode_maps<C>(p); made.code) return made;
  // An upper bound where only the device knows the lengths.
  cudaLaunchConfig_t config = {};
  const auto most = static_cast<int>(limited_ctas(p->args, sms));
  config.gridDim = static_cast<unsigned>(std::clamp(p->order.count(), 1, most));
  config.blockDim = Traits<C>::kThreads;
  config.dynamicSmemBytes = kSharedBytes, config.stream = stream;
  void* arguments[] = {p};
  const cudaError_t code = launch_dependent(kernel, config, arguments, true);
  return code == cudaSuccess ? Outcome{} : failure(code, "the launch of the backward kernel");
}

}  // namespace tea::hopper::backward
