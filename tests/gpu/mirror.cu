// The kit's copies on a GPU: what is damaged there is noticed here.
#include <gtest/gtest.h>

#include "kit/check.h"
#include "kit/mirror.h"

namespace tea::kit {
namespace {

constexpr const char* kCase =
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=2 heads_kv=1 dim_qk=16 | "
    "lens_q=6,3 lens_kv=7,4 layout=odd seed=3 origin=1,0,2,3 origin_in_memory=1";

__global__ void write(uint8_t* at) { *at ^= 0x55; }
__global__ void read(const volatile uint8_t* at, uint8_t* to) { *to = *at; }

void write_on(Gpu& gpu, void* at) {
  write<<<1, 1, 0, static_cast<cudaStream_t>(gpu.stream())>>>(static_cast<uint8_t*>(at));
}

TEST(Mirror, BringsBackWhatItTook) {
  Gpu& gpu = gpu_of_thread(0);
  for (const Around around : {Around::kRedzones, Around::kUnmappedBefore, Around::kUnmappedBehind,
                              Around::kAllocations}) {
    Inputs inputs(Case::parse(kCase));
    Mirror mirror(gpu, inputs, around);
    mirror.upload(1000);
    for (Storage& s : inputs.storages()) std::fill_n(s.data(), s.size(), 1);
    mirror.fetch();
    EXPECT_TRUE(inputs.untouched());
    EXPECT_TRUE(mirror.damage().empty());
  }
}

TEST(Mirror, PutsEveryTensorOnItsAlignmentAndNoMore) {
  Inputs inputs(Case::parse(kCase));
  Mirror mirror(gpu_of_thread(0), inputs);
  const tea_run& run = mirror.upload(64);
  for (const tea_tensor t : {TEA_Q, TEA_K, TEA_V, TEA_O, TEA_DQ})
    EXPECT_EQ(reinterpret_cast<uintptr_t>(run.tensors[t]) % 32, 16u) << tensor_name(t);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(run.workspace) % 256, 0u);
}

TEST(Mirror, NoticesWritesThatAreNotAllowed) {
  Gpu& gpu = gpu_of_thread(0);
  const auto broken = [&](auto&& where) {
    Inputs inputs(Case::parse(kCase));
    Mirror mirror(gpu, inputs);
    const tea_run& run = mirror.upload(64);
    write_on(gpu, where(run));
    mirror.fetch();
    return !inputs.untouched() || !mirror.damage().empty();
  };
  const auto byte = [](const void* p, int64_t at) {
    return const_cast<uint8_t*>(static_cast<const uint8_t*>(p)) + at;
  };
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.tensors[TEA_Q], 0); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.tensors[TEA_O], -1); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.tensors[TEA_K], -4096); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.workspace, -1); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.workspace, 64); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.status, 0); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.status, 4); }));
  EXPECT_TRUE(broken([&](const tea_run& r) { return byte(r.origin_device, -8); }));
  EXPECT_FALSE(broken([&](const tea_run& r) { return byte(r.workspace, 0); }));
}

// A fault ends the process's use of the GPU, so it happens in another process.
[[noreturn]] void read_at(Around around, int64_t from_start, bool from_end) {
  Gpu& gpu = gpu_of_thread(0);
  Inputs inputs(Case::parse(kCase));
  Mirror mirror(gpu, inputs, around);
  const tea_run& run = mirror.upload(64);
  const Place& k = inputs.place(TEA_K);
  const auto* at =
      static_cast<const uint8_t*>(run.tensors[TEA_K]) + from_start + (from_end ? k.span() * 2 : 0);
  read<<<1, 1, 0, static_cast<cudaStream_t>(gpu.stream())>>>(at,
                                                             static_cast<uint8_t*>(run.workspace));
  try {
    gpu.wait();
  } catch (const GpuLost& e) {
    fprintf(stderr, "%s\n", e.what());
    _exit(1);
  }
  _exit(0);
}

TEST(MirrorDeathTest, AReadNextToATensorFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const testing::ExitedWithCode fine(0), faulted(1);
  EXPECT_EXIT(read_at(Around::kUnmappedBefore, 0, false), fine, "");
  EXPECT_EXIT(read_at(Around::kUnmappedBehind, -1, true), fine, "");
  EXPECT_EXIT(read_at(Around::kUnmappedBefore, -1, false), faulted, "cudaErrorIllegalAddress");
  EXPECT_EXIT(read_at(Around::kUnmappedBehind, 15, true), faulted, "cudaErrorIllegalAddress");
}

}  // namespace
}  // namespace tea::kit
