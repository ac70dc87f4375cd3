// Placing, copying and bringing back.
#include "kit/mirror.h"

#include <algorithm>
#include <cstring>

namespace tea::kit {
namespace {

constexpr size_t kBlockAlignment = 512;

size_t up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// As the storages of the Inputs: on a multiple of its alignment, but on none of twice as much.
size_t first_odd_multiple(size_t from, size_t alignment) {
  return up(from, 2 * alignment) + alignment;
}

}  // namespace

Mirror::Mirror(Gpu& gpu, Inputs& inputs, Around around)
    : gpu_(gpu),
      inputs_(inputs),
      around_(around),
      status_(sizeof(int32_t), 16),
      origin_(inputs.origin_bytes(), 16),
      red_{Storage(kRedzone, 16), Storage(kRedzone, 16)},
      pointers_(TEA_TENSOR_COUNT) {
  for (Storage& storage : inputs.storages()) pieces_.push_back({&storage, nullptr, nullptr});
  pieces_.push_back({&status_, nullptr, nullptr});
  pieces_.push_back({&origin_, nullptr, nullptr});
}

Mirror::~Mirror() {
  try {
    if (around_ == Around::kAllocations) gpu_.release();
  } catch (const GpuLost&) {  // was reported where it happened
  }
}

void Mirror::place_between_redzones() {
  std::vector<size_t> offsets;
  size_t end = 0;
  for (const Piece& piece : pieces_) {
    offsets.push_back(first_odd_multiple(end + kRedzone, piece.here->alignment()));
    end = offsets.back() + piece.here->size() + kRedzone;
  }
  block_bytes_ = end;
  block_ = gpu_.block(end);
  for (size_t i = 0; i < pieces_.size(); ++i) {
    pieces_[i].there = block_.device + offsets[i];
    pieces_[i].staged = block_.host + offsets[i] - kRedzone;
  }
}

uint8_t* Mirror::place_alone(size_t slot, size_t bytes, size_t alignment) {
  if (around_ == Around::kAllocations) return gpu_.separate(bytes);
  const Flush flush = around_ == Around::kUnmappedBefore ? Flush::kStart : Flush::kEnd;
  return gpu_.guarded(slot, bytes, alignment, flush);
}

// Like an empty tensor of PyTorch, one without a byte has no address.
void* Mirror::moved(const Place& place) const {
  if (!place.used) return nullptr;
  const Piece& piece = pieces_[static_cast<size_t>(place.storage)];
  if (!piece.here->size()) return nullptr;
  return piece.there + (inputs_.memory(place.id) - piece.here->data());
}

// As Inputs::run() does on the host: garbage of the same poison.
void Mirror::fill_workspace(uint64_t bytes) {
  workspace_bytes_ = bytes;
  const uint32_t garbage = inputs_.poison_word();
  if (!has_redzones()) {
    workspace_ = place_alone(pieces_.size(), up(bytes, 256), 256);
    if (around_ != Around::kAllocations) gpu_.fill(workspace_, garbage, bytes);
    return;
  }
  uint8_t* const before = gpu_.scratch(up(bytes, 4) + 2 * kRedzone);
  workspace_ = before + kRedzone;
  uint8_t* const behind = workspace_ + up(bytes, 4);
  gpu_.fill(workspace_, garbage, bytes);
  gpu_.upload(before, red_[0].data() - kRedzone, kRedzone);  // the pattern
  gpu_.upload(behind, red_[1].data() - kRedzone, kRedzone);
}

const tea_run& Mirror::upload(uint64_t workspace) {
  if (around_ == Around::kAllocations) gpu_.release();
  run_ = inputs_.run(0);
  std::memset(status_.data(), 0, status_.size());
  if (run_.origin_device) std::memcpy(origin_.data(), run_.origin_device, origin_.size());
  fill_workspace(workspace);
  if (has_redzones()) {
    place_between_redzones();
    for (const Piece& piece : pieces_)
      std::memcpy(piece.staged, piece.here->data() - kRedzone, piece.here->size() + 2 * kRedzone);
    gpu_.upload(block_.device, block_.host, block_bytes_);
  }
  for (size_t i = 0; i < pieces_.size() && !has_redzones(); ++i) {
    const Storage& here = *pieces_[i].here;
    pieces_[i].there = place_alone(i, here.size(), here.alignment());
    gpu_.upload(pieces_[i].there, here.data(), here.size());
  }
  for (int t = 0; t < TEA_TENSOR_COUNT; ++t)
    pointers_[static_cast<size_t>(t)] = moved(inputs_.place(static_cast<tea_tensor>(t)));
  const Piece &status = pieces_[pieces_.size() - 2], &origin = pieces_.back();
  run_.tensors = pointers_.data();
  run_.workspace = workspace ? workspace_ : nullptr;
  run_.workspace_bytes = workspace;
  run_.stream = gpu_.stream();
  run_.status = reinterpret_cast<int32_t*>(status.there);
  if (run_.origin_device) run_.origin_device = reinterpret_cast<const int64_t*>(origin.there);
  return run_;
}

void Mirror::fetch() {
  if (has_redzones()) {
    gpu_.download(block_.host, block_.device, block_bytes_);
    gpu_.download(red_[0].data(), workspace_ - kRedzone, kRedzone);
    gpu_.download(red_[1].data(), workspace_ + up(workspace_bytes_, 4), kRedzone);
  } else {
    for (const Piece& piece : pieces_)
      gpu_.download(piece.here->data(), piece.there, piece.here->size());
  }
  gpu_.wait();
  if (has_redzones())
    for (const Piece& piece : pieces_)
      std::memcpy(piece.here->data() - kRedzone, piece.staged, piece.here->size() + 2 * kRedzone);
  int32_t status;
  std::memcpy(&status, status_.data(), sizeof status);
  inputs_.set_status(status);
}

std::vector<std::string> Mirror::damage() const {
  std::vector<std::string> out;
  const auto look = [&out](const Storage& storage, const char* name) {
    if (storage.damage()) out.push_back(std::string("redzone of ") + name + " was written");
  };
  look(status_, "the status word");
  look(origin_, "the origin");
  for (const Storage& red : red_)
    if (has_redzones() && !red.holds_pattern())
      out.push_back("redzone of the workspace was written");
  return out;
}

}  // namespace tea::kit
