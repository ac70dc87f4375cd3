// Everything that a run touches, copied to a GPU with its redzones and its poison, and brought back
// into the Inputs, whose checks then see what was done there.
#pragma once
#include <string>
#include <vector>

#include "kit/gpu.h"
#include "kit/inputs.h"

namespace tea::kit {

// The memory around every tensor: redzones; nothing that is mapped, before or behind it; or
// whatever the allocator puts there, for a sanitizer, for which the workspace is uninitialised.
enum class Around { kRedzones, kUnmappedBefore, kUnmappedBehind, kAllocations };

class Mirror {
 public:
  Mirror(Gpu& gpu, Inputs& inputs, Around around = Around::kRedzones);
  ~Mirror();

  // The run of the Inputs with the pointers of the copies, which are made now. Valid until the next
  // call. The same sizes give the same pointers.
  const tea_run& upload(uint64_t workspace);
  // Waits for the GPU and brings everything back.
  void fetch();
  // Checks that only the mirror can make: redzones of the workspace, of the status word and of the
  // origin.
  std::vector<std::string> damage() const;

 private:
  struct Piece {
    Storage* here;
    uint8_t* there;   // of the data
    uint8_t* staged;  // its copy in pinned memory, redzones included; null where there are none
  };
  bool has_redzones() const { return around_ == Around::kRedzones; }
  void place_between_redzones();
  uint8_t* place_alone(size_t slot, size_t bytes, size_t alignment);
  void fill_workspace(uint64_t bytes);
  void* moved(const Place& place) const;

  Gpu& gpu_;
  Inputs& inputs_;
  Around around_;
  Storage status_, origin_;
  std::vector<Piece> pieces_;  // of the tensors, then of status_ and origin_
  Gpu::Block block_{};
  size_t block_bytes_ = 0;
  Storage red_[2];  // what was found before and behind the workspace
  uint8_t* workspace_ = nullptr;
  uint64_t workspace_bytes_ = 0;
  std::vector<void*> pointers_;
  tea_run run_{};
};

}  // namespace tea::kit
