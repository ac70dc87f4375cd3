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

// Turns the rows of Q from bf16 into fp16, for K and V in FP8, by all threads that compute. Each
// row is multiplied by a power of two that brings its largest element close to 2^15: the bits that
// the smallest elements lose are below 2^-38 of that one.
template <KernelConfig C>
TEA_DEVICE void convert_q(typename Traits<C>::SharedStorage& s) {
  using T = Traits<C>;
  constexpr int kPairs = T::kDim / 64;  // of a lane, in a row
  constexpr uint32_t kInfinity = 0x7F80;
#pragma unroll 1
  for (int row = warp(); row < T::kBlockM; row += T::kThreads / 32) {
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(s.q + row * T::kPitchQ) + lane();
    uint32_t x[kPairs], highest = 15 << 7;  // at least, so that both scales are normal floats
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      x[i] = pairs[32 * i];
      const uint32_t low = x[i] & 0x7FFF, high = x[i] >> 16 & 0x7FFF;
      if (low < kInfinity) highest = max(highest, low);
      if (high < kInfinity) highest = max(highest, high);
    }
    const uint32_t exponent = __reduce_max_sync(0xffffffff, highest) >> 7;
    const float scale = __uint_as_float((268 - exponent) << 23);  // 2^(14 - (exponent - 127))
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      pairs[32 * i] = pack<Type::kFp16>(__uint_as_float(x[i] << 16) * scale,
                                        __uint_as_float(x[i] & 0xFFFF0000) * scale);
    if (lane() == 0) s.q_scale[row] = __uint_as_float((exponent - 14) << 23);
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
