// Consume or refuse: for every field of a problem a case where it matters, so that an engine that
// ignored the field would be caught. A field without a row fails the test.
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>
#include <sstream>

#include "kit/check.h"

namespace tea::kit {
namespace {

enum class Effect {
  kResult,    // numbers change by more than the bounds allow
  kOutputs,   // other tensors, or other numbers of elements, come out
  kMemory,    // elements lie elsewhere or in another type; elsewhere is poison
  kSameBits,  // a promise about bits, which check() and invariance.h ask for
  kRefused    // any other value is an error
};

struct Row {
  const char* field;
  Effect effect;
  const char* base;
  const char* changes;  // words that replace those of the base, or are added; then | and more words
};

constexpr const char* kBase =
    "dtype=bf16 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 seqlen_kv=9 | seed=5";
constexpr const char* kFp8 =
    "dtype=e4m3 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 seqlen_kv=9 | seed=5";
constexpr const char* kBias =
    "dtype=bf16 training=1 bias=post_scale heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 "
    "seqlen_kv=9 | seed=5";
constexpr const char* kSlopes =
    "dtype=bf16 training=1 alibi=slopes heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 "
    "seqlen_kv=9 | seed=5";
constexpr const char* kCausal =
    "dtype=bf16 training=1 causal=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 "
    "seqlen_kv=9 | seed=5";
constexpr const char* kRagged =
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=4 heads_kv=2 dim_qk=16 | seed=5 "
    "lens_q=3,6 lens_kv=5,9";
constexpr const char* kPadded =
    "dtype=bf16 training=1 q_form=padded kv_form=padded heads_q=4 heads_kv=2 dim_qk=16 batch=2 "
    "seqlen_q=6 seqlen_kv=9 | seed=5 lens_q=3,6 lens_kv=5,9";
constexpr const char* kPaged =
    "dtype=bf16 kv_form=paged page_size=4 heads_q=4 heads_kv=2 dim_qk=16 seqlen_q=6 | seed=5 "
    "lens_kv=5,9";
constexpr const char* kGaps =
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged gaps=1 heads_q=4 heads_kv=2 dim_qk=16 | "
    "seed=5 lens_q=3,6 lens_kv=5,9";
constexpr const char* kDropout =
    "dtype=bf16 training=1 dropout=0.5 heads_q=1 heads_kv=1 dim_qk=16 batch=2 seqlen_q=6 "
    "seqlen_kv=9 | seed=5";
constexpr const char* kCache =
    "dtype=bf16 kv_dtype=e4m3 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=6 seqlen_kv=9 | "
    "seed=5 scales=own";

constexpr auto kResult = Effect::kResult, kOutputs = Effect::kOutputs, kMemory = Effect::kMemory,
               kSameBits = Effect::kSameBits, kRefused = Effect::kRefused;
constexpr Row kRows[] = {
    {"struct_size", kRefused, kBase, ""},
    {"dtype", kMemory, kBase, "dtype=fp16"},
    {"o_dtype", kMemory, kFp8, "o_dtype=bf16"},
    {"dout_dtype", kMemory, kFp8, "dout_dtype=e5m2"},
    {"dqkv_dtype", kMemory, kFp8, "dqkv_dtype=bf16"},
    {"bias_dtype", kMemory, kBias, "bias_dtype=fp32"},
    {"training", kOutputs, kBase, "training=0"},
    {"deterministic", kSameBits, kBase, "deterministic=1"},
    {"outputs", kOutputs, kBase, "outputs=max+sum_exp"},
    {"lse_gradient", kResult, kBase, "lse_gradient=1"},
    {"q_form", kResult, kBase, "q_form=padded | lens_q=3,6"},
    {"kv_form", kResult, kBase, "kv_form=padded | lens_kv=5,9"},
    {"gaps", kMemory, kRagged, "gaps=1 | gap=2"},
    {"page_size", kMemory, kPaged, "page_size=2"},
    {"heads_q", kOutputs, kBase, "heads_q=6"},
    {"heads_kv", kOutputs, kBase, "heads_kv=4"},
    {"dim_qk", kOutputs, kBase, "dim_qk=24"},
    {"dim_v", kOutputs, kBase, "dim_v=24"},
    {"batch", kOutputs, kBase, "batch=3"},
    {"seqlen_q", kOutputs, kBase, "seqlen_q=7"},
    {"seqlen_kv", kOutputs, kBase, "seqlen_kv=8"},
    {"causal", kResult, kBase, "causal=1"},
    {"bottom_right", kResult, kCausal, "bottom_right=1"},
    {"window_left", kResult, kBase, "window_left=3"},
    {"window_right", kResult, kBase, "window_right=3"},
    {"bias", kResult, kBase, "bias=post_scale"},
    {"bias_broadcast", kResult, kBias, "bias_broadcast=head+row"},
    {"alibi", kResult, kBase, "alibi=standard"},
    {"softmax", kResult, kBase, "softmax=learnable"},
    {"softcap", kResult, kBase, "softcap=1"},
    {"dropout", kResult, kBase, "dropout=0.5"},
    {"scale", kResult, kBase, "scale=0.5 has_scale=1"},
    {"has_scale", kResult, kBase, "has_scale=1"},
    {"q", kMemory, kBase, "q=400,64,16"},
    {"k", kMemory, kBase, "k=16,64,32"},
    {"v", kMemory, kBase, "v=400,40,16"},
    {"o", kMemory, kBase, "o=64,128,16"},
    {"dout", kMemory, kBase, "dout=400,64,16"},
    {"dq", kMemory, kBase, "dq=384,16,96"},
    {"dk", kMemory, kBase, "dk=400,40,16"},
    {"dv", kMemory, kBase, "dv=16,64,32"},
    {"lse", kMemory, kBase, "lse=1,8,2"},
    {"bias_stride", kMemory, kBias, "bias_stride=256,64,10,1"},
    {"dbias_stride", kMemory, kBias, "dbias_stride=240,60,1,6"},
    {"slopes_stride", kResult, kSlopes, "slopes_stride=6"},
    {"table_k_stride", kMemory, kPaged, "table_k_stride=7"},
    {"table_v_stride", kMemory, kPaged, "table_v_stride=7"},
    {"alignment", kMemory, kBase, "alignment=2"},
    {"kv_dtype", kMemory, kPaged, "kv_dtype=e4m3"},
    {"kv_scale", kResult, kCache, "kv_scale=head"},
    {"batch_invariant", kSameBits, kBase, "batch_invariant=1"},
    {"max_ctas", kSameBits, kBase, "max_ctas=3"},
};

// And what only a run says.
constexpr Row kRunRows[] = {
    {"seed and offset", kResult, kDropout, "| seed=6"},
    {"origin.batch", kResult, kDropout, "| origin=1,0,0,0"},
    {"origin.head", kResult, kDropout, "| origin=0,1,0,0"},
    {"origin.row", kResult, kCausal, "| origin=0,0,1,0"},
    {"origin.column", kResult, kCausal, "| origin=0,0,0,1"},
    {"origin_device", kResult, kCausal, "| origin=0,0,1,0 origin_in_memory=1"},
    {"shift", kResult, kCausal, "| shift=1"},
    {"origin_stride: batch", kResult, kDropout, "| origin_step=1,0,0,0,0"},
    {"origin_stride: head", kResult, kDropout, "| origin_step=0,1,0,0,0"},
    {"origin_stride: row", kResult, kCausal, "| origin_step=0,0,1,0,0"},
    {"origin_stride: column", kResult, kCausal, "| origin_step=0,0,0,1,0"},
    {"origin_stride: shift", kResult, kCausal, "| origin_step=0,0,0,0,1"},
    {"cu_seqlens_q", kOutputs, kPadded, "| lens_q=2,6"},
    {"cu_seqlens_kv", kResult, kPadded, "| lens_kv=4,9"},
    {"offsets", kMemory, kGaps, "| gap=2"},
    {"table_v", kMemory, kPaged, "| one_table=1"},
};

using Words = std::map<std::string, std::string>;  // by name

// The words of one side of the bar.
void read_words(const std::string& text, bool after, Words& words) {
  const size_t bar = std::min(text.find('|'), text.size());
  std::istringstream in(after ? text.substr(std::min(bar + 1, text.size())) : text.substr(0, bar));
  for (std::string word; in >> word;) words[word.substr(0, word.find('='))] = word;
}

// `text` with words of `changes` in place of its own, on the same side of the bar.
std::string merged(const std::string& text, const std::string& changes) {
  std::string out;
  for (const bool after : {false, true}) {
    Words words;
    read_words(text, after, words);
    read_words(changes, after, words);
    if (after) out += "| ";
    for (const auto& [name, word] : words) out.append(word).append(" ");
  }
  return out;
}

oracle::Result solved(const Case& c) {
  const Inputs inputs(c);
  return oracle::solve(inputs.logical(), precision_of("reference", inputs.problem()));
}

// Whether some number of `ignored` would be wrong as an answer to `wanted`.
bool tells_apart(const oracle::Tensor& wanted, const oracle::Tensor& ignored) {
  if (wanted.value.size() != ignored.value.size()) return true;
  for (size_t i = 0; i < wanted.value.size(); ++i)
    if (!wanted.accepts(i, ignored.value[i])) return true;
  return false;
}

bool results_differ(const Case& base, const Case& changed) {
  const oracle::Result ignored = solved(base), wanted = solved(changed);
  return tells_apart(wanted.o, ignored.o) || tells_apart(wanted.lse, ignored.lse) ||
         tells_apart(wanted.dq, ignored.dq) || tells_apart(wanted.dk, ignored.dk);
}

// Where every element lies, in bytes from its tensor's start; or how little that start is aligned.
std::vector<int64_t> addresses(const Case& c) {
  Inputs inputs(c);
  inputs.run(0);
  std::vector<int64_t> out;
  for (int t = 0; t < TEA_TENSOR_COUNT; ++t) {
    const Place& place = inputs.place(static_cast<tea_tensor>(t));
    if (!place.used) continue;
    out.push_back(static_cast<int64_t>(reinterpret_cast<uintptr_t>(inputs.memory(place.id)) % 16));
    out.push_back(place.dtype);
    if (place.kind == Kind::kInteger) out.push_back(place.elements());
    if (place.kind == Kind::kFlat || place.kind == Kind::kInteger) continue;
    each_valid(place, inputs.problem(), inputs.extents(),
               [&](int64_t element, const Index&) { out.push_back(element); });
  }
  return out;
}

std::string shape_of_outputs(const Report& report) {
  std::string out;
  for (const Closeness& c : report.tensors) out += c.tensor + std::to_string(c.elements) + " ";
  return out;
}

bool matters(const Row& row, const Case& base, const Case& changed, const Report& report) {
  switch (row.effect) {
    case Effect::kResult:
      return results_differ(base, changed);
    case Effect::kMemory:
      return addresses(base) != addresses(changed);
    case Effect::kOutputs:
      return shape_of_outputs(check(base, "reference")) != shape_of_outputs(report);
    case Effect::kSameBits:
      return changed.problem.deterministic || changed.problem.batch_invariant ||
             changed.problem.max_ctas;
    case Effect::kRefused:
      break;
  }
  Problem p = base.problem;
  for (const Field& f : problem_fields())
    if (f.name == row.field) {
      const int32_t one = 1;
      std::memcpy(reinterpret_cast<char*>(&p) + f.offset, &one, sizeof one);
    }
  return tea_problem_check(&p, nullptr) == TEA_INVALID;
}

void expect_consumed(const Row& row) {
  SCOPED_TRACE(row.field);
  const Case base = Case::parse(row.base), changed = Case::parse(merged(row.base, row.changes));
  const Report report = check(changed, "reference");
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_TRUE(matters(row, base, changed, report)) << changed.text();
}

TEST(Consume, EveryFieldHasARowAndEveryRowAField) {
  std::multiset<std::string_view> rows, fields;
  for (const Row& row : kRows) rows.insert(row.field);
  for (const Field& field : problem_fields()) fields.insert(field.name);
  EXPECT_EQ(rows, fields);
}

TEST(Consume, EveryFieldOfAProblemMatters) {
  for (const Row& row : kRows) expect_consumed(row);
}

TEST(Consume, EveryWordOfARunMatters) {
  for (const Row& row : kRunRows) expect_consumed(row);
}

}  // namespace
}  // namespace tea::kit
