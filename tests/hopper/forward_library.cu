// The forward pass as a library that Python loads to time it beside its peers, with the candidates
// for its table.
#include <cstdio>

#include "hopper/forward_launch.cuh"

namespace tea::hopper {
namespace {

// The same columns as the table's.
constexpr Row kCandidates[] = {
    {64, 64, 3, 128, 2, true, false},        {64, 64, 2, 128, 2, true, false, true},
    {64, 64, 3, 112, 2, true, false},        {128, 128, 2, 128, 2, false, false},
    {128, 128, 2, 112, 2, true, false},      {192, 128, 2, 128, 1, true, true},
    {256, 256, 2, 80, 1, true, true},        {256, 256, 2, 64, 1, false, true},
    {256, 256, 2, 64, 1, false, true, true},
};

template <Kind kKind>
struct Candidates {
  static constexpr const auto& rows = kCandidates;
  static constexpr Kind kind = kKind;
  static constexpr int types = 1, count = std::size(kCandidates);
};

Outcome launch_candidate(int row, const Forward& f, cudaStream_t stream) {
  return bounded(f.mask) ? launch_row<Candidates<Kind::kMasked>>(row, f, stream)
                         : launch_row<Candidates<Kind::kFull>>(row, f, stream);
}

}  // namespace
}  // namespace tea::hopper

extern "C" {

// Returns the CUDA error code, and says on stderr which call gave it. row: -1 for what the table
// chooses, else a candidate.
int hopper_forward(int row, const tea::hopper::Forward* f, cudaStream_t stream) {
  using namespace tea::hopper;
  const Outcome o = row < 0 ? forward(*f, stream) : launch_candidate(row, *f, stream);
  if (o.code) fprintf(stderr, "%s: %s\n", o.what, o.text);
  return o.code;
}

// {dim, dim_v, consumers, cols, q_stages, turns, rescale_early, skips} of a candidate; 0 past the
// last.
int hopper_candidate(int row, int out[8]) {
  using namespace tea::hopper;
  if (row >= static_cast<int>(std::size(kCandidates))) return 0;
  const Row& r = kCandidates[row];
  const int all[] = {r.dim,      r.dim_v, r.consumers,     r.cols,
                     r.q_stages, r.turns, r.rescale_early, r.skips};
  std::copy(std::begin(all), std::end(all), out);
  return 1;
}

}  // extern "C"
