// TMA: copies of boxes of a tensor map between global and shared memory. Bulk copies of contiguous
// bytes are in gpu/bulk.cuh, the encoding of tensor maps on the host in tensor_map.h. One thread
// issues; loads complete on an mbarrier, stores in bulk groups. The backward pass needs multicast
// and reductions.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

// A CUtensorMap: 128 opaque bytes, declared here so that <cuda.h> is not needed.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// L2 cache policies; the encodings are fixed by the hardware.
enum class CachePolicy : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

TEA_DEVICE void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

#define TEA_TMA_LOAD ".shared::cluster.global.mbarrier::complete_tx::bytes"
#define TEA_AT2(c) "r"(c[0]), "r"(c[1])
#define TEA_AT3(c) TEA_AT2(c), "r"(c[2])
#define TEA_AT4(c) TEA_AT3(c), "r"(c[3])
#define TEA_AT5(c) TEA_AT4(c), "r"(c[4])

// `at` is the first element of the box, innermost dimension first. Elements outside the tensor read
// as zero.
template <int kRank>
TEA_DEVICE void tma_load(void* to, const TensorMap& map, Barrier& b, const int (&at)[kRank],
                         CachePolicy cache = CachePolicy::kNormal) {
  const uint32_t dst = shared_address(to), bar = shared_address(&b);
  static_assert(kRank >= 2 && kRank <= 5, "tensor maps here have two to five dimensions");
  if constexpr (kRank == 2)
    asm volatile("cp.async.bulk.tensor.2d" TEA_TMA_LOAD
                 ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;\n" ::"r"(dst),
                 "l"(&map), "r"(bar), "l"(cache), TEA_AT2(at)
                 : "memory");
  if constexpr (kRank == 3)
    asm volatile("cp.async.bulk.tensor.3d" TEA_TMA_LOAD
                 ".L2::cache_hint [%0], [%1, {%4, %5, %6}], [%2], %3;\n" ::"r"(dst),
                 "l"(&map), "r"(bar), "l"(cache), TEA_AT3(at)
                 : "memory");
  if constexpr (kRank == 4)
    asm volatile("cp.async.bulk.tensor.4d" TEA_TMA_LOAD
                 ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;\n" ::"r"(dst),
                 "l"(&map), "r"(bar), "l"(cache), TEA_AT4(at)
                 : "memory");
  if constexpr (kRank == 5)
    asm volatile("cp.async.bulk.tensor.5d" TEA_TMA_LOAD
                 ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;\n" ::"r"(dst),
                 "l"(&map), "r"(bar), "l"(cache), TEA_AT5(at)
                 : "memory");
}

// Brings a box into L2.
TEA_DEVICE void tma_prefetch(const TensorMap& map, const int (&at)[5]) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];\n" ::"l"(&map),
      TEA_AT5(at)
      : "memory");
}

// The box arrives at the same shared-memory address, and completes on the same barrier, in every
// CTA of the cluster whose bit is set in `ctas`.
TEA_DEVICE void tma_load_multicast(void* to, const TensorMap& map, Barrier& b, const int (&at)[4],
                                   uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.4d" TEA_TMA_LOAD
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;\n" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&b)), "h"(ctas), TEA_AT4(at)
      : "memory");
}

// Elements outside the tensor are not written.
template <int kRank>
TEA_DEVICE void tma_store(const TensorMap& map, const void* from, const int (&at)[kRank]) {
  const uint32_t src = shared_address(from);
  static_assert(kRank == 4 || kRank == 5, "tensor maps that are stored through");
  if constexpr (kRank == 4)
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::
            "l"(&map),
        "r"(src), TEA_AT4(at)
        : "memory");
  if constexpr (kRank == 5)
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], "
        "[%1];\n" ::"l"(&map),
        "r"(src), TEA_AT5(at)
        : "memory");
}
TEA_DEVICE void tma_reduce_add(const TensorMap& map, const void* from, const int (&at)[4]) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
      "r"(shared_address(from)), TEA_AT4(at)
      : "memory");
}

// The same for contiguous bytes.
TEA_DEVICE void bulk_reduce_add(float* to, const float* from, uint32_t size) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
      "r"(shared_address(from)), "r"(size)
      : "memory");
}

// Waits until at most kPending bulk groups have writes outstanding.
template <int kPending>
TEA_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace tea::hopper
