// The share of its cases that a long test runs. Instrumented, a case takes ten to twenty times as
// long, and most of that in the oracle: under a sanitizer a test takes every n-th case, and says
// so.
#pragma once
#include <cstdio>

namespace tea::kit {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr int kEvery = 16;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr int kEvery = 4;
#else
inline constexpr int kEvery = 1;
#endif

// To be called once by a test that takes a share.
inline void say_share(const char* of_what) {
  if (kEvery > 1) std::printf("under this sanitizer: every %dth of the %s\n", kEvery, of_what);
}

}  // namespace tea::kit
