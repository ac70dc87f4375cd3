// A backward pass for the tests of src/hopper/backward: that of a forward case, with LSE gradients
// and sinks. Memory around the tensors is NaN, and so are rows that attend to nothing, keys that no
// row attends to, and the workspace.
#pragma once
#include <optional>

#include "hopper/backward/backward.h"
#include "hopper/forward/forward_case.h"

namespace tea::primitives {

struct BackwardCase : Case {
  bool dlse = false, sink = false;

  std::string name() const { return Case::name() + (dlse ? "dlse " : "") + (sink ? "sink " : ""); }
  Columns attending() const {
    return attending_rows(
        make_sequence_pair(rule, 0, dense_sequence(n.rows_q), dense_sequence(n.rows_kv), 0, 0, 0));
  }
};

inline std::vector<float> normal_floats(size_t n) {
  std::vector<float> v((n + 1) / 2 * 2);  // chains copy eight bytes at once
  for (float& x : v) x = random_normal();
  return v;
}

struct BackwardData : Data {
  Tensor dout, dq, dk, dv;
  std::vector<float> dlse, sink, dsink;

  explicit BackwardData(const BackwardCase& c)
      : Data(c),
        dout(c.layout, c.h.batch, c.h.heads, c.n.rows_q, c.dim_v, kNaN),
        dq(c.layout, c.h.batch, c.h.heads, c.n.rows_q, c.dim, kPoison),
        dk(c.layout, c.h.batch, c.h.heads_kv, c.n.rows_kv, c.dim, kPoison),
        dv(c.layout, c.h.batch, c.h.heads_kv, c.n.rows_kv, c.dim_v, kPoison),
        dlse(normal_floats(lse.size() + 1)),
        sink(normal_floats(c.h.heads)),
        dsink(sink.size(), NAN) {
    fill(dout, c, c.attending());
  }
};

// On the device, ready to launch. Form, lengths and strides in `f` may be changed before prepare().
struct BackwardLaunch {
  Launchable forward_pass;
  Buffer<uint16_t> dout, dq, dk, dv;
  Buffer<float> dlse, sink, dsink;
  std::optional<Buffer<char>> workspace;
  AttentionArguments& f = forward_pass.f;

  BackwardLaunch(const BackwardCase& c, const BackwardData& x)
      : forward_pass(c, x),
        dout(x.dout.memory),
        dq(x.dq.memory),
        dk(x.dk.memory),
        dv(x.dv.memory),
        dlse(x.dlse),
        sink(x.sink),
        dsink(x.dsink) {
    const int32_t dtype = f.q.dtype;
    f.dout = x.dout.at(dout.data, dtype);
    f.dq = x.dq.at(dq.data, dtype);
    f.dk = x.dk.at(dk.data, dtype);
    f.dv = x.dv.at(dv.data, dtype);
    if (c.dlse) f.statistics.dlse = dlse.data;
    if (c.sink) f.softmax = TEA_SOFTMAX_LEARNABLE, f.sink = sink.data, f.dsink = dsink.data;
  }
  BackwardLaunch(const BackwardLaunch&) = delete;

  // The tensors that have rows of queries, then those that have keys.
  std::array<StridedTensor*, 8> tensors() {
    return {&f.q, &f.o, &f.dout, &f.dq, &f.k, &f.v, &f.dk, &f.dv};
  }
  void prepare() {
    const uint64_t bytes =
        std::max<uint64_t>(hopper::backward::workspace_bytes(f), kTileCounterBytes);
    workspace.emplace((bytes + 7) / 8 * 8);
    f.workspace = workspace->data;
    poison_workspace();
  }
  void poison_workspace() { cudaMemset(workspace->data, 0xFF, workspace->size); }  // NaN
  Outcome run_forward(cudaStream_t stream = nullptr) const { return forward(f, stream); }
  // max_ctas 0: no limit
  Outcome run_backward(cudaStream_t stream = nullptr, int max_ctas = 0) const {
    AttentionArguments limited = f;
    limited.max_ctas = max_ctas;
    return hopper::backward::run(limited, stream);
  }
  // Both, one right after the other.
  bool run(cudaStream_t stream = nullptr) const {
    return run_forward(stream).code == 0 && run_backward(stream).code == 0;
  }
  std::array<const Buffer<uint16_t>*, 3> gradients() const { return {&dq, &dk, &dv}; }
};

template <class T>
void upload(const Buffer<T>& to, const std::vector<T>& from) {
  cudaMemcpy(to.data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice);
}

// Runs forward, replaces what backward must not read by NaN, runs backward, and copies O, LSE and
// the gradients to `x`.
inline Outcome run(const BackwardCase& c, BackwardData& x) {
  BackwardLaunch l(c, x);
  l.prepare();
  if (const Outcome done = l.run_forward(); done.code) return done;
  finish(c.name());
  x.o.memory = l.forward_pass.o.read();
  x.lse = l.forward_pass.lse.read();
  const Columns rows = c.attending();
  std::vector<uint16_t> q = x.q.memory, o = x.o.memory;
  std::vector<float> lse = x.lse;
  for (int b = 0; b < c.h.batch; ++b)
    for (int h = 0; h < c.h.heads; ++h)
      for (int r = 0; r < c.n.rows_q; ++r) {
        if (r >= rows.begin && r < rows.end) continue;
        for (int d = 0; d < c.dim; ++d) q[x.q.index(b, h, r, d)] = kNaN;
        for (int d = 0; d < c.dim_v; ++d) o[x.o.index(b, h, r, d)] = kNaN;
        lse[(int64_t{b} * c.h.heads + h) * c.n.rows_q + r] = NAN;
      }
  upload(l.forward_pass.q, q);
  upload(l.forward_pass.o, o);
  upload(l.forward_pass.lse, lse);
  l.poison_workspace();
  const Outcome done = l.run_backward();
  finish(c.name());
  x.dq.memory = l.dq.read();
  x.dk.memory = l.dk.read();
  x.dv.memory = l.dv.read();
  x.dsink = l.dsink.read();
  return done;
}

inline uint64_t digest(const BackwardLaunch& l) {
  uint64_t bits = hash(l.dsink.read());
  for (const Buffer<uint16_t>* const x : l.gradients()) bits = hash(x->read(), bits);
  return bits;
}

inline SequenceLayout layout(int form, const Buffer<int>& cu_seqlens, const Buffer<int>* offsets,
                             int max_seqlen, int tokens) {
  return {.cu_seqlens = cu_seqlens.data,
          .offsets = offsets ? offsets->data : nullptr,
          .max_seqlen = max_seqlen,
          .tokens = tokens,
          .form = form,
          .page_size = 0};
}

inline std::vector<int> running_sum(const std::vector<int>& lengths) {
  std::vector<int> sum = {0};
  for (const int n : lengths) sum.push_back(sum.back() + n);
  return sum;
}

inline int report(const char* what, int dim, int dim_v) {
  printf("%s, dim %d, %d: %d passed, %d failed\n", what, dim, dim_v, passed, failed);
  return failed != 0;
}

// The groups of check_bits.cu, check_launches.cu and check_sizes.cu; they return whether anything
// failed.
int check_ragged(int dim, int dim_v, int step);
int check_padded(int dim, int dim_v, int step);
int check_parts(int dim, int dim_v, int step);
int check_ctas(int dim, int dim_v, int step);
int check_reruns(int dim, int dim_v, int step);
int check_chains(int dim, int dim_v, int step);
int check_priorities();
int check_digests(int dim, int dim_v, int step);
int check_sizes();

}  // namespace tea::primitives
