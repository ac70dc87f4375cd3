// The load of Q.
#pragma once
#include "hopper/decode/shared_memory.cuh"

namespace tea::hopper::decode {

// Stores eight elements of a row of Q. With K in FP8, a thread has four adjacent columns of K where
// two fragments of 16 bits have two each: the columns of each 16 are in that order.
template <KernelConfig C>
TEA_DEVICE void store_q(uint8_t* row, int chunk, const uint4& x) {
  if constexpr (C.has_fp8_kv) {
    uint8_t* const to = row + chunk / 2 * 32 + chunk % 2 * 8;
    *reinterpret_cast<uint2*>(to) = {x.x, x.z};
    *reinterpret_cast<uint2*>(to + 16) = {x.y, x.w};
  } else {
    *reinterpret_cast<uint4*>(row + chunk * 16) = x;
  }
}

// The load of the packed rows of Q, by all threads that compute. Addresses are computed first: for
// the first item before the wait for the predecessor.
template <KernelConfig C>
struct QLoader {
  using T = Traits<C>;
  static constexpr int kChunks = T::kDim / 8, kCount = T::kBlockM * kChunks;
  static constexpr int kOfThread = (kCount + T::kThreads - 1) / T::kThreads;
  static constexpr int kAtOnce = kOfThread < 4 ? kOfThread : 4;

  const uint16_t* from[kOfThread];  // null: zeros

  static TEA_DEVICE int number(int k) { return k * T::kThreads + static_cast<int>(threadIdx.x); }
  TEA_DEVICE void locate(const KernelParams& p, const WorkItem& item) {
    const AttentionArguments& a = p.args;
    const int rows = item.bounds.seqlen_q * p.group, first_head = item.head_kv() * p.group;
    const int64_t first =
        has_ragged_queries<T::kIsPlain>(p) ? item.bounds.start_q * a.q.seq : item.batch * a.q.batch;
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
      const int row = number(k) / kChunks, column = number(k) % kChunks * 8;
      const int query = row / p.group, head = first_head + row % p.group;
      const int64_t at = first + query * a.q.seq + head * a.q.head + column;
      const bool valid = row < rows && column < a.dim_qk;
      from[k] = valid ? static_cast<const uint16_t*>(a.q.data) + at : nullptr;
      // So that the compiler does not move this behind the wait.
      asm volatile("" : "+l"(from[k]));
    }
  }
  TEA_DEVICE void load(typename T::SharedStorage& s) const {
#pragma unroll
    for (int first = 0; first < kOfThread; first += kAtOnce) {
      uint4 x[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (first + k < kOfThread && from[first + k])
          x[k] = *reinterpret_cast<const uint4*>(from[first + k]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = number(first + k);
        if (i < kCount) store_q<C>(s.q + i / kChunks * T::kPitchQ, i % kChunks, x[k]);
      }
    }
  }
};

}  // namespace tea::hopper::decode
