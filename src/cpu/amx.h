// AMX primitives: products of the tiles of packed_tiles.h. Included by flash_amx.cpp after it,
// inside its namespace.
#pragma once

// The instructions as asm statements with a memory clobber, because GCC 12's intrinsics do not
// declare the memory that they read.
template <int T>
TEA_PRIMITIVE void load_tile(const void* from, int64_t pitch) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(pitch), "i"(T) : "memory");
}
template <int T>
TEA_PRIMITIVE void store_tile(void* to, int64_t pitch) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(pitch), "i"(T) : "memory");
}
template <int T>
TEA_PRIMITIVE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int C, int A, int B>
TEA_PRIMITIVE void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// In its scope all eight tile registers are configured with their full size. The destructor
// releases them, so that context switches do not save tile state.
class Configured {
 public:
  Configured() {
    alignas(64) uint8_t config[64] = {1};  // palette 1
    for (int i = 0; i < 8; ++i) config[16 + 2 * i] = 64, config[48 + i] = kSide;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~Configured() { asm volatile("tilerelease"); }
  Configured(const Configured&) = delete;
  Configured& operator=(const Configured&) = delete;
};

// The terms of A and B that a product combines. Consecutive products share a term, which then is
// already in tile registers. Vector code computes quarters [from, to) of its share of a step
// concurrently.
struct Round {
  int a, b;
  bool loads_a, loads_b;
  int from, to;
};

// bf16 has one term. fp32 has three, the largest first. The omitted products, of a second with a
// third term and of two third terms, are below 2^-24 of the total. The largest product is the last,
// so that the sum is rounded at full magnitude once.
template <int T>
inline constexpr Round kRounds[] = {{0, 0, true, true, 0, 4}};
template <>
inline constexpr Round kRounds<3>[] = {{2, 0, true, true, 0, 1},  {1, 0, true, false, 1, 1},
                                       {1, 1, false, true, 1, 2}, {0, 1, true, false, 2, 3},
                                       {0, 2, false, true, 3, 3}, {0, 0, false, true, 3, 4}};

// M x N products of tiles of one round at step k. `between` is called after each product with the
// quarters [from, to) of a step that it computes, if any.
template <int M, int N, int T, int I, class Between>
TEA_PRIMITIVE void multiply_round(int64_t k, const Tiles& a, const Tiles& b, Between& between) {
  constexpr Round now = kRounds<T>[I];
  const auto done = [&]<int product>(Number<product>) __attribute__((always_inline)) {
    constexpr int from = now.from + (now.to - now.from) * product / (M * N);
    constexpr int to = now.from + (now.to - now.from) * (product + 1) / (M * N);
    if constexpr (from < to) between(Number<from>{}, Number<to>{});
  };
  if constexpr (now.loads_b) load_tile<6>(b.at(0, k, now.b), b.pitch);
  if constexpr (now.loads_a) load_tile<4>(a.at(0, k, now.a), a.pitch);
  multiply_tile<0, 4, 6>();
  done(Number<0>{});
  if constexpr (N > 1) {
    if constexpr (now.loads_b) load_tile<7>(b.at(1, k, now.b), b.pitch);
    multiply_tile<1, 4, 7>();
    done(Number<1>{});
  }
  if constexpr (M > 1) {
    if constexpr (now.loads_a) load_tile<5>(a.at(1, k, now.a), a.pitch);
    multiply_tile<2, 5, 6>();
    done(Number<N>{});
  }
  if constexpr (M > 1 && N > 1) {
    multiply_tile<3, 5, 7>();
    done(Number<3>{});
  }
}

// M x N tiles of C = or += A B over `steps` tiles of k, of T terms each. What `between` does on
// vectors runs concurrently with the products.
template <int M, int N, int T, class Between>
TEA_PRIMITIVE void multiply_tiles(int64_t steps, const Tiles& a, const Tiles& b, float* c,
                                  int64_t ldc, bool add, Between& between) {
  const int64_t pitch = ldc * static_cast<int64_t>(sizeof(float));
  float* const below = c + kSide * ldc;
  if (add) {
    load_tile<0>(c, pitch);
    if constexpr (N > 1) load_tile<1>(c + kSide, pitch);
    if constexpr (M > 1) load_tile<2>(below, pitch);
    if constexpr (M > 1 && N > 1) load_tile<3>(below + kSide, pitch);
  } else {
    zero_tile<0>();
    if constexpr (N > 1) zero_tile<1>();
    if constexpr (M > 1) zero_tile<2>();
    if constexpr (M > 1 && N > 1) zero_tile<3>();
  }
  for (int64_t k = 0; k < steps; ++k)
    [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
      (multiply_round<M, N, T, static_cast<int>(I)>(k, a, b, between), ...);
    }
  (std::make_index_sequence<std::size(kRounds<T>)>{});
  store_tile<0>(c, pitch);
  if constexpr (N > 1) store_tile<1>(c + kSide, pitch);
  if constexpr (M > 1) store_tile<2>(below, pitch);
  if constexpr (M > 1 && N > 1) store_tile<3>(below + kSide, pitch);
}

// C = or += A B in parts of two by two tiles; `rows` and `columns` count tiles, `steps` tiles of k.
template <int T>
struct Product {
  int64_t rows, columns, steps;
  Tiles a, b;
  float* c;
  int64_t ldc;
  bool add;

  static constexpr int64_t kLeastPanel = 2 * kDepth;
  static constexpr int64_t parts_of(int64_t m, int64_t n) {
    return tiles_of(m, 2) * tiles_of(n, 2);
  }
  int64_t parts() const { return parts_of(rows, columns); }

  template <class Between = const Nothing>
  TEA_INLINE void part(int64_t i, Between&& between = {}) const {
    const int64_t m = i / tiles_of(columns, 2) * 2, n = i % tiles_of(columns, 2) * 2;
    const Tiles left{a.at(m), a.next, a.step, a.pitch, a.term};
    const Tiles right{b.at(n), b.next, b.step, b.pitch, b.term};
    float* to = c + m * kSide * ldc + n * kSide;
    const bool tall = m + 1 < rows, wide = n + 1 < columns;
    if (tall && wide) return multiply_tiles<2, 2, T>(steps, left, right, to, ldc, add, between);
    if (tall) return multiply_tiles<2, 1, T>(steps, left, right, to, ldc, add, between);
    if (wide) return multiply_tiles<1, 2, T>(steps, left, right, to, ldc, add, between);
    multiply_tiles<1, 1, T>(steps, left, right, to, ldc, add, between);
  }

  template <class Between = const Nothing>
  TEA_INLINE void operator()(Between&& between = {}) const {
    for (int64_t i = 0; i < parts(); ++i) part(i, between);
  }
};
