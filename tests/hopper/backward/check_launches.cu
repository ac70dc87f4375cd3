// Tests of src/hopper/backward/ next to other launches: reruns while the device is busy, and chains
// of launches that begin while their predecessor grid runs, and launches that share the SMs.
#include <unistd.h>

#include "hopper/apart.h"
#include "hopper/backward/backward_case.h"
#include "hopper/chain.cuh"

namespace tea::primitives {

// The same bits from hundreds of runs, while another stream keeps part of the device busy.
int check_reruns(int dim, int dim_v, int step) {
  for (const Heads& heads : {Heads{2, 6, 2}, Heads{1, 8, 1}}) {
    const BackwardCase c = {{dim, dim_v, Type::kBf16, kRules[1], {700, 911}, heads, Layout::kBshd},
                            true};
    const BackwardData x(c);
    BackwardLaunch first(c, x), again(c, x), other(c, x);
    const Buffer<int> differences(std::vector<int>{0});
    for (BackwardLaunch* const l : {&first, &again, &other}) {
      l->prepare();
      expect(l->run(), c.name() + "runs");
    }
    finish(c.name());
    cudaStream_t stream, busy;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking);
    note_work(c.name());
    int launched = 0;
    for (int i = 0; i < 500; i += step) {
      if (i % 3 == 0) other.run_backward(busy, i % 2 ? 60 : 0);
      launched += again.run_backward(stream).code == 0;
      for (int g = 0; g < 3; ++g)
        count_differences<<<64, 256, 0, stream>>>(first.gradients()[g]->data,
                                                  again.gradients()[g]->data,
                                                  first.gradients()[g]->size, differences.data);
    }
    finish(c.name());
    expect(launched == 499 / step + 1, c.name() + "all reruns were launched");
    expect(differences.read() == std::vector<int>{0}, c.name() + "the same bits each time");
  }
  return report("reruns", dim, dim_v);
}

namespace {

// A forward and a backward pass right after each other, whose inputs change right before, whose
// outputs are read right after, and whose common workspace is NaN or holds what another launch
// left.
void check_chain(const BackwardCase& c, bool ragged, int rounds) {
  const std::string name = c.name() + (ragged ? "ragged chain" : "chain");
  note_work(name);
  const BackwardData x(c), y(c);
  BackwardLaunch links[] = {{c, x}, {c, y}}, link(c, x);
  const int tokens = c.h.batch * c.n.rows_q;
  const std::vector<int> lengths[] = {{700, 1, 333, 512, 64, 400, 70},
                                      {12, 700, 650, 0, 300, 222, 5}};
  const Buffer<int> cu[] = {Buffer(running_sum(lengths[0])), Buffer(running_sum(lengths[1]))},
                    current(running_sum(lengths[0]));
  const auto prepare = [&](BackwardLaunch& l, const Buffer<int>& cu_seqlens) {
    if (ragged) {
      l.f.statistics.batch = 0, l.f.statistics.head = tokens;
      l.f.batch = static_cast<int64_t>(lengths[0].size());
      set_ragged(l.f, layout(TEA_RAGGED, cu_seqlens, nullptr, c.n.rows_q, tokens));
    }
    l.prepare();
  };
  prepare(link, current);
  for (int i = 0; i < 2; ++i) {
    prepare(links[i], cu[i]);
    expect(links[i].run(), name);
  }
  finish(name);
  const Buffer<char> poison(std::vector<char>(link.workspace->size, '\xFF'));
  const Buffer<int> differences(std::vector<int>{0});
  const auto turn_to = [&](int i) {
    const BackwardLaunch& l = links[i];
    bring<<<16, 256>>>(Copies{{copy(link.forward_pass.q, l.forward_pass.q),
                               copy(link.forward_pass.k, l.forward_pass.k),
                               copy(link.forward_pass.v, l.forward_pass.v), copy(link.dout, l.dout),
                               copy(link.dlse, l.dlse), copy(link.sink, l.sink),
                               copy(*link.workspace, poison), copy(current, cu[i])}});
  };
  const auto look = [&](const BackwardLaunch& l) {
    for (int g = 0; g < 3; ++g)
      count_differences<<<16, 256>>>(link.gradients()[g]->data, l.gradients()[g]->data,
                                     l.gradients()[g]->size, differences.data, true);
    const auto halves = [](const Buffer<float>& v) {
      return reinterpret_cast<const uint16_t*>(v.data);
    };
    count_differences<<<1, 256>>>(halves(link.dsink), halves(l.dsink), l.dsink.size * 2,
                                  differences.data, true);
  };
  int launched = link.run(), wanted = 1;
  for (int i = 0; i < rounds; ++i) {
    const BackwardLaunch& now = links[i % 2];
    if (i / 2 % 2) turn_to(1 - i % 2);
    look(now);
    if (i / 2 % 2 == 0) turn_to(1 - i % 2);
    for (int again = 0; again <= i % 3; ++again, ++wanted) launched += link.run();
  }
  finish(name);
  expect(launched == wanted, name + ": all were launched");
  expect(differences.read() == std::vector<int>{0}, name + ": the same bits as alone");
}

}  // namespace

