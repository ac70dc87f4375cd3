// Invalid lengths, offsets and page tables, on every engine of the host and through the C API:
// one word at a time is replaced, in tensors that end, or begin, exactly at a page without access
// rights. Nothing crashes, the status word reports exactly the invalid array, and the sequences
// that the word has no part in are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>

#include "kit/check.h"
#include "kit/guarded.h"
#include "kit/random.h"
#include "kit/share.h"

namespace tea::cpu {
namespace {

using Floats = std::vector<float>;
using Words = std::vector<int32_t>;

constexpr int64_t kHeadsQ = 2, kHeadsKv = 1, kDimQk = 16, kDimV = 8, kPageSize = 16;
constexpr int64_t kBatch = 4, kTablePages = 5, kPages = 11;

struct Form {
  const char* words;  // of the problem
  bool ragged, gaps, paged;
  int64_t max_q, max_kv;
  std::array<int64_t, kBatch> len_q, len_kv;
};
constexpr std::array<int64_t, kBatch> kShort{3, 9, 0, 5}, kLong{70, 2, 33, 12}, kEven{3, 3, 3, 3};
constexpr Form kForms[] = {
    {"training=1 q_form=padded kv_form=padded batch=4 seqlen_q=9 seqlen_kv=70", false, false, false,
     9, 70, kShort, kLong},
    {"training=1 q_form=ragged kv_form=ragged", true, false, false, 9, 70, kShort, kLong},
    {"training=1 q_form=ragged kv_form=ragged gaps=1", true, true, false, 9, 70, kShort, kLong},
    {"outputs=lse kv_form=paged page_size=16 seqlen_q=3", false, false, true, 3, 70, kEven, kLong},
};

// ------------------------------------------------------------------------- what is in the memory

// The tensors of one sequence, dense: rows [length][heads][dim], LSE [heads][length], bias
// [heads][length_q][length_kv].
struct Sequence {
  int64_t q, kv;
  std::map<tea_tensor, Floats> data;
};

std::map<tea_tensor, int64_t> sizes(int64_t q, int64_t kv) {
  return {{TEA_Q, q * kHeadsQ * kDimQk},    {TEA_K, kv * kHeadsKv * kDimQk},
          {TEA_V, kv * kHeadsKv * kDimV},   {TEA_O, q * kHeadsQ * kDimV},
          {TEA_LSE, q * kHeadsQ},           {TEA_BIAS, kHeadsQ * q * kv},
          {TEA_DOUT, q * kHeadsQ * kDimV},  {TEA_DQ, q * kHeadsQ * kDimQk},
          {TEA_DK, kv * kHeadsKv * kDimQk}, {TEA_DV, kv * kHeadsKv * kDimV},
          {TEA_DBIAS, kHeadsQ * q * kv}};
}
constexpr tea_tensor kInputs[] = {TEA_Q, TEA_K, TEA_V, TEA_BIAS, TEA_DOUT};
constexpr tea_tensor kForwardOutputs[] = {TEA_O, TEA_LSE};
constexpr tea_tensor kGradients[] = {TEA_DQ, TEA_DK, TEA_DV, TEA_DBIAS};

class Plan {
 public:
  Plan(const std::string& words, const std::string& engine) {
    tea_problem problem{};
    const std::string text =
        "dtype=fp32 heads_q=2 heads_kv=1 dim_qk=16 dim_v=8 alignment=4 bias=post_scale " + words;
    EXPECT_EQ(tea_problem_parse(text.c_str(), &problem), TEA_OK) << tea_error();
    EXPECT_EQ(tea_plan_create(&problem, -1, engine.c_str(), &plan_), TEA_OK) << tea_error();
    training_ = problem.training;
  }
  ~Plan() { tea_plan_release(plan_); }
  Plan(const Plan&) = delete;

  bool training() const { return training_; }
  void execute(tea_run run) const {
    // Invalid metadata can make sequences overlap. Several threads then write the shared rows, a
    // data race that ThreadSanitizer reports correctly.
    if (kit::kThreadSanitizer) run.parallel_for = one_after_another;
    ASSERT_EQ(tea_forward(plan_, &run), TEA_OK) << tea_error();
    if (!training_) return;
    ASSERT_EQ(tea_backward(plan_, &run), TEA_OK) << tea_error();
  }

 private:
  static void one_after_another(void*, int64_t count, void (*body)(void*, int64_t),
                                void* argument) {
    for (int64_t i = 0; i < count; ++i) body(argument, i);
  }

