// The operand lists of wgmma, which inline assembly wants spelled out: one row per width N, one
// branch per pair of types. Included by wgmma.cuh alone.
#pragma once

// Registers of D as text and as operands, in runs of eight.
#define TEA_T8(a, b, c, d, e, f, g, h) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define TEA_TEXT8 TEA_T8(0, 1, 2, 3, 4, 5, 6, 7)
#define TEA_TEXT16 TEA_TEXT8 "," TEA_T8(8, 9, 10, 11, 12, 13, 14, 15)
#define TEA_TEXT24 TEA_TEXT16 "," TEA_T8(16, 17, 18, 19, 20, 21, 22, 23)
#define TEA_TEXT32 TEA_TEXT24 "," TEA_T8(24, 25, 26, 27, 28, 29, 30, 31)
#define TEA_TEXT40 TEA_TEXT32 "," TEA_T8(32, 33, 34, 35, 36, 37, 38, 39)
#define TEA_TEXT48 TEA_TEXT40 "," TEA_T8(40, 41, 42, 43, 44, 45, 46, 47)
#define TEA_TEXT56 TEA_TEXT48 "," TEA_T8(48, 49, 50, 51, 52, 53, 54, 55)
#define TEA_TEXT64 TEA_TEXT56 "," TEA_T8(56, 57, 58, 59, 60, 61, 62, 63)
#define TEA_TEXT72 TEA_TEXT64 "," TEA_T8(64, 65, 66, 67, 68, 69, 70, 71)
#define TEA_TEXT80 TEA_TEXT72 "," TEA_T8(72, 73, 74, 75, 76, 77, 78, 79)
#define TEA_TEXT88 TEA_TEXT80 "," TEA_T8(80, 81, 82, 83, 84, 85, 86, 87)
#define TEA_TEXT96 TEA_TEXT88 "," TEA_T8(88, 89, 90, 91, 92, 93, 94, 95)
#define TEA_TEXT104 TEA_TEXT96 "," TEA_T8(96, 97, 98, 99, 100, 101, 102, 103)
#define TEA_TEXT112 TEA_TEXT104 "," TEA_T8(104, 105, 106, 107, 108, 109, 110, 111)
#define TEA_TEXT120 TEA_TEXT112 "," TEA_T8(112, 113, 114, 115, 116, 117, 118, 119)
#define TEA_TEXT128 TEA_TEXT120 "," TEA_T8(120, 121, 122, 123, 124, 125, 126, 127)

#define TEA_D8(d, i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TEA_OUT8(d) TEA_D8(d, 0)
#define TEA_OUT16(d) TEA_OUT8(d), TEA_D8(d, 8)
#define TEA_OUT24(d) TEA_OUT16(d), TEA_D8(d, 16)
#define TEA_OUT32(d) TEA_OUT24(d), TEA_D8(d, 24)
#define TEA_OUT40(d) TEA_OUT32(d), TEA_D8(d, 32)
#define TEA_OUT48(d) TEA_OUT40(d), TEA_D8(d, 40)
#define TEA_OUT56(d) TEA_OUT48(d), TEA_D8(d, 48)
#define TEA_OUT64(d) TEA_OUT56(d), TEA_D8(d, 56)
#define TEA_OUT72(d) TEA_OUT64(d), TEA_D8(d, 64)
#define TEA_OUT80(d) TEA_OUT72(d), TEA_D8(d, 72)
#define TEA_OUT88(d) TEA_OUT80(d), TEA_D8(d, 80)
#define TEA_OUT96(d) TEA_OUT88(d), TEA_D8(d, 88)
#define TEA_OUT104(d) TEA_OUT96(d), TEA_D8(d, 96)
#define TEA_OUT112(d) TEA_OUT104(d), TEA_D8(d, 104)
#define TEA_OUT120(d) TEA_OUT112(d), TEA_D8(d, 112)
#define TEA_OUT128(d) TEA_OUT120(d), TEA_D8(d, 120)

// One row per width: N, registers of D (N / 2), and the numbers of the operands behind them.
#define TEA_WIDTHS(ROW, ...)                                    \
  ROW(16, 8, 8, 9, 10, 11, 12, 13, 14, __VA_ARGS__)             \
  ROW(32, 16, 16, 17, 18, 19, 20, 21, 22, __VA_ARGS__)          \
  ROW(48, 24, 24, 25, 26, 27, 28, 29, 30, __VA_ARGS__)          \
  ROW(64, 32, 32, 33, 34, 35, 36, 37, 38, __VA_ARGS__)          \
  ROW(80, 40, 40, 41, 42, 43, 44, 45, 46, __VA_ARGS__)          \
  ROW(96, 48, 48, 49, 50, 51, 52, 53, 54, __VA_ARGS__)          \
  ROW(112, 56, 56, 57, 58, 59, 60, 61, 62, __VA_ARGS__)         \
  ROW(128, 64, 64, 65, 66, 67, 68, 69, 70, __VA_ARGS__)         \
  ROW(144, 72, 72, 73, 74, 75, 76, 77, 78, __VA_ARGS__)         \
  ROW(160, 80, 80, 81, 82, 83, 84, 85, 86, __VA_ARGS__)         \
  ROW(176, 88, 88, 89, 90, 91, 92, 93, 94, __VA_ARGS__)         \
  ROW(192, 96, 96, 97, 98, 99, 100, 101, 102, __VA_ARGS__)      \
  ROW(208, 104, 104, 105, 106, 107, 108, 109, 110, __VA_ARGS__) \
  ROW(224, 112, 112, 113, 114, 115, 116, 117, 118, __VA_ARGS__) \
  ROW(240, 120, 120, 121, 122, 123, 124, 125, 126, __VA_ARGS__) \
  ROW(256, 128, 128, 129, 130, 131, 132, 133, 134, __VA_ARGS__)

