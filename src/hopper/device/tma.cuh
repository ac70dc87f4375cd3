// The copy engine: tiles of a tensor map between global and shared memory; plain runs of bytes are
// in gpu/bulk.cuh. One thread issues; loads complete on a Barrier, stores in groups. Maps:
// tensor_map.h. Multicast, stores and sums are for the backward pass.
#pragma once
#include "hopper/device/barrier.cuh"

namespace tea::hopper {

// The driver's 128 opaque bytes, without the driver's header.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// How the second-level cache should treat what passes; the encodings are fixed by the hardware.
enum class Cache : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

TEA_DEVICE void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

#define TEA_TMA_LOAD ".shared::cluster.global.mbarrier::complete_tx::bytes"
#define TEA_AT2(c) "r"(c[0]), "r"(c[1])
#define TEA_AT3(c) TEA_AT2(c), "r"(c[2])
#define TEA_AT4(c) TEA_AT3(c), "r"(c[3])
#define TEA_AT5(c) TEA_AT4(c), "r"(c[4])

// at: the first element of the box, innermost dimension first; outside the tensor reads as zero.
template <int kRank>
TEA_DEVICE void load(void* to, const TensorMap& map, Barrier& b, const int (&at)[kRank],
                     Cache cache = Cache::kNormal) {
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

// The box lands at the same shared address, and completes on the same barrier, in every block of
// the cluster whose bit is set.
TEA_DEVICE void load_multicast(void* to, const TensorMap& map, Barrier& b, const int (&at)[4],
                               uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d" TEA_TMA_LOAD
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;\n" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&b)), "h"(blocks), TEA_AT4(at)
      : "memory");
}

// What falls outside the tensor is not written.
template <int kRank>
TEA_DEVICE void store(const TensorMap& map, const void* from, const int (&at)[kRank]) {
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
TEA_DEVICE void store_add(const TensorMap& map, const void* from, const int (&at)[4]) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(&map),
      "r"(shared_address(from)), TEA_AT4(at)
      : "memory");
}

// Of a plain run.
TEA_DEVICE void store_run_add(float* to, const float* from, uint32_t size) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to),
      "r"(shared_address(from)), "r"(size)
      : "memory");
}

// At most kPending groups are still to be written.
template <int kPending>
TEA_DEVICE void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace tea::hopper
