// Allocation, filling and reading back of hostile inputs.
#include "kit/inputs.h"

#include <algorithm>

#include "kit/codec.h"

namespace tea::kit {
namespace {

constexpr size_t kMostFilled = size_t{1} << 26;  // bytes that are worth a copy per poison

// Integers that no engine may follow: page -1, or a page far outside every pool.
int32_t poison_integer(Poison poison) {
  return poison == Poison::kNan || poison == Poison::kThree ? -1 : INT32_MAX;
}

double poison_value(Poison poison) {
  return poison == Poison::kThree ? 3 : poison == Poison::kMinusTwo ? -2 : 1e30;
}

int element_bytes(const Place& place) {
  if (place.kind == Kind::kInteger) return place.id == TEA_RNG_STATE ? 8 : 4;
  return bytes_of(place.dtype);
}

void poison_storage(Storage& storage, const Place& place, Poison poison) {
  if (place.kind == Kind::kInteger) {
    const int32_t x = poison_integer(poison);
    for (size_t i = 0; i + sizeof x <= storage.size(); i += sizeof x)
      std::memcpy(storage.data() + i, &x, sizeof x);
  } else if (poison == Poison::kNan) {
    std::memset(storage.data(), 0xFF, storage.size());
  } else {
    const auto width = static_cast<size_t>(element_bytes(place));
    const double value = std::min(poison_value(poison), largest_of(place.dtype));
    const uint64_t bits = encode(place.dtype, value);
    for (size_t i = 0; i + width <= storage.size(); i += width)
      std::memcpy(storage.data() + i, &bits, width);
  }
}

double initial_scalar(const Scalars& s, tea_tensor t) {
  switch (t) {
    case TEA_Q_SCALE_INV:
      return s.q_scale_inv;
    case TEA_K_SCALE_INV:
      return s.k_scale_inv;
    case TEA_V_SCALE_INV:
      return s.v_scale_inv;
    case TEA_S_SCALE:
      return s.s_scale;
    case TEA_S_SCALE_INV:
      return s.s_scale_inv;
    case TEA_O_SCALE:
      return s.o_scale;
    case TEA_O_SCALE_INV:
      return s.o_scale_inv;
    case TEA_DOUT_SCALE_INV:
      return s.dout_scale_inv;
    case TEA_DP_SCALE:
      return s.dp_scale;
    case TEA_DP_SCALE_INV:
      return s.dp_scale_inv;
    case TEA_DQ_SCALE:
      return s.dq_scale;
    case TEA_DK_SCALE:
      return s.dk_scale;
    case TEA_DV_SCALE:
      return s.dv_scale;
    default:
      return s.amax;
  }
}

}  // namespace

Inputs::Inputs(const Case& c)
    : case_(c),
      extents_(kit::extents(c)),
      problem_(placed(c, extents_)),
      scalars_(kit::scalars(c)),
      logical_(make_logical(c, problem_, extents_)),
      places_(places(c, problem_, extents_)) {
  if (packs_q(c.layout))
    place_packed(TEA_Q, {TEA_Q, TEA_K, TEA_V});
  else if (packs_kv(c.layout))
    place_packed(TEA_K, {TEA_K, TEA_V});
  if (problem_.training && packs_q(c.layout))
    place_packed(TEA_DQ, {TEA_DQ, TEA_DK, TEA_DV});
  else if (problem_.training && packs_kv(c.layout))
    place_packed(TEA_DK, {TEA_DK, TEA_DV});
  for (Place& place : places_)
    if (place.used && place.storage < 0) place_alone(place);
  make_integers();
  fill(Poison::kNan);
  read_back();
}

int Inputs::add_storage(int64_t elements, int bytes) {
  const auto alignment = static_cast<size_t>(problem_.alignment ? problem_.alignment : 16);
  storages_.emplace_back(static_cast<size_t>(elements) * static_cast<size_t>(bytes),
                         std::max(alignment, size_t{8}));
  return static_cast<int>(storages_.size()) - 1;
}

void Inputs::place_alone(Place& place) {
  place.storage = add_storage(place.span(), element_bytes(place));
}

void Inputs::place_packed(tea_tensor first, const std::vector<tea_tensor>& tensors) {
  const Offsets offsets = packed_offsets(case_);
  int64_t end = 0;
  for (const tea_tensor t : tensors) {
    Place& place = places_[t];
    place.base = t == TEA_V || t == TEA_DV ? offsets.v : t == first ? 0 : offsets.k;
    end = std::max(end, place.base + place.span());
  }
  const int storage = add_storage(end, element_bytes(places_[first]));
  for (const tea_tensor t : tensors) places_[t].storage = storage;
}

void Inputs::make_integers() {
  const auto cumulative = [](const std::vector<int64_t>& lens) {
    std::vector<int64_t> out = {0};
    for (const int64_t length : lens) out.push_back(out.back() + length);
    return out;
  };
  const auto table = [&](const std::vector<int32_t>& pages, int64_t stride) {
    std::vector<int64_t> out(static_cast<size_t>(extents_.batch * stride), -1);
    for (int64_t b = 0; b < extents_.batch; ++b)
      for (int64_t i = 0; i < extents_.table_pages; ++i)
        out[static_cast<size_t>(b * stride + i)] =
            pages[static_cast<size_t>(b * extents_.table_pages + i)];
    return out;
  };
  const auto stride = [&](int64_t given) { return given ? given : extents_.table_pages; };
  integers_[TEA_CU_SEQLENS_Q] = cumulative(extents_.len_q);
  integers_[TEA_CU_SEQLENS_KV] = cumulative(extents_.len_kv);
  integers_[TEA_OFFSETS_Q] = extents_.start_q;
  integers_[TEA_OFFSETS_KV] = extents_.start_kv;
  integers_[TEA_TABLE_K] = table(extents_.table_k, stride(problem_.table_k_stride));
  integers_[TEA_TABLE_V] = table(extents_.table_v, stride(problem_.table_v_stride));
  integers_[TEA_RNG_STATE] = {static_cast<int64_t>(logical_.seed),
                              static_cast<int64_t>(logical_.offset)};
}

std::vector<double>* Inputs::array(tea_tensor t) {
  switch (t) {
    case TEA_Q:
      return &logical_.q;
    case TEA_K:
      return &logical_.k;
    case TEA_V:
      return &logical_.v;
    case TEA_DOUT:
      return &logical_.dout;
    case TEA_DLSE:
      return &logical_.dlse;
    default:
      return nullptr;
  }
}

// Plain arrays are [batch][head][row][column], with as many rows as the longest sequence may have.
size_t Inputs::array_index(const Place& place, const Index& at) const {
  const int64_t rows = place.kind == Kind::kRowsKv ? extents_.max_kv : extents_.max_q;
  return static_cast<size_t>(((at[0] * place.shape[2] + at[1]) * rows + at[2]) * place.shape[3] +
                             at[3]);
}

void Inputs::write_rows(tea_tensor t, const std::vector<double>& values) {
  const Place& place = places_[t];
  each_valid(place, problem_, extents_, [&](int64_t i, const Index& where) {
    store(at(place), place.dtype, place.base + i, values[array_index(place, where)]);
  });
}

// First what is never visible, so that sharing by broadcast leaves no NaN where another reads.
void Inputs::write_bias() {
  const Place& place = places_[TEA_BIAS];
  for (const bool visible : {false, true}) {
    each_valid(place, problem_, extents_, [&](int64_t i, const Index& x) {
      if (oracle::visible(logical_, x[0], x[2], x[3]) != visible) return;
      const size_t from = static_cast<size_t>(
          ((x[0] * problem_.heads_q + x[1]) * extents_.max_q + x[2]) * extents_.max_kv + x[3]);
      store(at(place), place.dtype, i, logical_.bias[from]);
    });
  }
}

void Inputs::write_flat() {
  for (Place& place : places_) {
    if (!place.used || place.kind != Kind::kFlat) continue;
    const auto set = [&](int64_t i, double x) { store(at(place), place.dtype, i, x); };
    if (place.id == TEA_SINK) {
      for (size_t h = 0; h < logical_.sink.size(); ++h)
        set(static_cast<int64_t>(h), logical_.sink[h]);
    } else if (place.id == TEA_SLOPES) {
      const int64_t heads = problem_.heads_q;
      for (int64_t b = 0; b < (problem_.slopes_stride ? extents_.batch : 1); ++b)
        for (int64_t h = 0; h < heads && b < extents_.batch; ++h)
          set(b * problem_.slopes_stride + h, logical_.slopes[static_cast<size_t>(b * heads + h)]);
    } else if (is_fp8(problem_.kv_dtype)) {  // no other scalars
      const auto& factors = place.id == TEA_K_SCALE_INV ? logical_.k_factors : logical_.v_factors;
      for (int64_t h = 0; h < place.shape[3]; ++h) set(h, factors[static_cast<size_t>(h)]);
    } else if (place.id != TEA_DSINK) {
      set(0, initial_scalar(scalars_, place.id));
    }
  }
}

void Inputs::write_integers() {
  for (Place& place : places_) {
    if (!place.used || place.kind != Kind::kInteger) continue;
    const std::vector<int64_t>& values = integers_[place.id];
    const bool is_table = place.id == TEA_TABLE_K || place.id == TEA_TABLE_V;
    for (size_t i = 0; i < values.size(); ++i) {
      if (is_table && values[i] < 0) continue;  // stays poisoned
      if (place.id == TEA_RNG_STATE)
        std::memcpy(at(place) + i * 8, &values[i], 8);
      else
        reinterpret_cast<int32_t*>(at(place))[i] = static_cast<int32_t>(values[i]);
    }
  }
}

void Inputs::replace(tea_tensor t, const std::function<double(const Index&)>& value) {
  filled_.clear();
  const Place& place = places_[t];
  each_valid(place, problem_, extents_, [&](int64_t, const Index& where) {
    (*array(t))[array_index(place, where)] = value(where);
  });
}

void Inputs::fill(Poison poison) {
  poison_ = poison;
  auto& filled = filled_[poison];
  if (!filled.empty()) {
    for (size_t s = 0; s < storages_.size(); ++s)
      std::copy(filled[s].begin(), filled[s].end(), storages_[s].data());
    return;
  }
  for (const Place& place : places_)
    if (place.used) poison_storage(storages_[static_cast<size_t>(place.storage)], place, poison);
  for (const tea_tensor t : {TEA_Q, TEA_K, TEA_V, TEA_DOUT, TEA_DLSE})
    if (places_[t].used) write_rows(t, *array(t));
  if (places_[TEA_BIAS].used) write_bias();
  write_flat();
  write_integers();
  size_t total = 0;
  for (const Storage& s : storages_) total += s.size();
  if (total > kMostFilled) return;
  for (const Storage& s : storages_) filled.emplace_back(s.data(), s.data() + s.size());
}

// The values as written: rounded, and shared if strides or pages share memory.
void Inputs::read_back() {
  for (const tea_tensor t : {TEA_Q, TEA_K, TEA_V, TEA_DOUT, TEA_DLSE}) {
    const Place& place = places_[t];
    if (!place.used) continue;
    each_valid(place, problem_, extents_, [&](int64_t i, const Index& where) {
      (*array(t))[array_index(place, where)] = load(at(place), place.dtype, place.base + i);
    });
  }
  if (!places_[TEA_BIAS].used) return;
  size_t i = 0;
  const Place& place = places_[TEA_BIAS];
  for (int64_t b = 0; b < extents_.batch; ++b)
    for (int64_t h = 0; h < problem_.heads_q; ++h)
      for (int64_t row = 0; row < extents_.max_q; ++row)
        for (int64_t col = 0; col < extents_.max_kv; ++col)
          logical_.bias[i++] =
              load(at(place), place.dtype, element(place, problem_, extents_, {b, h, row, col}));
}

uint32_t Inputs::poison_word() const {
  const bool nan = poison_ == Poison::kNan || poison_ == Poison::kThree;
  return nan ? ~uint32_t{0} : static_cast<uint32_t>(encode(TEA_FP32, 1e30));
}

const tea_run& Inputs::run(uint64_t workspace) {
  for (const Place& place : places_)
    pointers_[place.id] =
        place.used ? at(place) + place.base * static_cast<int64_t>(element_bytes(place)) : nullptr;
  workspace_ = Storage(workspace, 256);
  std::memset(workspace_.data(), 0xFF, workspace);
  const uint32_t word = poison_word();
  for (size_t i = 0; i + sizeof word <= workspace; i += sizeof word)
    std::memcpy(workspace_.data() + i, &word, sizeof word);
  before_.clear();
  for (const Storage& s : storages_) before_.emplace_back(s.data(), s.data() + s.size());
  status_ = 0;
  run_ = {};
  run_.struct_size = sizeof run_, run_.tensor_count = TEA_TENSOR_COUNT;
  run_.tensors = pointers_.data();
  run_.workspace = workspace ? workspace_.data() : nullptr, run_.workspace_bytes = workspace;
  const Extents& e = extents_;
  if (problem_.varies()) run_.batch = e.batch;
  if (problem_.varies_q()) run_.max_q = e.max_q;
  if (problem_.varies_kv()) run_.max_kv = e.max_kv;
  run_.tokens_q = e.tokens_q, run_.tokens_kv = e.tokens_kv;
  run_.pages_k = run_.pages_v = e.pages;
  place_origin();
  run_.status = &status_;
  return run_;
}

// Numbers of sequences between which there is one that must not be read.
constexpr int64_t kStride = 6;

size_t Inputs::origin_bytes() const {
  const int64_t numbers = case_.has_steps() ? std::max<int64_t>(extents_.batch, 1) * kStride : 4;
  return static_cast<size_t>(numbers) * sizeof(int64_t);
}

void Inputs::place_origin() {
  const bool strided = case_.has_steps();
  if (!strided) {
    run_.shift = case_.shift;
    origin_memory_.assign(case_.origin, case_.origin + 4);
  } else {
    run_.origin_stride = kStride;
    origin_memory_.assign(origin_bytes() / sizeof(int64_t), -1);
    for (int64_t b = 0; b < extents_.batch; ++b)
      for (int i = 0; i < 5; ++i)
        origin_memory_[static_cast<size_t>(b * kStride + i)] =
            (i < 4 ? case_.origin[i] : case_.shift) + b * case_.origin_step[i];
  }
  if (strided || case_.origin_in_memory)
    run_.origin_device = origin_memory_.data();
  else
    std::copy(case_.origin, case_.origin + 4, run_.origin);
}

double Inputs::value(tea_tensor t, const Index& where) const {
  const Place& place = places_[t];
  return load(at(place), place.dtype, place.base + element(place, problem_, extents_, where));
}

double Inputs::flat(tea_tensor t, int64_t i) const {
  return load(at(places_[t]), places_[t].dtype, i);
}

}  // namespace tea::kit