// Operands behind D from shared memory: a, b, add, and in 16 bits the two majors.
#define TEA_SS16(N, R, I, J, P, U, V, W, X, S, TA, TB, TEXT, d, a, b, add, major_a, major_b) \
  if constexpr (S.n == N && S.a == Type::TA && S.b == Type::TB)                              \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P                                   \
                 ", 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TEXT " {" TEA_TEXT##R     \
                 "}, %" #I ", %" #J ", p, 1, 1, %" #U ", %" #V ";\n}\n"                      \
                 : TEA_OUT##R(d)                                                             \
                 : "l"(a), "l"(b), "r"(add), "n"(major_a), "n"(major_b));
#define TEA_SS8(N, R, I, J, P, U, V, W, X, S, TA, TB, TEXT, d, a, b, add, major_a, major_b) \
  if constexpr (S.n == N && S.a == Type::TA && S.b == Type::TB)                             \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #P                                  \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TEXT " {" TEA_TEXT##R    \
                 "}, %" #I ", %" #J ", p, 1, 1;\n}\n"                                       \
                 : TEA_OUT##R(d)                                                            \
                 : "l"(a), "l"(b), "r"(add));
// From registers: four of a, then b, add, and in 16 bits the major of b.
#define TEA_RS16(N, R, I, J, P, U, V, W, X, S, TA, TB, TEXT, d, a, b, add, major_b)         \
  if constexpr (S.n == N && S.a == Type::TA && S.b == Type::TB)                             \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #W                                  \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TEXT " {" TEA_TEXT##R    \
                 "}, {%" #I ", %" #J ", %" #P ", %" #U "}, %" #V ", p, 1, 1, %" #X ";\n}\n" \
                 : TEA_OUT##R(d)                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(major_b));
#define TEA_RS8(N, R, I, J, P, U, V, W, X, S, TA, TB, TEXT, d, a, b, add, major_b)       \
  if constexpr (S.n == N && S.a == Type::TA && S.b == Type::TB)                          \
    asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #W                               \
                 ", 0;\n"                                                                \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TEXT " {" TEA_TEXT##R \
                 "}, {%" #I ", %" #J ", %" #P ", %" #U "}, %" #V ", p, 1, 1;\n}\n"       \
                 : TEA_OUT##R(d)                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));

#define TEA_WGMMA_FROM_SHARED(S, ...)                             \
  TEA_WIDTHS(TEA_SS16, S, kBf16, kBf16, "bf16.bf16", __VA_ARGS__) \
  TEA_WIDTHS(TEA_SS16, S, kFp16, kFp16, "f16.f16", __VA_ARGS__)   \
  TEA_WIDTHS(TEA_SS8, S, kE4M3, kE4M3, "e4m3.e4m3", __VA_ARGS__)  \
  TEA_WIDTHS(TEA_SS8, S, kE4M3, kE5M2, "e4m3.e5m2", __VA_ARGS__)  \
  TEA_WIDTHS(TEA_SS8, S, kE5M2, kE4M3, "e5m2.e4m3", __VA_ARGS__)  \
  TEA_WIDTHS(TEA_SS8, S, kE5M2, kE5M2, "e5m2.e5m2", __VA_ARGS__)
#define TEA_WGMMA_FROM_REGISTERS(S, ...)                          \
  TEA_WIDTHS(TEA_RS16, S, kBf16, kBf16, "bf16.bf16", __VA_ARGS__) \
  TEA_WIDTHS(TEA_RS16, S, kFp16, kFp16, "f16.f16", __VA_ARGS__)   \
  TEA_WIDTHS(TEA_RS8, S, kE4M3, kE4M3, "e4m3.e4m3", __VA_ARGS__)  \
  TEA_WIDTHS(TEA_RS8, S, kE4M3, kE5M2, "e4m3.e5m2", __VA_ARGS__)  \
  TEA_WIDTHS(TEA_RS8, S, kE5M2, kE4M3, "e5m2.e4m3", __VA_ARGS__)  \
  TEA_WIDTHS(TEA_RS8, S, kE5M2, kE5M2, "e5m2.e5m2", __VA_ARGS__)
