// core/driver.h and nvte/memory.h with a GPU: the kinds of memory that they distinguish, from any
// thread, and the current context; and the atomic maximum of an amax.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "core/device.h"
#include "core/driver.h"
#include "gpu/amax.cuh"
#include "nvte/memory.h"

namespace tea {
namespace {

TEST(Driver, DescribesTheGpuAsTheRuntimeDoes) {
  ASSERT_FALSE(driver::gpus().list.empty()) << driver::gpus().why_none;
  cudaDeviceProp p;
  ASSERT_EQ(cudaGetDeviceProperties(&p, 0), cudaSuccess);
  const Device gpu = device_at(0);
  EXPECT_EQ(gpu.index, 0);
  EXPECT_EQ(gpu.sm, 10 * p.major + p.minor);
  EXPECT_EQ(gpu.num_sms, p.multiProcessorCount);
  EXPECT_EQ(gpu.shared_bytes, static_cast<int>(p.sharedMemPerBlockOptin));
}

struct Pointers {
  int on_stack = 0;
  std::vector<int> pageable = std::vector<int>(1000);
  int *device = nullptr, *managed = nullptr, *pinned = nullptr, *async = nullptr;
  Pointers() {
    EXPECT_EQ(cudaMalloc(&device, 4096), cudaSuccess);
    EXPECT_EQ(cudaMallocManaged(&managed, 4096), cudaSuccess);
    EXPECT_EQ(cudaMallocHost(&pinned, 4096), cudaSuccess);
    EXPECT_EQ(cudaMallocAsync(&async, 4096, nullptr), cudaSuccess);
  }
  ~Pointers() {
    cudaFree(device), cudaFree(managed), cudaFreeHost(pinned), cudaFreeAsync(async, nullptr);
  }
  void expect_distinguished() const {
    EXPECT_EQ(driver::device_of(device), 0);
    EXPECT_EQ(driver::device_of(device + 5), 0);
    EXPECT_EQ(driver::device_of(async), 0);
    EXPECT_EQ(driver::device_of(managed), 0);
    EXPECT_EQ(driver::device_of(pinned), kHost);
    EXPECT_EQ(driver::device_of(pageable.data()), kHost);
    EXPECT_EQ(driver::device_of(&on_stack), kHost);
  }
};

TEST(Driver, KnowsWhereAnAllocationEnds) {
  const Pointers p;
  const driver::Allocation found = driver::allocation_of(p.device + 5);
  EXPECT_EQ(found.device, 0);
  EXPECT_TRUE(found.holds(p.device) && found.holds(p.device + 1023));
  const char* const end = reinterpret_cast<const char*>(found.begin + found.bytes);
  EXPECT_FALSE(found.holds(end) || found.holds(reinterpret_cast<const char*>(found.begin) - 1));
  EXPECT_FALSE(found.holds(&p) || found.holds(nullptr));
  EXPECT_EQ(driver::allocation_of(p.pinned).bytes, 0u);
}

__global__ void raise_all(float* amaxes, const float* values, int count) {
  for (int i = 0; i < count; ++i) raise_amax(amaxes + i, values[i]);
}

TEST(Amax, PassesOverNanAsOnTheHost) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), all[] = {nan, -nan, 0, 1, 3, -1};
  std::vector<float> amaxes, values;
  for (const float old : all)
    for (const float value : {0.0f, 2.0f, nan, std::numeric_limits<float>::infinity()})
      amaxes.push_back(old), values.push_back(value);
  float* device = nullptr;
  const size_t bytes = amaxes.size() * sizeof(float);
  ASSERT_EQ(cudaMalloc(&device, 2 * bytes), cudaSuccess);
  cudaMemcpy(device, amaxes.data(), bytes, cudaMemcpyDefault);
  cudaMemcpy(device + amaxes.size(), values.data(), bytes, cudaMemcpyDefault);
  raise_all<<<1, 1>>>(device, device + amaxes.size(), static_cast<int>(amaxes.size()));
  std::vector<float> got(amaxes.size());
  ASSERT_EQ(cudaMemcpy(got.data(), device, bytes, cudaMemcpyDefault), cudaSuccess);
  cudaFree(device);
  for (size_t i = 0; i < got.size(); ++i) {
    const float want = std::fmax(amaxes[i], values[i]);
    EXPECT_TRUE(got[i] == want || (std::isnan(got[i]) && std::isnan(want)))
        << amaxes[i] << " raised to " << values[i] << " is " << got[i];
  }
}

TEST(Driver, TellsMemoryApartFromAnyThread) {
  const Pointers p;
  p.expect_distinguished();
  std::thread([&] { p.expect_distinguished(); }).join();  // has no context of its own
}

TEST(Driver, MakesThePrimaryContextCurrentAndGivesTheOldOneBack) {
  std::thread([] {
    const driver::OnDevice here(0);
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, 16), cudaSuccess);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    const driver::OnDevice again(0);
  }).join();
}

TEST(Memory, IsFilledAndCopiedInTheOrderOfTheStream) {
  const Pointers p;
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  std::thread([&] {
    nvte::fill(p.device, 0x5a, 4096, stream);
    nvte::fill(p.device + 1, 0xa5, 4, stream);
    nvte::copy(p.async, p.device, 4096, stream);
  }).join();
  std::vector<int> got(1024);
  ASSERT_EQ(cudaMemcpyAsync(got.data(), p.async, 4096, cudaMemcpyDefault, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  for (int i = 0; i < 1024; ++i)
    ASSERT_EQ(got[static_cast<size_t>(i)], i == 1 ? 0xa5a5a5a5 : 0x5a5a5a5a);
  std::vector<int> host(4);
  EXPECT_ANY_THROW(nvte::copy(p.device, host.data(), 16, stream));
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace tea
