// Addresses of elements, derived only from the names of the layouts: the letters of a name are its
// memory order. Shares nothing with src/nvte/layout.cpp, which it checks.
#pragma once
#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "transformer_engine/fused_attn.h"

namespace tea::test {

inline constexpr int kLayouts = 25;
inline constexpr const char* kLayoutNames[kLayouts] = {
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

struct Order {
  bool paged = false;
  std::vector<std::string> buffers;

  const std::string& of_q() const { return buffers.front(); }
  const std::string& of_k() const { return buffers.size() == 1 ? buffers[0] : buffers[1]; }
  bool packs_qkv() const { return buffers.size() == 1; }
  bool packs_kv() const { return buffers.size() <= 2; }
  bool ragged_q() const { return of_q()[0] == 't'; }
  bool ragged_kv() const { return of_k()[0] == 't'; }
  // Q's order without what it is packed with.
  std::string plain_q() const { return ragged_q() ? "thd" : of_q().substr(0, 2) + "hd"; }
};

inline Order order_of(NVTE_QKV_Layout layout) {
  std::string text = kLayoutNames[layout];
  const std::string prefix = "paged_kv_";
  Order order;
  order.paged = text.starts_with(prefix);
  if (order.paged) text = text.substr(prefix.size());
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, '_');) order.buffers.push_back(part);
  return order;
}

using Letters = std::map<char, int64_t>;

// The stride of every letter of a buffer, the last one contiguous. '3' and '2' count its tensors.
inline Letters letter_strides(const std::string& letters, Letters sizes) {
  sizes['3'] = 3, sizes['2'] = 2;
  Letters strides;
  int64_t next = 1;
  for (auto it = letters.rbegin(); it != letters.rend(); ++it) {
    strides[*it] = next;
    next *= sizes.at(*it);
  }
  strides['*'] = next;  // elements of the buffer
  return strides;
}

}  // namespace tea::test
