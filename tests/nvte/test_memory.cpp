// nvte_zero_tensor and nvte_memset: exactly the bytes asked for.
#include <vector>

#include "core/device.h"
#include "expect_error.h"
#include "nvte/memory.h"

namespace {

using transformer_engine::DType;
using transformer_engine::TensorWrapper;

// `changed` elements in the middle of a guarded buffer hold `now`, all others the value before.
template <class T>
struct Guarded {
  static constexpr size_t kGuard = 8;
  T before;
  std::vector<T> all;

  Guarded(size_t size, T value) : before(value), all(size + 2 * kGuard, value) {}
  T* data() { return all.data() + kGuard; }
  bool holds(T now, size_t changed) const {
    for (size_t i = 0; i < all.size(); ++i) {
      const bool inside = i >= kGuard && i < kGuard + changed;
      if (all[i] != (inside ? now : before)) return false;
    }
    return true;
  }
};

TEST(Memory, EveryPointerIsOfTheHost) {
  int here = 0;
  EXPECT_EQ(tea::nvte::device_of(&here), tea::kHost);
}

TEST(MemorySide, NothingLiesOnTheHost) {
  tea::nvte::MemorySide side;
  EXPECT_EQ(side.device(), tea::kHost);
  side.add("first", nullptr);
  int here = 0;
  side.add("second", &here);
  EXPECT_EQ(side.device(), tea::kHost);
}

TEST(Memory, CopiesTheBytesAskedForAndNothingElse) {
  const Guarded<int> from(5, 7);
  Guarded<int> to(5, 1);
  tea::nvte::copy(to.data(), from.all.data(), 5 * sizeof(int), nullptr);
  EXPECT_TRUE(to.holds(7, 5));
}

TEST(Memset, WritesTheLowByteAndNothingElse) {
  for (size_t size : {0, 1, 3, 16, 4096, 4097}) {
    SCOPED_TRACE(size);
    Guarded<unsigned char> bytes(size, 1);
    nvte_memset(bytes.data(), 0x3ab, size, nullptr);
    EXPECT_TRUE(bytes.holds(0xab, size));
  }
}

TEST(Memset, RefusesNull) {
  EXPECT_NVTE_ERROR(nvte_memset(nullptr, 0, 12, nullptr), "ptr is NULL; needs memory of 12 bytes");
  EXPECT_NVTE_ERROR(nvte_memset(nullptr, 0, 0, nullptr), "ptr is NULL");
}

TEST(ZeroTensor, ClearsRowwiseDataAndAmaxOnly) {
  Guarded<unsigned char> data(24, 1), columnwise(24, 1);
  Guarded<float> amax(1, 5), scale(1, 5);
  TensorWrapper tensor(data.data(), std::vector<size_t>{2, 3, 4}, DType::kFloat8E4M3, amax.data(),
                       scale.data());
  tensor.set_columnwise_data(columnwise.data(), DType::kFloat8E4M3, std::vector<size_t>{24});
  tensor.zero_(nullptr);
  EXPECT_TRUE(data.holds(0, 24));
  EXPECT_TRUE(amax.holds(0, 1));
  EXPECT_TRUE(columnwise.holds(0, 0));
  EXPECT_TRUE(scale.holds(0, 0));
}

TEST(ZeroTensor, TakesWhatHasNoMemory) {
  nvte_zero_tensor(nullptr, nullptr);
  TensorWrapper empty;
  empty.zero_(nullptr);
  TensorWrapper only_a_shape(nullptr, std::vector<size_t>{2, 3}, DType::kFloat32);
  only_a_shape.zero_(nullptr);
  Guarded<unsigned char> none(0, 1);
  TensorWrapper no_elements(none.data(), std::vector<size_t>{0, 3}, DType::kByte);
  no_elements.zero_(nullptr);
  EXPECT_TRUE(none.holds(0, 0));
  EXPECT_NVTE_ERROR(nvte_zero_tensor(reinterpret_cast<NVTETensor>(size_t{1} << 40), nullptr),
                    "Invalid tensor.");
}

}  // namespace
