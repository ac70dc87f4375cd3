// Context parallelism on ragged batches: halves of sequences, corrections of partial results, and
// the order of tokens over the ranks. Host and GPU share the rules below.
#pragma once
#include <cmath>

#include "math/lengths.h"
#include "math/softmax.h"
#include "ops/elements.h"
#include "ops/moves.h"

namespace tea {

void cp_read_half(const tea_cp_half& args, const Place& place);
void cp_lse_correct(const tea_cp_lse& args, const Place& place);
void cp_lse_read(const tea_cp_lse& args, const Place& place);
void cp_out_correct(const tea_cp_out& args, const Place& place);
void cp_grad_correct(const tea_cp_grad& args, const Place& place);
void cp_partition_indices(const tea_cp_partition& args, const Place& place);
void cp_to_rank_order(const tea_cp_order& args, const Place& place);
void cp_to_sequence_order(const tea_cp_order& args, const Place& place);
void cp_copy_valid(const tea_cp_valid& args, const Place& place);

// ---- Halves ----------------------------------------------------------------------------------

// A sequence has rows start .. start + 2 * half; in half tensors, `half` rows from start / 2.
struct Halves {
  int64_t index = -1, start = 0, half = 0;  // index -1: no sequence, or invalid metadata
  TEA_HOST_DEVICE bool holds(int64_t row) const {
    return index >= 0 && row >= start && row - start < 2 * half;
  }
};

TEA_HOST_DEVICE Halves halves_of(const int32_t* cu_seqlens, int64_t i, int64_t tokens) {
  const int64_t start = cu_seqlens[i], end = cu_seqlens[i + 1];
  if (start < 0 || end < start || end > tokens || start % 2 || end % 2) return {};
  return {i, start, (end - start) / 2};
}

// The halves of the sequence that contains `row` of a whole tensor.
TEA_HOST_DEVICE Halves halves_around(const int32_t* cu_seqlens, int64_t batch, int64_t tokens,
                                     int64_t row) {
  const int64_t i = find_sequence(cu_seqlens, batch, row);
  if (i < 0) return {};
  const Halves s = halves_of(cu_seqlens, i, tokens);
  return s.holds(row) ? s : Halves{};
}

struct ReadHalfMoves : Moves {
  tea_cp_half a;

  TEA_HOST_DEVICE void check(int64_t i) const {
    if (halves_of(a.cu_seqlens, i, a.tokens).index < 0) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  TEA_HOST_DEVICE Move at(int64_t i) const {
    const int64_t slab = quotient(i, a.tokens / 2), row = i - slab * (a.tokens / 2);
    const Halves s = halves_around(a.cu_seqlens, a.batch, a.tokens, 2 * row);
    if (s.index < 0) return {};
    const int64_t from = slab * a.tokens + s.start / 2 + row + a.second * s.half;
    return {static_cast<char*>(a.half) + i * bytes,
            static_cast<const char*>(a.tensor) + from * bytes};
  }
};

// ---- LSE -------------------------------------------------------------------------------------

// The position of a sequence's LSE in a line of the whole tensor and of the step's tensor.
struct LseShape {
  int32_t packed;  // one line per head; else one per sequence and head
  int32_t second;  // the step has only second halves
  int64_t heads, whole_len, step_len;

  TEA_HOST_DEVICE int64_t whole_first(const Halves& s) const {
    return (packed ? s.start : 0) + (second ? s.half : 0);
  }
  TEA_HOST_DEVICE int64_t step_first(const Halves& s) const {
    return packed ? (second ? s.start / 2 : s.start) : 0;
  }
  TEA_HOST_DEVICE int64_t count(const Halves& s) const { return second ? s.half : 2 * s.half; }
  TEA_HOST_DEVICE bool fits(const Halves& s) const {
    return s.index >= 0 && whole_first(s) + count(s) <= whole_len &&
           step_first(s) + count(s) <= step_len;
  }
};

// The rows of second halves in every line of half_lse.
struct LseElements : Elementwise {
  static constexpr int kPasses = 2;
  tea_cp_lse a;
  LseShape shape;
  bool correct;  // false: read

  TEA_HOST_DEVICE int64_t tokens() const { return a.packed ? a.lse_len : INT64_MAX; }
  TEA_HOST_DEVICE void check(int64_t i) const {
    if (!shape.fits(halves_of(a.cu_seqlens, i, tokens()))) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }

  // Elements [begin, end) of a line of half_lse correspond to elements + shift of the whole line.
  struct Cursor {
    int64_t begin = 0, end = 0, shift = 0;
    TEA_HOST_DEVICE bool holds(int64_t i) const { return i >= begin && i < end; }
  };
  struct Slot {
    float *whole, *half;
  };
  struct Value {
    float whole, half;
  };
  TEA_HOST_DEVICE bool reach(int64_t line, int64_t i, Cursor& c) const {
    if (!c.holds(i)) c = cursor(line, i);
    return c.holds(i);
  }
  TEA_HOST_DEVICE Slot slot(int64_t line, int64_t i, const Cursor& c) const {
    return {a.lse + line * a.lse_len + i + c.shift, a.half_lse + line * a.half_len + i};
  }
  TEA_HOST_DEVICE Value load(const Slot& slot) const {
    return {*slot.whole, correct ? *slot.half : 0};
  }
  template <class Real>
  TEA_HOST_DEVICE void store(const Slot& slot, const Value& value) const {
    if (correct)
      *slot.whole = static_cast<float>(log_add(Real{value.whole}, Real{value.half}));
    else
      *slot.half = value.whole;
  }

 private:
  TEA_HOST_DEVICE Cursor cursor(int64_t line, int64_t i) const {
    const Halves s = a.packed ? halves_around(a.cu_seqlens, a.batch, tokens(), 2 * i)
                              : halves_of(a.cu_seqlens, quotient(line, a.heads), tokens());
    if (!shape.fits(s)) return {};
    const int64_t begin = shape.step_first(s);
    return {begin, begin + shape.count(s), shape.whole_first(s) - begin};
  }
};

// ---- Sums into rows --------------------------------------------------------------------------

struct OutUpdates : Updates {
  tea_cp_out a;
  LseShape shape;

  TEA_HOST_DEVICE void check(int64_t i) const {
    if (!shape.fits(halves_of(a.cu_seqlens, i, a.tokens))) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  using Cursor = Halves;
  TEA_HOST_DEVICE Update at(int64_t i, Cursor& s) const {
    const int64_t row = quotient(i, a.heads), h = i - row * a.heads;
    const int64_t whole_row = shape.second ? 2 * row : row;
    if (!s.holds(whole_row)) s = halves_around(a.cu_seqlens, a.batch, a.tokens, whole_row);
    if (!shape.fits(s)) return {};
    const int64_t c = row - (shape.second ? s.start / 2 : s.start);
    const int64_t line = a.packed ? h : s.index * a.heads + h;
    const int64_t row_to = s.start + (shape.second ? s.half : 0) + c;
    return {Change::kAddProduct, row_to * a.heads + h,
            a.step_lse + line * a.step_lse_len + shape.step_first(s) + c,
            a.lse + line * a.lse_len + shape.whole_first(s) + c};
  }
};

struct GradUpdates : Updates {
  tea_cp_grad a;
  int64_t step_tokens;  // half of the tokens, or all

  TEA_HOST_DEVICE void check(int64_t i) const {
    if (halves_of(a.cu_seqlens, i, a.tokens).index < 0) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  TEA_HOST_DEVICE static Change change(int32_t action) {
    return action == TEA_CP_ADD    ? Change::kAdd
           : action == TEA_CP_COPY ? Change::kCopy
                                   : Change::kNone;
  }
  using Cursor = Halves;
  TEA_HOST_DEVICE Update at(int64_t i, Cursor& s) const {
    const bool half_step = a.first == TEA_CP_NONE || a.second == TEA_CP_NONE;
    const int64_t slab = quotient(i, step_tokens), row = i - slab * step_tokens;
    const int64_t whole_row = half_step ? 2 * row : row;
    if (!s.holds(whole_row)) s = halves_around(a.cu_seqlens, a.batch, a.tokens, whole_row);
    if (s.index < 0) return {};
    const int64_t c = row - (half_step ? s.start / 2 : s.start);
    const bool second = half_step ? a.first == TEA_CP_NONE : c >= s.half;
    const int64_t to = slab * a.tokens + s.start + c + (half_step && second ? s.half : 0);
    return {change(second ? a.second : a.first), to};
  }
};

// ---- Order over the ranks --------------------------------------------------------------------

// A sequence is cut into 2 * world chunks. A rank has two of them, adjacent in its own order: its
// token begin + c, c < 2 * chunk, is the global token first + c, or second + c for c >= chunk.
struct Cut {
  int64_t begin = 0, chunk = -1, first = 0, second = 0;  // chunk -1: invalid

