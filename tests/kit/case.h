// A case: one line of text that says what to compute and on what data. The Problem's own text, then
// after a bar the words of the run. Tests, fuzzing, the tool and bug reports share it.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"

namespace tea::kit {

// The contents of the tensors. Padding, gaps, unused pages and outputs are poisoned in every class.
enum class Values {
  kRandn,
  kOneHot,       // one large element per row
  kConstant,     // rows that are all alike: probabilities tie
  kOutliers,     // one element in a hundred is a thousand times larger
  kExtreme,      // logits of about +-1000
  kNegative,     // every logit near -150: exp(score) underflows, LSE < -88.7
  kDenormal,     // the subnormal range of the dtype
  kMaxFinite,    // the largest magnitudes whose products a float can hold
  kNanMasked,    // NaN and infinity in keys that no row attends
  kNanAttended,  // NaN in one key that every row attends: it must come out
  kMaskBias,     // bias entries of zero or minus infinity, whole rows and columns among them
  kZero
};

// How the elements lie. kDefault leaves the strides to the library; the others are given in full.
enum class Layout {
  kDefault,
  kBshd,
  kSbhd,
  kBhsd,
  kPacked3,       // q, k, v side by side in every row
  kPacked2,       // k, v side by side
  kInterleaved3,  // q, k, v of one head side by side
  kInterleaved2,
  kOdd,    // other strides for every tensor, with holes between rows and heads
  kShared  // k, v and dout have no batch stride: all sequences read the same memory
};

// Which of the optional FP8 scalars are given.
enum class Scales { kNone, kShared, kOwn };

struct Case {
  Problem problem = Problem::parse("");
  std::vector<int64_t> lens_q, lens_kv;  // of sides that are not dense; padded: empty means full
  int64_t max_q = 0, max_kv = 0;         // of the run; 0: the longest length
  int64_t gap = 0, tail = 0;             // rows before each ragged sequence, and after the last
  int64_t spare_pages = 0;
  int64_t one_table = 0;     // 1: V has no page table of its own
  int64_t shared_first = 0;  // 1: all sequences begin with the same page
  uint64_t seed = 0;
  Values values = Values::kRandn;
  Layout layout = Layout::kDefault;
  Scales scales = Scales::kNone;
  int64_t sink_mean = 0;
  int64_t bias_mean = 0;
  int64_t omit_optional = 0;  // 1: without dbias, dsink and dlse
  int64_t origin[4] = {};
  int64_t origin_in_memory = 0;  // 1: through origin_device
  int64_t shift = 0;
  // Of sequence b: origin and shift plus b times this (batch, head, row, column, shift), through
  // origin_device with an origin_stride.
  int64_t origin_step[5] = {};
  bool has_steps() const {
    return origin_step[0] || origin_step[1] || origin_step[2] || origin_step[3] || origin_step[4];
  }

  // "problem text | words"; words that are zero are left out.
  std::string text() const;
  // The inverse; throws Error on an unknown or repeated word or sizes that do not fit together.
  static Case parse(std::string_view line);
  bool operator==(const Case& other) const { return text() == other.text(); }
};

// The cases of a file: one per line, # starts a comment. Throws Error with the line's number.
struct Line {
  int number;
  std::string text;
};
std::vector<Line> read_lines(const std::string& path);

}  // namespace tea::kit