  tea_plan* plan_ = nullptr;
  bool training_ = false;
};

// Random inputs, and the outputs of a problem that holds this sequence only.
Sequence make_sequence(int64_t q, int64_t kv, uint64_t seed, const std::string& engine) {
  Sequence s{q, kv, {}};
  kit::Random random(seed);
  for (const auto& [t, size] : sizes(q, kv)) s.data[t].resize(static_cast<size_t>(size));
  for (const tea_tensor t : kInputs)
    for (float& x : s.data[t]) x = static_cast<float>(random.normal());
  const Plan plan(
      "training=1 batch=1 seqlen_q=" + std::to_string(q) + " seqlen_kv=" + std::to_string(kv),
      engine);
  std::array<void*, TEA_TENSOR_COUNT> tensors{};
  for (auto& [t, values] : s.data) tensors[t] = values.data();
  tea_run run{};
  run.struct_size = sizeof run, run.tensors = tensors.data(), run.tensor_count = TEA_TENSOR_COUNT;
  plan.execute(run);
  return s;
}

// -------------------------------------------------------------------- what the metadata must mean

struct Metadata {
  std::map<tea_tensor, Words> words;
};

struct Extent {
  int64_t start, length;
  bool valid;
  bool operator==(const Extent&) const = default;
};

struct Side {
  tea_tensor cu, offsets;
  int64_t capacity, tokens;
};

// The rule of te_attention.h: invalid values are clamped to the capacity and reported.
Extent extent(const Form& form, const Metadata& m, const Side& side, int64_t n) {
  if (form.paged && side.cu == TEA_CU_SEQLENS_Q) return {0, form.max_q, true};
  const auto i = static_cast<size_t>(n);
  const Words& cu = m.words.at(side.cu);
  const int64_t length = int64_t{cu[i + 1]} - cu[i];
  Extent e{0, std::clamp<int64_t>(length, 0, side.capacity), length >= 0};
  e.valid = e.length == length;
  if (!form.ragged || e.length == 0) return e;
  e.start = form.gaps ? m.words.at(side.offsets)[i] : cu[i];
  if (e.start < 0 || e.start >= side.tokens) return {0, 0, false};
  const int64_t room = side.tokens - e.start;
  return {e.start, std::min(e.length, room), e.valid && e.length <= room};
}

bool overlap(const Extent& a, const Extent& b) {
  return a.start < b.start + b.length && b.start < a.start + a.length;
}

// ------------------------------------------------------------------------------- one batch of four

class Batch {
 public:
  Batch(const Form& form, const std::string& engine, kit::Flush flush)
      : form_(form), plan_(form.words, engine) {
    for (size_t n = 0; n < kBatch; ++n)
      sequences_.push_back(make_sequence(form.len_q[n], form.len_kv[n], n + 1, engine));
    make_metadata();
    make_memory(flush);
  }

  const Metadata& clean() const { return clean_; }
  int64_t compared() const { return compared_; }

  // Runs with these words; checks the status and every sequence that they leave alone.
  void check(const Metadata& m, const std::string& what) {
    SCOPED_TRACE(what);
    fill(m);
    int32_t* status = status_->as<int32_t>();
    *status = 0;
    tea_run run{};
    run.struct_size = sizeof run, run.tensors = tensors_.data();
    run.tensor_count = TEA_TENSOR_COUNT, run.status = status;
    run.batch = kBatch, run.max_kv = form_.max_kv;
    if (form_.ragged) run.max_q = form_.max_q, run.tokens_q = tokens_q_, run.tokens_kv = tokens_kv_;
    if (form_.paged) run.pages_k = run.pages_v = kPages;
    if (!form_.paged && !form_.ragged) run.batch = run.max_kv = 0;
    plan_.execute(run);
    EXPECT_EQ(*status, expected_status(m));
    for (int64_t n = 0; n < kBatch; ++n)
      if (left_alone(m, n)) compare(n);
  }

 private:
  Side side_q() const { return {TEA_CU_SEQLENS_Q, TEA_OFFSETS_Q, form_.max_q, tokens_q_}; }
  Side side_kv() const { return {TEA_CU_SEQLENS_KV, TEA_OFFSETS_KV, form_.max_kv, tokens_kv_}; }

  // Lengths, gaps of two rows where there may be some, and pages in reverse order.
  void make_metadata() {
    auto& w = clean_.words;
    w[TEA_CU_SEQLENS_Q] = w[TEA_CU_SEQLENS_KV] = w[TEA_OFFSETS_Q] = w[TEA_OFFSETS_KV] = {0};
    const int64_t gap = form_.gaps ? 2 : 0;
    int32_t next = kPages - 1;
    for (size_t n = 0; n < kBatch; ++n) {
      const auto add = [&](tea_tensor t, int64_t by) {
        w[t].push_back(w[t].back() + static_cast<int32_t>(by));
      };
      add(TEA_CU_SEQLENS_Q, form_.len_q[n]), add(TEA_CU_SEQLENS_KV, form_.len_kv[n]);
      add(TEA_OFFSETS_Q, form_.len_q[n] + gap), add(TEA_OFFSETS_KV, form_.len_kv[n] + gap);
      for (int64_t page = 0; page < kTablePages; ++page) {
        const bool used = page * kPageSize < form_.len_kv[n];
        w[TEA_TABLE_K].push_back(used ? next : -1);
        w[TEA_TABLE_V].push_back(used ? kPages - 1 - next-- : -1);
      }
    }
    tokens_q_ = w[TEA_OFFSETS_Q].back(), tokens_kv_ = w[TEA_OFFSETS_KV].back();
    std::erase_if(w, [&](const auto& entry) {
      const tea_tensor t = entry.first;
      if (t == TEA_TABLE_K || t == TEA_TABLE_V) return !form_.paged;
      if (t == TEA_OFFSETS_Q || t == TEA_OFFSETS_KV) return !form_.gaps;
      return form_.paged && t == TEA_CU_SEQLENS_Q;
    });
  }