int check_chains(int dim, int dim_v, int step) {
  for (const int rule : {0, 1})
    for (const Heads& heads : {Heads{4, 8, 8}, Heads{4, 8, 1}})
      for (const bool ragged : {false, true})
        check_chain(
            {{dim, dim_v, Type::kBf16, kRules[rule], {700, 700}, heads, Layout::kBshd}, true, true},
            ragged, std::max(1, 60 / step));
  return report("chains", dim, dim_v);
}

namespace {

constexpr int kOccupied = 120 << 10;  // bytes of shared memory: one CTA per SM, and no other kernel

__global__ void occupy(int milliseconds) {
  for (int i = 0; i < milliseconds; ++i)
    for (int j = 0; j < 1000; ++j) __nanosleep(1000);
}

}  // namespace

// Two launches of which each keeps the last CTAs of the other from running: the first one starts
// while some SMs are occupied, the second one has priority when these become free. All tiles of a
// launch contribute to the same rows, each after the one before, and there are enough of them for
// every running CTA to take one behind those of all CTAs.
int check_priorities() {
  const BackwardCase c = {
      {64, 64, Type::kBf16, kRules[0], {128, 300 * 128}, {1, 1, 1}, Layout::kBshd}};
  const BackwardData x(c), y(c);
  BackwardLaunch launches[] = {{c, x}, {c, y}};
  uint64_t alone[2];
  int lowest = 0, highest = 0, device = 0, sms = 0;
  cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  cudaStream_t streams[2], occupant;
  cudaStreamCreateWithPriority(&streams[0], cudaStreamNonBlocking, lowest);
  cudaStreamCreateWithPriority(&streams[1], cudaStreamNonBlocking, highest);
  cudaStreamCreateWithFlags(&occupant, cudaStreamNonBlocking);
  cudaFuncSetAttribute(occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, kOccupied);
  note_work(c.name() + "two priorities");
  for (int i = 0; i < 2; ++i) {
    launches[i].prepare();
    expect(launches[i].run(), c.name() + "alone");
    finish(c.name());
    alone[i] = digest(launches[i]);
  }
  for (int round = 0; round < 10; ++round) {
    occupy<<<sms * 5 / 11, 32, kOccupied, occupant>>>(20);
    usleep(2000);
    bool ran = launches[0].run_backward(streams[0]).code == 0;
    usleep(5000);
    ran &= launches[1].run_backward(streams[1]).code == 0;
    finish(c.name());
    for (int i = 0; i < 2; ++i)
      expect(ran && digest(launches[i]) == alone[i], c.name() + "the same bits as alone");
  }
  return report("priorities", 64, 64);
}

}  // namespace tea::primitives
