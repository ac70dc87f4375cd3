// The driver: what is found, where memory lies, and whose context is current.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "core/driver.h"
#include "core/error.h"

namespace tea::driver {
namespace {

TEST(Driver, SaysWhyThereIsNoGpuOrDescribesEach) {
  const Gpus& found = gpus();
  EXPECT_EQ(found.list.empty(), !found.why_none.empty()) << found.why_none;
  for (size_t i = 0; i < found.list.size(); ++i) {
    EXPECT_EQ(found.list[i].index, static_cast<int>(i));
    EXPECT_GE(found.list[i].sm, 30);
    EXPECT_GT(found.list[i].num_sms, 0);
    EXPECT_GE(found.list[i].shared_bytes, 48 << 10);
  }
}

TEST(Driver, WithoutItTheTextNamesTheFile) {
  if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
    dlclose(library);
    GTEST_SKIP() << "this machine has the driver";
  }
  EXPECT_NE(gpus().why_none.find("the driver was not found (libcuda.so.1"), std::string::npos)
      << gpus().why_none;
}

TEST(Driver, WithoutItNoContextIsEntered) {
  if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
    dlclose(library);
    GTEST_SKIP() << "this machine has the driver";
  }
  try {
    const OnDevice here(0);
    FAIL() << "the context of a device that is not there";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("the driver was not found"), std::string::npos)
        << e.what();
  }
}

TEST(Driver, MemoryOfTheHostIsOfNoDevice) {
  int here = 0;
  static int there = 0;
  EXPECT_EQ(device_of(&here), kHost);
  EXPECT_EQ(device_of(&there), kHost);
  EXPECT_EQ(device_of(nullptr), kHost);
  EXPECT_FALSE(allocation_of(&here).holds(&here));
  gpus();  // with the driver in use, or known to be missing, too
  EXPECT_EQ(device_of(&here), kHost);
}

}  // namespace
}  // namespace tea::driver