  TEA_HOST_DEVICE bool valid() const { return chunk >= 0; }
  TEA_HOST_DEVICE bool holds(int64_t local) const {
    return local >= begin && local - begin < 2 * chunk;
  }
  // The global index of token `local` of the rank.
  TEA_HOST_DEVICE int64_t token(int64_t local) const {
    const int64_t c = local - begin;
    return c + (c < chunk ? first : second);
  }
};

template <class Args>
TEA_HOST_DEVICE Cut cut_of(const Args& a, int64_t rank, int64_t i) {
  const int64_t start = a.cu_seqlens[i], end = a.cu_seqlens[i + 1], cuts = int64_t{2} * a.world;
  if (start < 0 || end < start || end > a.tokens) return {};
  const int64_t from = quotient(start, cuts), to = quotient(end, cuts), chunk = to - from;
  if (from * cuts != start || to * cuts != end) return {};
  return {2 * from, chunk, start + rank * chunk, start + (cuts - 2 - rank) * chunk};
}

// The cut of the sequence that contains token `local` of a rank, if any does.
template <class Args>
TEA_HOST_DEVICE Cut cut_around(const Args& a, int64_t rank, int64_t local) {
  const int64_t i = find_sequence(a.cu_seqlens, a.batch, local * a.world);
  return i < 0 ? Cut{} : cut_of(a, rank, i);
}

struct PartitionElements : Elementwise {
  static constexpr int kPasses = 4;
  tea_cp_partition a;

  TEA_HOST_DEVICE void check(int64_t i) const {
    if (!cut_of(a, a.rank, i).valid()) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  using Cursor = Cut;
  struct Slot {
    int32_t* to;
    int32_t token;
  };
  using Value = int32_t;
  TEA_HOST_DEVICE bool reach(int64_t, int64_t i, Cursor& cut) const {
    if (!cut.holds(i)) cut = cut_around(a, a.rank, i);
    return cut.holds(i);
  }
  TEA_HOST_DEVICE Slot slot(int64_t, int64_t i, const Cursor& cut) const {
    return {a.indices + i, static_cast<int32_t>(cut.token(i))};
  }
  TEA_HOST_DEVICE Value load(const Slot& slot) const { return slot.token; }
  template <class Real>
  TEA_HOST_DEVICE void store(const Slot& slot, Value token) const {
    *slot.to = token;
  }
};

struct OrderMoves : Moves {
  tea_cp_order a;
  bool to_rank_order;

  TEA_HOST_DEVICE void check(int64_t i) const {
    if (!cut_of(a, 0, i).valid()) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  TEA_HOST_DEVICE Move at(int64_t i) const {
    const int64_t each = quotient(a.tokens, a.world), rank = quotient(i, each);
    const int64_t local = i - rank * each;
    const Cut cut = cut_around(a, rank, local);
    if (!cut.holds(local)) return {};
    const int64_t token = cut.token(local);
    return {static_cast<char*>(a.output) + (to_rank_order ? i : token) * bytes,
            static_cast<const char*>(a.input) + (to_rank_order ? token : i) * bytes};
  }
};

struct ValidMoves : Moves {
  tea_cp_valid a;

  // The rows [start, start + length) of sequence i.
  TEA_HOST_DEVICE Sequence sequence(int64_t i) const {
    const int64_t start = a.cu_seqlens_padded[i], space = a.cu_seqlens_padded[i + 1] - start;
    const int64_t length = int64_t{a.cu_seqlens[i + 1]} - a.cu_seqlens[i];
    const int64_t most = space < a.tokens - start ? space : a.tokens - start;
    const bool valid = start >= 0 && length >= 0 && length <= most;
    return {start, start < 0 ? 0 : length < most ? length : most, valid};
  }
  TEA_HOST_DEVICE void check(int64_t i) const {
    if (!sequence(i).valid) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  TEA_HOST_DEVICE Move at(int64_t i) const {
    const int64_t n = find_sequence(a.cu_seqlens_padded, a.batch, i);
    if (n < 0) return {};
    const Sequence s = sequence(n);
    if (i - s.start >= s.length) return {};
    return {static_cast<char*>(a.output) + i * bytes,
            static_cast<const char*>(a.input) + i * bytes};
  }
};

}  // namespace tea
