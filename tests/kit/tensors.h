// The tensors of a problem as the kit sees them: when each is used, its type, who writes it, and
// where its elements lie. Written from te_attention.h, without the library's own table.
#pragma once
#include <array>

#include "kit/layout.h"

namespace tea::kit {

enum class Written { kNever, kForward, kBackward };
enum class Kind { kRowsQ, kRowsKv, kLse, kBias, kFlat, kInteger };

using Index = std::array<int64_t, 4>;  // batch, head, row, column

struct Place {
  tea_tensor id{};
  bool used = false;
  Kind kind = Kind::kFlat;
  Written written = Written::kNever;
  int32_t dtype = 0;  // tea_dtype; 0 for integers
  Index shape{};      // outer (batch, page or 1), row, head, column; bias: batch, head, row, column
  Index stride{};
  int storage = -1;
  int64_t base = 0;  // element of the storage where it begins

  int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
  int64_t span() const;  // elements from the first to the last, both included
  // The first element of every row of the shape's last dimension, past the lengths too.
  template <class Visit>
  void each_row(const Visit& visit) const {
    for (int64_t a = 0; a < shape[0]; ++a)
      for (int64_t b = 0; b < shape[1]; ++b)
        for (int64_t c = 0; c < shape[2]; ++c) visit(a * stride[0] + b * stride[1] + c * stride[2]);
  }
  // Every element.
  template <class Visit>
  void each(const Visit& visit) const {
    each_row([&](int64_t first) {
      for (int64_t d = 0; d < shape[3]; ++d) visit(first + d * stride[3]);
    });
  }
};

const char* tensor_name(tea_tensor t);

// The place of every tensor that the case uses, without storage.
std::array<Place, TEA_TENSOR_COUNT> places(const Case& c, const Problem& p, const Extents& e);

// The element of a tensor of rows, of LSE's kind or a bias, counted from its base.
int64_t element(const Place& place, const Problem& p, const Extents& e, const Index& at);

// visit(element, index) for every element within the lengths.
template <class Visit>
void each_valid(const Place& place, const Problem& p, const Extents& e, const Visit& visit) {
  const bool is_bias = place.kind == Kind::kBias;
  const int64_t heads = is_bias ? p.heads_q : place.shape[2];
  const int64_t step = place.stride[3];
  for (int64_t b = 0; b < e.batch; ++b) {
    const auto i = static_cast<size_t>(b);
    const int64_t rows = (place.kind == Kind::kRowsKv ? e.len_kv : e.len_q)[i];
    const int64_t columns = is_bias ? e.len_kv[i] : place.shape[3];
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t first = element(place, p, e, {b, h, row, 0});
        for (int64_t col = 0; col < columns; ++col)
          visit(first + col * step, Index{b, h, row, col});
      }
  }
}

bool is_fp8(int32_t dtype);

}  // namespace tea::kit