  void make_memory(kit::Flush flush) {
    const int64_t rows_q = form_.ragged ? tokens_q_ : kBatch * form_.max_q;
    const int64_t padded_kv = kBatch * form_.max_kv;
    const int64_t rows_kv =
        form_.paged ? kPages * kPageSize : (form_.ragged ? tokens_kv_ : padded_kv);
    const auto add = [&](tea_tensor t, size_t count) {
      memory_[t] = std::make_unique<kit::Guarded>(count * 4, flush);
      tensors_[t] = memory_[t]->data();
    };
    for (const auto& [t, size] : sizes(rows_q, rows_kv)) {
      const bool bias = t == TEA_BIAS || t == TEA_DBIAS;
      if (!plan_.training() && t >= TEA_DOUT) continue;
      add(t, static_cast<size_t>(bias ? kBatch * kHeadsQ * form_.max_q * form_.max_kv : size));
    }
    for (const auto& [t, words] : clean_.words) add(t, words.size());
    status_ = std::make_unique<kit::Guarded>(sizeof(int32_t), flush);
  }

  // Inputs at the places that the clean metadata gives them, NaN everywhere else.
  void fill(const Metadata& m) {
    for (const auto& [t, at] : memory_) std::memset(at->data(), 0xFF, at->size());
    for (const auto& [t, words] : m.words)
      std::memcpy(tensors_[t], words.data(), words.size() * sizeof words[0]);
    for (const tea_tensor t : kInputs)
      for (int64_t n = 0; n < kBatch && tensors_[t]; ++n) {
        const Floats& from = sequences_[static_cast<size_t>(n)].data.at(t);
        for (size_t i = 0; i < from.size(); ++i)
          memory_[t]->as<float>()[index(t, n, static_cast<int64_t>(i))] = from[i];
      }
  }

  int64_t row(tea_tensor t, bool query, int64_t n, int64_t i) const {
    if (form_.ragged) return extent(form_, clean_, query ? side_q() : side_kv(), n).start + i;
    if (query || !form_.paged) return n * (query ? form_.max_q : form_.max_kv) + i;
    const Words& table = clean_.words.at(t == TEA_K ? TEA_TABLE_K : TEA_TABLE_V);
    return table[static_cast<size_t>(n * kTablePages + i / kPageSize)] * kPageSize + i % kPageSize;
  }

  // The index of element `flat` of sequence n in the memory of the batch.
  int64_t index(tea_tensor t, int64_t n, int64_t flat) const {
    const Sequence& s = sequences_[static_cast<size_t>(n)];
    if (t == TEA_BIAS || t == TEA_DBIAS) {
      const int64_t head_row = n * kHeadsQ * form_.max_q + flat / s.kv / s.q * form_.max_q;
      return (head_row + flat / s.kv % s.q) * form_.max_kv + flat % s.kv;
    }
    if (t == TEA_LSE) {
      const int64_t h = flat / s.q, i = flat % s.q;
      return form_.ragged ? row(t, true, n, i) * kHeadsQ + h : (n * kHeadsQ + h) * form_.max_q + i;
    }
    const bool query = t == TEA_Q || t == TEA_O || t == TEA_DOUT || t == TEA_DQ;
    const int64_t width = sizes(1, 1).at(t);
    return row(t, query, n, flat / width) * width + flat % width;
  }

  int64_t used_pages(const Metadata& m, int64_t n) const {
    return (extent(form_, m, side_kv(), n).length + kPageSize - 1) / kPageSize;
  }

  int32_t expected_status(const Metadata& m) const {
    int32_t status = 0;
    for (int64_t n = 0; n < kBatch; ++n) {
      const bool valid =
          extent(form_, m, side_q(), n).valid && extent(form_, m, side_kv(), n).valid;
      if (!valid) status |= TEA_STATUS_BAD_LENGTHS;
      for (const tea_tensor t : {TEA_TABLE_K, TEA_TABLE_V})
        for (int64_t page = 0; form_.paged && page < used_pages(m, n); ++page) {
          const int32_t entry = m.words.at(t)[static_cast<size_t>(n * kTablePages + page)];
          if (entry < 0 || entry >= kPages) status |= TEA_STATUS_BAD_PAGE;
        }
    }
    return status;
  }

