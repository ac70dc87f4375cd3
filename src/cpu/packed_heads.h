// Keys and values in the order in which the kernels of an instruction set read them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/flash.h"
#include "cpu/kept.h"

namespace tea::cpu {

// Packed K and V of the first groups: of as many as fit in kPackedBytes, but of at least one. All
// threads share the work. Nothing is packed if the kernels read K and V in place.
template <class Real>
class PackedHeads {
 public:
  PackedHeads(const View& view, const Kernels<Real>& kernels, Pass pass, std::span<Group> groups)
      : groups_(kernels.pack ? cut(view, kernels, pass, groups) : groups), memory_(bytes_) {
    if (kernels.pack) pack(view, kernels, pass);
  }
  std::span<Group> groups() const { return groups_; }

 private:
  struct Part {
    const Group* group;
    int64_t first;
    std::byte* to;
  };

  // Finds where each group begins, and what part of the memory all of them take.
  std::span<Group> cut(const View& view, const Kernels<Real>& kernels, Pass pass,
                       std::span<Group> groups) {
    for (const Group& g : groups) {
      const int64_t more = kernels.packed_bytes(view.p, g, pass);
      if (!begin_.empty() && bytes_ + more > kPackedBytes) break;
      begin_.push_back(bytes_);
      bytes_ += more;
    }
    return groups.first(begin_.size());
  }

  void pack(const View& view, const Kernels<Real>& kernels, Pass pass) {
    std::vector<Part> parts;
    for (size_t i = 0; i < groups_.size(); ++i) {
      Group& g = groups_[i];
      std::byte* const to = memory_.get() + begin_[i];
      g.packed = to;
      for (int64_t first = 0; first < g.visible.end - g.visible.begin; first += kPackedKeys)
        parts.push_back({&g, first, to});
    }
    view.parallel_for(static_cast<int64_t>(parts.size()), [&](int64_t i) {
      const Part& part = parts[static_cast<size_t>(i)];
      kernels.pack(view, *part.group, pass, part.first, part.to);
    });
  }

  int64_t bytes_ = 0;
  std::vector<int64_t> begin_;  // by group
  const std::span<Group> groups_;
  const Kept<std::byte> memory_;
};

}  // namespace tea::cpu
