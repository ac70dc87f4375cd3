// The results of a packed row, in all decoding kernels.
#pragma once
#include "hopper/decode/scheduler.cuh"
#include "hopper/forward/score_mod.cuh"

namespace tea::hopper::decode {

struct RowOutput {
  int64_t at;    // the index of its first element of O
  float factor;  // that normalises O; 0: the row attends to no key, and O is 0 even if it is NaN
};

// From the maximum and the sum of a packed row of a head of K and V. Writes its statistics if
// `writes_statistics`.
template <bool kIsPlain>
TEA_DEVICE RowOutput finish_row(const KernelParams& p, const WorkItem& item, int head_kv, int row,
                                float row_max, float sum, bool writes_statistics) {
  const AttentionArguments& a = p.args;
  const int query = row / p.group, head = head_kv * p.group + row % p.group;
  auto result = OnlineSoftmax::row_result(row_max, sum, p.unit);
  const float sink = sink_of(a, head);
  if (sink != kMinusInfinity) OnlineSoftmax::add_sink(result, sink);
  const bool ragged = has_ragged_queries<kIsPlain>(p);
  const int64_t batch = ragged ? 0 : item.batch;
  const int64_t position = query + (ragged ? item.bounds.start_q : 0);
  if (writes_statistics) {
    const RowStatistics& x = a.statistics;
    const int64_t at = batch * x.batch + position * x.seq + head * x.head;
    if (x.lse) x.lse[at] = result.lse;
    if (x.max) x.max[at] = result.max;
    if (x.sum_exp) x.sum_exp[at] = result.sum_exp;
  }
  return {batch * a.o.batch + position * a.o.seq + head * a.o.head, result.factor};
}

}  // namespace tea::hopper::decode
