// The expected product of packed tiles, for any instructions. Included inside a
// namespace after packed_tiles.h and what multiplies.
#pragma once

// C of 1 to 3 by 1 to kWide tiles, over three tiles of k, against a plain loop; nothing else in C
// may change. `product` runs a Product<1>.
template <int kWide, class Multiply>
void expect_products(const Multiply& product) {
  constexpr int kSteps = 3, kLd = 16 * kWide + 2;
  struct alignas(64) {
    uint16_t a[3][kSteps][16][32], b[kWide][kSteps][16][16][2];
  } from;
  const auto code = [](int64_t n) { return bf16_encode(static_cast<float>(n * 37 % 19 - 9)); };
  uint16_t* all = &from.a[0][0][0][0];
  for (int64_t i = 0; i < int64_t{sizeof from} / 2; ++i) all[i] = code(i);
  const auto exact = [&](int row, int column) {
    double sum = 0;
    for (int k = 0; k < 32 * kSteps; ++k)
      sum += double{bf16_decode(from.a[row / 16][k / 32][row % 16][k % 32])} *
             double{bf16_decode(from.b[column / 16][k / 32][k % 32 / 2][column % 16][k % 2])};
    return sum;
  };
  for (int rows = 1; rows <= 3; ++rows)
    for (int columns = 1; columns <= kWide; ++columns)
      for (const bool add : {false, true}) {
        std::vector<float> c(48 * kLd, 5);
        product(Product<1>{rows, columns, kSteps,
                           Tiles{from.a, kSteps * kTileBytes, kTileBytes, 64},
                           Tiles{from.b, kSteps * kTileBytes, kTileBytes, 64}, c.data(), kLd, add});
        for (int i = 0; i < 48; ++i)
          for (int j = 0; j < kLd; ++j) {
            const bool inside = i < 16 * rows && j < 16 * columns;
            const double want = inside ? exact(i, j) + (add ? 5 : 0) : 5;
            ASSERT_EQ(static_cast<double>(c[static_cast<size_t>(i * kLd + j)]), want)
                << i << " " << j;
          }
      }
}
