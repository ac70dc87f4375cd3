// Keys and values in pages.
#pragma once
#include "gpu/arguments.cuh"

namespace tea::hopper {

// The page of an entry of a page table, for a pool of `pages`: clamped and reported if it is not in
// the pool.
TEA_DEVICE int page_of(const AttentionArguments& args, int32_t entry, int64_t pages) {
  bool valid = true;
  const auto page = static_cast<int>(clamp_page(entry, pages, &valid));
  if (!valid) report_status(args, TEA_STATUS_BAD_PAGE);
  return page;
}

}  // namespace tea::hopper
