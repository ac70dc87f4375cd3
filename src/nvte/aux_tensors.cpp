// One list per class determines the positions of the entries.
#include "nvte/aux_tensors.h"

#include <algorithm>
#include <initializer_list>

#include "core/error.h"
#include "nvte/layout.h"

namespace tea::nvte {
namespace {

NVTEShape shape(std::initializer_list<int64_t> sizes) {
  NVTEShape out{};
  for (const int64_t size : sizes) out.data[out.ndim++] = static_cast<size_t>(size);
  return out;
}

NVTEShape stats_shape(const Work& w) {
  const Sizes& s = w.sizes;
  return layout_of(w.options.layout).ragged_q() ? shape({s.tokens_q, s.heads_q, 1})
                                                : shape({s.batch, s.heads_q, s.max_q, 1});
}

NVTEShape bias_shape(const Work& w) {
  const Sizes& s = w.sizes;
  const auto size = [&](int bit, int64_t full) { return w.bias_broadcast & bit ? 1 : full; };
  return shape({size(TEA_BROADCAST_BATCH, s.batch), size(TEA_BROADCAST_HEAD, s.heads_q),
                size(TEA_BROADCAST_ROW, s.max_q), s.max_kv});
}

NVTEShape sink_shape(const Work& w) { return shape({1, w.sizes.heads_q, 1, 1}); }

bool same(const NVTEShape& a, const NVTEShape& b) {
  return a.ndim == b.ndim && std::equal(a.data, a.data + a.ndim, b.data);
}

Tensor& entry_of(const NVTETensorPack& pack, size_t i) {
  Tensor* const entry = find(pack.tensors[i]);
  if (entry) return *entry;
  return tensor(("Aux_CTX_Tensors->tensors[" + shown(i) + "]").c_str(), pack.tensors[i]);
}

size_t position(const std::vector<AuxEntry>& entries, Aux what) {
  const auto it = std::find_if(entries.begin(), entries.end(),
                               [&](const AuxEntry& entry) { return entry.what == what; });
  return static_cast<size_t>(it - entries.begin());
}

// The softmax offset. JAX always passes an entry for a bias before it, even without a bias, so the
// entry after the expected position is used if only that one has the shape of an offset.
void* find_softmax_offset(const NVTETensorPack& pack, size_t at, const Work& w) {
  for (const size_t i : {at, at + 1}) {
    const Tensor* entry = find(pack.tensors[i]);
    if (entry && entry->data.data_ptr && entry->data.dtype == kNVTEFloat32 &&
        same(entry->data.shape, sink_shape(w)))
      return entry->data.data_ptr;
  }
  return entry_of(pack, at).data.data_ptr;
}

}  // namespace

std::vector<AuxEntry> aux_entries(const Work& w, NVTE_Fused_Attn_Backend backend) {
  const Sizes& s = w.sizes;
  const bool has_bias = w.options.bias != NVTE_NO_BIAS && w.options.bias != NVTE_ALIBI;
  if (backend == NVTE_F16_max512_seqlen) {
    std::vector<AuxEntry> out = {
        {Aux::kOpaque, w.types.q, shape({s.batch, s.heads_q, s.max_q, s.max_kv})}};
    if (has_bias) out.push_back({Aux::kBias, w.types.q, bias_shape(w)});
    return out;
  }
  const NVTEShape stats = stats_shape(w);
  const auto fp32 = [&](Aux what) { return AuxEntry{what, kNVTEFloat32, stats}; };
  std::vector<AuxEntry> out;
  if (w.options.max_logit)
    out = {fp32(Aux::kMax), fp32(Aux::kSumExp)};
  else
    out = {fp32(Aux::kLse)};
  if (backend == NVTE_FP8) out.push_back(fp32(Aux::kUnused));
  out.push_back({Aux::kRngState, kNVTEInt64, shape({2})});
  if (has_bias)
    out.push_back({Aux::kBias, backend == NVTE_FP8 ? w.types.bias : w.types.q, bias_shape(w)});
  if (w.options.softmax != NVTE_VANILLA_SOFTMAX)
    out.push_back({Aux::kSoftmaxOffset, kNVTEFloat32, sink_shape(w)});
  return out;
}

void describe_aux(NVTETensorPack& pack, const std::vector<AuxEntry>& entries) {
  for (size_t i = 0; i < entries.size(); ++i)
    entry_of(pack, i).data = {nullptr, entries[i].dtype, entries[i].shape};
  pack.size = entries.size();
}

void check_aux_size(const NVTETensorPack& pack, const std::vector<AuxEntry>& entries,
                    NVTE_Fused_Attn_Backend backend) {
  // TransformerEngine's callers pass NVTE_F16_max512_seqlen one tensor, with a bias too.
  const bool one = backend == NVTE_F16_max512_seqlen && pack.size == 1;
  const bool exact = backend != NVTE_F16_arbitrary_seqlen;
  const bool fits = one || (exact ? pack.size == entries.size() : pack.size >= 2);
  TEA_NVTE_CHECK(fits && pack.size <= NVTETensorPack::MAX_SIZE,
                 "Unexpected Aux_CTX_Tensors->size. It is ", pack.size, "; needs ",
                 exact ? "" : "0 or at least 2, usually ", entries.size(), ".");
}

void point_aux_at_inputs(NVTETensorPack& pack, const std::vector<AuxEntry>& entries,
                         const ForwardCall& call) {
  if (pack.size == 1) return;  // of NVTE_F16_max512_seqlen: no entry is an input
  const struct {
    Aux what;
    const Tensor* input;
  } rows[] = {{Aux::kRngState, call.rng_state},
              {Aux::kBias, call.bias},
              {Aux::kSoftmaxOffset, call.softmax_offset}};
  for (const auto& row : rows)
    if (const size_t i = position(entries, row.what); i < entries.size())
      entry_of(pack, i).data.data_ptr = row.input->data.data_ptr;
}

void* aux_data(const NVTETensorPack& pack, const std::vector<AuxEntry>& entries, Aux what) {
  const size_t i = position(entries, what);
  return i < entries.size() ? entry_of(pack, i).data.data_ptr : nullptr;
}

void* opaque_rng_state(void* opaque, const Sizes& s) {
  if (!opaque) return nullptr;
  return static_cast<char*>(opaque) +
         static_cast<size_t>(s.batch * s.heads_q * s.max_q) * sizeof(float);
}

BackwardAux read_aux(const NVTETensorPack& pack, const Work& w, NVTE_Fused_Attn_Backend backend) {
  const std::vector<AuxEntry> entries = aux_entries(w, backend);
  if (backend == NVTE_F16_max512_seqlen) {
    void* const opaque = aux_data(pack, entries, Aux::kOpaque);
    return {opaque, opaque_rng_state(opaque, w.sizes), aux_data(pack, entries, Aux::kBias),
            nullptr};
  }
  BackwardAux aux{aux_data(pack, entries, Aux::kLse), aux_data(pack, entries, Aux::kRngState),
                  aux_data(pack, entries, Aux::kBias), nullptr};
  if (w.options.softmax == NVTE_LEARNABLE_SOFTMAX)
    aux.softmax_offset = find_softmax_offset(pack, position(entries, Aux::kSoftmaxOffset), w);
  return aux;
}

}  // namespace tea::nvte
