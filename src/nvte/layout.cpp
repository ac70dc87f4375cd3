// The layout table and the functions based on it.
#include "nvte/layout.h"

#include <array>

#include "nvte/error.h"

namespace tea::nvte {
namespace {

constexpr auto kSeparate = NVTE_HD_HD_HD;
constexpr auto kPaged = NVTE_Paged_KV_HD_HD_HD;

// Indexed by NVTE_QKV_Layout.
constexpr std::array<Layout, 25> kLayouts{{
    {NVTE_3HD, NVTE_SBHD, NVTE_SBHD},     // SB3HD
    {NVTE_H3D, NVTE_SBHD, NVTE_SBHD},     // SBH3D
    {NVTE_HD_2HD, NVTE_SBHD, NVTE_SBHD},  // SBHD_SB2HD
    {NVTE_HD_H2D, NVTE_SBHD, NVTE_SBHD},  // SBHD_SBH2D
    {kSeparate, NVTE_SBHD, NVTE_SBHD},    // SBHD_SBHD_SBHD
    {NVTE_3HD, NVTE_BSHD, NVTE_BSHD},     // BS3HD
    {NVTE_H3D, NVTE_BSHD, NVTE_BSHD},     // BSH3D
    {NVTE_HD_2HD, NVTE_BSHD, NVTE_BSHD},  // BSHD_BS2HD
    {NVTE_HD_H2D, NVTE_BSHD, NVTE_BSHD},  // BSHD_BSH2D
    {kSeparate, NVTE_BSHD, NVTE_BSHD},    // BSHD_BSHD_BSHD
    {NVTE_3HD, NVTE_THD, NVTE_THD},       // T3HD
    {NVTE_H3D, NVTE_THD, NVTE_THD},       // TH3D
    {NVTE_HD_2HD, NVTE_THD, NVTE_THD},    // THD_T2HD
    {NVTE_HD_H2D, NVTE_THD, NVTE_THD},    // THD_TH2D
    {kSeparate, NVTE_THD, NVTE_THD},      // THD_THD_THD
    {kSeparate, NVTE_SBHD, NVTE_BSHD},    // SBHD_BSHD_BSHD
    {kSeparate, NVTE_BSHD, NVTE_SBHD},    // BSHD_SBHD_SBHD
    {kSeparate, NVTE_THD, NVTE_BSHD},     // THD_BSHD_BSHD
    {kSeparate, NVTE_THD, NVTE_SBHD},     // THD_SBHD_SBHD
    {kPaged, NVTE_BSHD, NVTE_BSHD},       // Paged_KV_BSHD_BSHD_BSHD
    {kPaged, NVTE_BSHD, NVTE_SBHD},       // Paged_KV_BSHD_SBHD_SBHD
    {kPaged, NVTE_SBHD, NVTE_BSHD},       // Paged_KV_SBHD_BSHD_BSHD
    {kPaged, NVTE_SBHD, NVTE_SBHD},       // Paged_KV_SBHD_SBHD_SBHD
    {kPaged, NVTE_THD, NVTE_BSHD},        // Paged_KV_THD_BSHD_BSHD
    {kPaged, NVTE_THD, NVTE_SBHD},        // Paged_KV_THD_SBHD_SBHD
}};

constexpr Packing kAlone{1, false};

// Indexed by NVTE_QKV_Layout_Group.
constexpr Packing kPackingQ[] = {{3, false}, {3, true}, kAlone, kAlone, kAlone, kAlone};
constexpr Packing kPackingKv[] = {{3, false}, {3, true}, {2, false}, {2, true}, kAlone, kAlone};

// The format of a layout, indexed by the format of Q and by that of K and V. K and V are never
// ragged with a dense Q.
constexpr NVTE_QKV_Format kFormats[3][2] = {
    {NVTE_SBHD, NVTE_SBHD_2BSHD}, {NVTE_BSHD_2SBHD, NVTE_BSHD}, {NVTE_THD_2SBHD, NVTE_THD_2BSHD}};

}  // namespace

Packing Layout::packing_q() const { return kPackingQ[group]; }
Packing Layout::packing_kv() const { return kPackingKv[group]; }
NVTE_QKV_Format Layout::format() const { return kv == NVTE_THD ? NVTE_THD : kFormats[q][kv]; }

const Layout& layout_of(NVTE_QKV_Layout layout) {
  const auto index = static_cast<size_t>(layout);
  if (index >= kLayouts.size())
    TEA_NVTE_ERROR("qkv_layout not supported! It is ", static_cast<int>(index), "; needs 0 to ",
                   kLayouts.size() - 1, ".");
  return kLayouts[index];
}

tea_strides strides(NVTE_QKV_Format format, Packing packing, const Extent& extent) {
  const int64_t token = packing.tensors * extent.heads * extent.dim;
  const int64_t head = packing.per_head ? packing.tensors * extent.dim : extent.dim;
  switch (format) {
    case NVTE_SBHD:
      return {token, extent.batch * token, head};
    case NVTE_BSHD:
      return {extent.rows * token, token, head};
    default:
      return {0, token, head};
  }
}

int64_t packed_offset(Packing packing, int index, int64_t heads, int64_t dim) {
  return index * (packing.per_head ? dim : heads * dim);
}

}  // namespace tea::nvte

NVTE_QKV_Layout_Group nvte_get_qkv_layout_group(NVTE_QKV_Layout qkv_layout) {
  return tea::nvte::layout_of(qkv_layout).group;
}

NVTE_QKV_Format nvte_get_qkv_format(NVTE_QKV_Layout qkv_layout) {
  return tea::nvte::layout_of(qkv_layout).format();
}

NVTE_QKV_Format nvte_get_q_format(NVTE_QKV_Layout qkv_layout) {
  return tea::nvte::layout_of(qkv_layout).q;
}

NVTE_QKV_Format nvte_get_kv_format(NVTE_QKV_Layout qkv_layout) {
  return tea::nvte::layout_of(qkv_layout).kv;
}
