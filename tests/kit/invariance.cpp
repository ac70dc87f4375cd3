#include "kit/invariance.h"

#include <bit>
#include <map>
#include <tuple>

#include "core/error.h"
#include "core/plan.h"
#include "kit/check.h"
#include "kit/mirror.h"
#include "kit/random.h"

namespace tea::kit {
namespace {

// Its values are zero, since fill() draws others.
std::string case_text(const std::string& problem, const std::vector<Chunk>& batch) {
  std::string q, kv;
  for (const Chunk& c : batch) {
    q += (q.empty() ? "" : ",") + std::to_string(c.rows);
    kv += (kv.empty() ? "" : ",") + std::to_string(c.first + c.rows);
  }
  return problem + " outputs=lse causal=1 bottom_right=1 | values=zero lens_q=" + q +
         " lens_kv=" + kv;
}

// Rows of Q, K and V that depend on the sequence and on the row's position in it.
void fill(Inputs& inputs, const std::vector<Chunk>& batch) {
  for (const tea_tensor t : {TEA_Q, TEA_K, TEA_V})
    inputs.replace(t, [&](const Index& at) {
      const Chunk& c = batch[static_cast<size_t>(at[0])];
      const int64_t row = at[2] + (t == TEA_Q ? c.first : 0);
      const auto of = [](int64_t x) { return static_cast<uint64_t>(x); };
      Random random(of(c.number * 3 + t), (of(row) << 24) + (of(at[1]) << 12) + of(at[3]));
      return random.normal();
    });
  inputs.fill(Poison::kNan);
}

void run_forward(Inputs& inputs, std::string_view engine, int device) {
  const Problem& p = inputs.problem();
  const PlanRef plan = planner().plan(p, device, engine);
  const uint64_t bytes = workspace_for(p, inputs.run(0), device, engine, Direction::kForward);
  if (device == kHost) return tea::forward(*plan, &inputs.run(bytes));
  Mirror mirror(gpu_of_thread(device), inputs);
  tea::forward(*plan, &mirror.upload(bytes));
  mirror.fetch();
}

constexpr int64_t kLseColumn = -1;

uint64_t bits(double x) { return std::bit_cast<uint64_t>(x); }

// The first value of every element, by row, since there are millions of elements.
class FirstValues {
 public:
  using Row = std::tuple<int64_t, int64_t, int64_t>;  // sequence, head, row of the sequence

  // The first value that was given for an element.
  double first(const Row& row, int64_t column, double value) {
    if (!columns_ || row != row_) row_ = row, columns_ = &rows_[row];
    const auto at = static_cast<size_t>(column - kLseColumn);
    if (at >= columns_->size()) columns_->resize(at + 1, kUnknown);
    double& known = (*columns_)[at];
    if (bits(known) == bits(kUnknown)) known = value;
    return known;
  }

 private:
  // A NaN that no computation gives.
  static constexpr double kUnknown = std::bit_cast<double>(~uint64_t{0});

  std::map<Row, std::vector<double>> rows_;
  Row row_;  // that of columns_
  std::vector<double>* columns_ = nullptr;
};

}  // namespace

std::vector<std::string> invariance_violations(const std::string& problem, std::string_view engine,
                                               int device,
                                               const std::vector<std::vector<Chunk>>& batches) {
  std::vector<std::string> out;
  FirstValues known;
  for (const std::vector<Chunk>& batch : batches) {
    const Case c = Case::parse(case_text(problem, batch));
    Inputs inputs(c);
    fill(inputs, batch);
    run_forward(inputs, engine, device);
    std::vector<bool> is_reported(batch.size());
    const auto compare = [&](const Index& at, int64_t column, double value) {
      const auto b = static_cast<size_t>(at[0]);
      const Chunk& chunk = batch[b];
      const int64_t row = chunk.first + at[2];
      const double before = known.first({chunk.number, at[1], row}, column, value);
      if (bits(before) == bits(value) || is_reported[b]) return;
      is_reported[b] = true;
      out.push_back(c.text() + ": sequence " + std::to_string(chunk.number) + ", head " +
                    std::to_string(at[1]) + ", row " + std::to_string(row) +
                    (column == kLseColumn ? ", LSE" : ", column " + std::to_string(column)) +
                    ": got " + shown(value) + ", before " + shown(before));
    };
    for (const tea_tensor t : {TEA_O, TEA_LSE})
      each_valid(inputs.place(t), inputs.problem(), inputs.extents(),
                 [&](int64_t, const Index& at) {
                   compare(at, t == TEA_O ? at[3] : kLseColumn, inputs.value(t, at));
                 });
  }
  return out;
}

std::vector<std::string> invariance_violations(const std::string& problem, std::string_view engine,
                                               int device, int64_t length) {
  std::vector<std::vector<Chunk>> batches = {{{1, 0, length}}};
  batches.push_back({{2, 5, 3}, {1, 0, length}, {3, 0, 2 * length + 17}, {4, length, 1}});
  for (const int64_t size : {length / 2 + 1, length / 7 + 1, int64_t{97}}) {
    for (int64_t first = 0; first < length; first += size) {
      const Chunk chunk = {1, first, std::min(size, length - first)};
      if (first / size % 2)
        batches.push_back({chunk});
      else
        batches.push_back({{5, 0, 40}, chunk, {2, 0, 8}});
    }
  }
  for (int64_t row = std::max<int64_t>(length - 3, 0); row < length; ++row) {
    batches.push_back({{1, row, 1}});
    batches.push_back(std::vector<Chunk>(9, {1, row, 1}));
    batches.push_back({{6, 3 * length, 2}, {1, row, 1}, {2, 5, 3}});
  }
  return invariance_violations(problem, engine, device, batches);
}

}  // namespace tea::kit
