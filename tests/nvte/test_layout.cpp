// The layout table against the names: the letters of a layout's name are its memory order, so
// strides, offsets, groups and formats all follow from the text.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "nvte/expect_error.h"
#include "nvte/layout.h"
#include "nvte/memory_order.h"

namespace tea::nvte {
namespace {

using test::kLayoutNames;
using test::Order;

void check_side(const std::string& letters, NVTE_QKV_Format format, Packing packing,
                const Extent& e) {
  const auto expected = test::letter_strides(
      letters, {{'b', e.batch}, {'s', e.rows}, {'t', 1}, {'h', e.heads}, {'d', e.dim}});
  const tea_strides s = strides(format, packing, e);
  const bool ragged = letters.find('t') != std::string::npos;
  EXPECT_EQ(s.seq, expected.at(ragged ? 't' : 's')) << letters;
  EXPECT_EQ(s.batch, ragged ? 0 : expected.at('b')) << letters;
  EXPECT_EQ(s.head, expected.at('h')) << letters;
  for (const char count : {'2', '3'})
    if (expected.contains(count)) {
      EXPECT_EQ(packing.tensors, count - '0') << letters;
      EXPECT_EQ(packed_offset(packing, 1, e.heads, e.dim), expected.at(count)) << letters;
      EXPECT_EQ(packed_offset(packing, 2, e.heads, e.dim), 2 * expected.at(count)) << letters;
    }
}

TEST(Layout, StridesFollowTheLettersOfTheName) {
  for (int i = 0; i < test::kLayouts; ++i) {
    const Order name = test::order_of(static_cast<NVTE_QKV_Layout>(i));
    const Layout& layout = layout_of(static_cast<NVTE_QKV_Layout>(i));
    EXPECT_EQ(layout.paged(), name.paged) << kLayoutNames[i];
    check_side(name.of_q(), layout.q, layout.packing_q(), {3, 5, 4, 16});
    check_side(name.of_k(), layout.kv, layout.packing_kv(), {3, 7, name.packs_qkv() ? 4 : 2, 16});
  }
}

NVTE_QKV_Layout_Group group_of(const Order& name) {
  if (name.paged) return NVTE_Paged_KV_HD_HD_HD;
  const std::map<std::string, NVTE_QKV_Layout_Group> tails = {
      {"3hd", NVTE_3HD}, {"h3d", NVTE_H3D}, {"2hd", NVTE_HD_2HD}, {"h2d", NVTE_HD_H2D}};
  const std::string& k = name.of_k();
  const auto it = tails.find(k.substr(k.size() - 3));
  return it == tails.end() ? NVTE_HD_HD_HD : it->second;
}

// "bs", "sb" or "t": the order of tokens in a buffer.
std::string tokens_of(const std::string& letters) {
  return letters.substr(0, letters[0] == 't' ? 1 : 2);
}

TEST(Layout, GroupsAndFormatsFollowTheName) {
  const std::map<std::string, NVTE_QKV_Format> plain = {
      {"sb", NVTE_SBHD}, {"bs", NVTE_BSHD}, {"t", NVTE_THD}};
  const std::map<std::string, NVTE_QKV_Format> both = {
      {"sb sb", NVTE_SBHD},       {"bs bs", NVTE_BSHD},       {"t t", NVTE_THD},
      {"bs sb", NVTE_BSHD_2SBHD}, {"sb bs", NVTE_SBHD_2BSHD}, {"t bs", NVTE_THD_2BSHD},
      {"t sb", NVTE_THD_2SBHD}};
  for (int i = 0; i < test::kLayouts; ++i) {
    const Order name = test::order_of(static_cast<NVTE_QKV_Layout>(i));
    const auto layout = static_cast<NVTE_QKV_Layout>(i);
    const std::string q = tokens_of(name.of_q()), kv = tokens_of(name.of_k());
    EXPECT_EQ(nvte_get_qkv_layout_group(layout), group_of(name)) << kLayoutNames[i];
    EXPECT_EQ(nvte_get_q_format(layout), plain.at(q)) << kLayoutNames[i];
    EXPECT_EQ(nvte_get_kv_format(layout), plain.at(kv)) << kLayoutNames[i];
    EXPECT_EQ(nvte_get_qkv_format(layout), both.at(q + " " + kv)) << kLayoutNames[i];
  }
}

TEST(Layout, UnknownValuesThrowTheDocumentedText) {
  for (const int value : {25, 26, 31}) {  // others the type cannot hold
    const auto layout = static_cast<NVTE_QKV_Layout>(value);
    const char* const text = "qkv_layout not supported!";
    EXPECT_NVTE_ERROR(nvte_get_qkv_layout_group(layout), text);
    EXPECT_NVTE_ERROR(nvte_get_qkv_format(layout), text);
    EXPECT_NVTE_ERROR(nvte_get_q_format(layout), text);
    EXPECT_NVTE_ERROR(nvte_get_kv_format(layout), text);
  }
}

}  // namespace
}  // namespace tea::nvte