  // Sequence n means what it did, and none that the words have moved writes into its rows.
  bool left_alone(const Metadata& m, int64_t n) const {
    for (const Side& side : {side_q(), side_kv()}) {
      const Extent mine = extent(form_, m, side, n);
      if (mine != extent(form_, clean_, side, n)) return false;
      for (int64_t other = 0; form_.ragged && other < kBatch; ++other)
        if (other != n && overlap(mine, extent(form_, m, side, other))) return false;
    }
    for (const tea_tensor t : {TEA_TABLE_K, TEA_TABLE_V})
      for (int64_t page = 0; form_.paged && page < used_pages(m, n); ++page) {
        const auto at = static_cast<size_t>(n * kTablePages + page);
        if (m.words.at(t)[at] != clean_.words.at(t)[at]) return false;
      }
    return true;
  }

  void compare(int64_t n) {
    const Sequence& s = sequences_[static_cast<size_t>(n)];
    ++compared_;
    const auto each = [&](std::span<const tea_tensor> tensors) {
      for (const tea_tensor t : tensors)
        for (size_t i = 0; i < s.data.at(t).size(); ++i) {
          const float want = s.data.at(t)[i];
          const float got = memory_.at(t)->as<float>()[index(t, n, static_cast<int64_t>(i))];
          // Of values near one; the two runs may cut the keys differently.
          ASSERT_LE(std::fabs(got - want), 2e-5f * (1 + std::fabs(want)))
              << "sequence " << n << ", tensor " << t << "[" << i << "]: " << got << ", " << want;
        }
    };
    each(kForwardOutputs);
    if (plan_.training()) each(kGradients);
  }

  const Form& form_;
  Plan plan_;
  std::vector<Sequence> sequences_;
  Metadata clean_;
  int64_t tokens_q_ = 0, tokens_kv_ = 0, compared_ = 0;
  std::map<tea_tensor, std::unique_ptr<kit::Guarded>> memory_;
  std::unique_ptr<kit::Guarded> status_;
  std::array<void*, TEA_TENSOR_COUNT> tensors_{};
};

// Replaces each word in turn by each of these, some of them relative to what is there.
void try_every_word(Batch& batch) {
  int number = 0;
  for (const auto& [t, words] : batch.clean().words)
    for (size_t i = 0; i < words.size(); ++i)
      for (const int32_t bad :
           {INT_MIN, -1, 0, words[i] - 1, words[i] + 1, words[i] + 2, 1000, INT_MAX}) {
        if (number++ % kit::kEvery) continue;
        Metadata m = batch.clean();
        m.words[t][i] = bad;
        batch.check(m, "tensor " + std::to_string(t) + "[" + std::to_string(i) +
                           "] = " + std::to_string(bad));
        if (testing::Test::HasFailure()) return;
      }
}

class BadMetadata : public testing::TestWithParam<std::string> {};

TEST_P(BadMetadata, IsClampedAndReportedAndHurtsNoOtherSequence) {
  kit::say_share("bad words");
  for (const Form& form : kForms)
    for (const kit::Flush flush : {kit::Flush::kStart, kit::Flush::kEnd}) {
      SCOPED_TRACE(form.words);
      Batch batch(form, GetParam(), flush);
      batch.check(batch.clean(), "clean");
      ASSERT_EQ(batch.compared(), kBatch);
      try_every_word(batch);
      // Every word leaves some sequence alone more often than not.
      EXPECT_GT(batch.compared(), 100 / kit::kEvery);
    }
}

// All words are invalid at once.
TEST_P(BadMetadata, OfEverySequenceIsSurvived) {
  for (const Form& form : kForms)
    for (const kit::Flush flush : {kit::Flush::kStart, kit::Flush::kEnd}) {
      SCOPED_TRACE(form.words);
      Batch batch(form, GetParam(), flush);
      for (uint64_t seed = 1; seed <= 40; seed += kit::kEvery) {
        kit::Random random(seed);
        Metadata m = batch.clean();
        for (auto& [t, words] : m.words)
          for (int32_t& word : words)
            word = static_cast<int32_t>(random.one_in(2) ? random.next()
                                                         : static_cast<uint64_t>(random.below(90)));
        batch.check(m, "seed " + std::to_string(seed));
      }
    }
}

std::string identifier(const testing::TestParamInfo<std::string>& engine) {
  std::string name = engine.param;
  std::ranges::replace(name, '-', '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Engines, BadMetadata, testing::ValuesIn(kit::host_engines()), identifier);

}  // namespace
}  // namespace tea::cpu
