// The layout table against the names: the letters of a layout's name are its memory order, so
// strides, offsets, groups and formats all follow from the text.
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "nvte/layout.h"

namespace tea::nvte {
namespace {

constexpr const char* kNames[] = {
    "sb3hd",
    "sbh3d",
    "sbhd_sb2hd",
    "sbhd_sbh2d",
    "sbhd_sbhd_sbhd",
    "bs3hd",
    "bsh3d",
    "bshd_bs2hd",
    "bshd_bsh2d",
    "bshd_bshd_bshd",
    "t3hd",
    "th3d",
    "thd_t2hd",
    "thd_th2d",
    "thd_thd_thd",
    "sbhd_bshd_bshd",
    "bshd_sbhd_sbhd",
    "thd_bshd_bshd",
    "thd_sbhd_sbhd",
    "paged_kv_bshd_bshd_bshd",
    "paged_kv_bshd_sbhd_sbhd",
    "paged_kv_sbhd_bshd_bshd",
    "paged_kv_sbhd_sbhd_sbhd",
    "paged_kv_thd_bshd_bshd",
    "paged_kv_thd_sbhd_sbhd",
};

struct Name {
  bool paged = false;
  std::vector<std::string> buffers;
  const std::string& of_q() const { return buffers.front(); }
  const std::string& of_k() const { return buffers.size() == 1 ? buffers[0] : buffers[1]; }
};

Name parsed(std::string text) {
  Name name;
  const std::string prefix = "paged_kv_";
  name.paged = text.starts_with(prefix);
  if (name.paged) text = text.substr(prefix.size());
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, '_');) name.buffers.push_back(part);
  return name;
}

// Stride of every letter in a buffer, the last one contiguous. '3' and '2' count tensors.
std::map<char, int64_t> letter_strides(const std::string& letters,
                                       const std::map<char, int64_t>& sizes) {
  std::map<char, int64_t> strides;
  int64_t next = 1;
  for (auto it = letters.rbegin(); it != letters.rend(); ++it) {
    strides[*it] = next;
    next *= sizes.at(*it);
  }
  return strides;
}

void check_side(const std::string& letters, NVTE_QKV_Format format, Packing packing,
                const Extent& e) {
  const auto expected = letter_strides(
      letters,
      {{'b', e.batch}, {'s', e.rows}, {'t', 1}, {'h', e.heads}, {'d', e.dim}, {'3', 3}, {'2', 2}});
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
  for (int i = 0; i < 25; ++i) {
    const Name name = parsed(kNames[i]);
    const Layout& layout = layout_of(static_cast<NVTE_QKV_Layout>(i));
    EXPECT_EQ(layout.paged(), name.paged) << kNames[i];
    check_side(name.of_q(), layout.q, layout.packing_q(), {3, 5, 4, 16});
    check_side(name.of_k(), layout.kv, layout.packing_kv(),
               {3, 7, name.buffers.size() == 1 ? 4 : 2, 16});
  }
}

NVTE_QKV_Layout_Group group_of(const Name& name) {
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
  for (int i = 0; i < 25; ++i) {
    const Name name = parsed(kNames[i]);
    const auto layout = static_cast<NVTE_QKV_Layout>(i);
    const std::string q = tokens_of(name.of_q()), kv = tokens_of(name.of_k());
    EXPECT_EQ(nvte_get_qkv_layout_group(layout), group_of(name)) << kNames[i];
    EXPECT_EQ(nvte_get_q_format(layout), plain.at(q)) << kNames[i];
    EXPECT_EQ(nvte_get_kv_format(layout), plain.at(kv)) << kNames[i];
    EXPECT_EQ(nvte_get_qkv_format(layout), both.at(q + " " + kv)) << kNames[i];
  }
}

TEST(Layout, UnknownValuesThrowTheDocumentedText) {
  for (const int value : {-1, 25, 26, 1000}) {
    const auto layout = static_cast<NVTE_QKV_Layout>(value);
    for (const auto& ask : {+[](NVTE_QKV_Layout l) { nvte_get_qkv_layout_group(l); },
                            +[](NVTE_QKV_Layout l) { nvte_get_qkv_format(l); },
                            +[](NVTE_QKV_Layout l) { nvte_get_q_format(l); },
                            +[](NVTE_QKV_Layout l) { nvte_get_kv_format(l); }}) {
      try {
        ask(layout);
        ADD_FAILURE() << value << " was accepted";
      } catch (const std::runtime_error& e) {
        EXPECT_NE(std::string(e.what()).find("qkv_layout not supported!"), std::string::npos);
      }
    }
  }
}

}  // namespace
}  // namespace tea::nvte
