// Checks shared by the supporting operations.
#include "ops/args.h"

#include "core/problem.h"
#include "core/tensors.h"

namespace tea {

bool is_host(const Place& place) { return device_at(place.device).is_host(); }

int64_t require_sizes(std::initializer_list<NamedSize> sizes) {
  constexpr int64_t kMost = int64_t{1} << 56;
  int64_t product = 1;
  for (const NamedSize& size : sizes)
    TEA_REQUIRE(size.value >= 0, size.name, size.value, "0 or more");
  for (const NamedSize& size : sizes) product = size.value ? product : 0;
  for (const NamedSize& size : sizes) {
    TEA_REQUIRE(size.value <= kMost && !__builtin_mul_overflow(product, size.value, &product) &&
                    product <= kMost,
                size.name, size.value, "a tensor of at most 2^56 elements");
  }
  return product;
}

void require_pointers(std::initializer_list<NamedPointer> pointers) {
  for (const NamedPointer& p : pointers) {
    TEA_REQUIRE(p.value, p.name, p.value, "memory");
    TEA_REQUIRE(is_aligned(p.value, p.bytes), p.name, "not aligned",
                "an address that is a multiple of " + shown(p.bytes));
  }
}

void require_flag(const char* name, int32_t value) {
  TEA_REQUIRE(value == 0 || value == 1, name, value, "0 or 1");
}

void require_reserved(const char* name, int32_t value) {
  TEA_REQUIRE(value == 0, name, value, "0");
}

void require_dtype(const char* name, int32_t value, uint32_t allowed) {
  if (value > 0 && value <= TEA_E5M2 && (allowed >> value & 1)) return;
  std::string needed;
  for (int32_t dtype = TEA_FP16; dtype <= TEA_E5M2; ++dtype)
    if (allowed >> dtype & 1) needed += (needed.empty() ? "" : ", ") + shown(dtype_name(dtype));
  const bool known = value >= 0 && value <= TEA_E5M2;
  refuse_argument(name, known ? shown(dtype_name(value)) : shown(value), "one of " + needed);
}

tea_strides strides_or_contiguous(const char* name, const tea_strides& given, int64_t seq,
                                  int64_t heads, int64_t dim) {
  if (!given.batch && !given.seq && !given.head) return {seq * heads * dim, heads * dim, dim};
  for (int64_t stride : {given.batch, given.seq, given.head})
    TEA_REQUIRE(stride >= 0, name, stride, "0 or more elements");
  return given;
}

}  // namespace tea
