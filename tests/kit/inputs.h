// Hostile inputs: every tensor of a case in memory of its own between redzones, with poison in
// everything that no engine may use or must overwrite, and the same values as plain arrays.
#pragma once
#include <array>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "kit/oracle.h"
#include "kit/storage.h"
#include "kit/tensors.h"
#include "kit/values.h"

namespace tea::kit {

// The contents of outputs, and of memory that must not be used: NaN (all bits set), or 1e30 (or the
// largest value of a smaller type); and ordinary numbers, for an engine that must find such there.
// Workspaces are garbage of the first two kinds in any case.
enum class Poison { kNan, kLarge, kThree, kMinusTwo };

class Inputs {
 public:
  explicit Inputs(const Case& c);
  Inputs(const Inputs&) = delete;

  const Problem& problem() const { return problem_; }
  const Extents& extents() const { return extents_; }
  const Place& place(tea_tensor t) const { return places_[t]; }
  const Scalars& scalars() const { return scalars_; }
  // The values as an engine reads them, after rounding to the dtypes.
  const oracle::Case& logical() const { return logical_; }

  // Values of Q, K, V or dO instead of the case's, from the next fill() on.
  void replace(tea_tensor t, const std::function<double(const Index&)>& value);

  // Everything back to the start: inputs written, outputs and unused memory poisoned.
  void fill(Poison poison);
  // The run, for forward and backward alike; remembers the memory as it is, for damage().
  // `workspace`: bytes. Valid until the next call.
  const tea_run& run(uint64_t workspace);
  int32_t status() const { return status_; }

  // For a copy of the memory that runs instead of it: what there is to copy, what a workspace is
  // filled with, and the status word that came back.
  std::vector<Storage>& storages() { return storages_; }
  uint32_t poison_word() const;
  size_t origin_bytes() const;  // of run().origin_device, if there is one
  void set_status(int32_t status) { status_ = status; }

  double value(tea_tensor t, const Index& at) const;  // at: batch, head, row, column
  double flat(tea_tensor t, int64_t i) const;         // of a vector or scalar in fp32
  // Where a tensor's first element is in memory.
  uint8_t* memory(tea_tensor t) { return static_cast<uint8_t*>(pointers_[t]); }

  // The violations of the engine, one per line: redzones, inputs, holes, padding, status.
  std::vector<std::string> damage(Written direction) const;
  // Nothing at all was written since run(): what a refused call must leave.
  bool untouched() const;
  // Every byte of the outputs of one direction, for bitwise comparison.
  std::vector<uint8_t> output_bytes(Written direction) const;

 private:
  void place_alone(Place& place);
  void place_packed(tea_tensor first, const std::vector<tea_tensor>& tensors);
  int add_storage(int64_t elements, int bytes);
  void make_integers();
  void place_origin();
  void write_rows(tea_tensor t, const std::vector<double>& values);
  void write_bias();
  void write_flat();
  void write_integers();
  void read_back();
  std::vector<double>* array(tea_tensor t);
  size_t array_index(const Place& place, const Index& at) const;
  void check_storage(size_t s, Written direction, std::vector<std::string>& out) const;
  bool is_output(size_t storage, Written direction) const;
  uint8_t* at(const Place& place) { return storages_[static_cast<size_t>(place.storage)].data(); }
  const uint8_t* at(const Place& place) const {
    return storages_[static_cast<size_t>(place.storage)].data();
  }

  Case case_;
  Extents extents_;
  Problem problem_;
  Scalars scalars_;
  oracle::Case logical_;
  std::array<Place, TEA_TENSOR_COUNT> places_;
  std::array<std::vector<int64_t>, TEA_TENSOR_COUNT> integers_;
  std::vector<Storage> storages_;
  std::vector<std::vector<uint8_t>> before_;  // of each storage when run() was last called
  // Of each storage after fill(), per poison: writing elements costs more than all that engines do.
  std::map<Poison, std::vector<std::vector<uint8_t>>> filled_;
  Storage workspace_;
  Poison poison_ = Poison::kNan;
  std::array<void*, TEA_TENSOR_COUNT> pointers_{};
  std::vector<int64_t> origin_memory_;
  int32_t status_ = 0;
  tea_run run_{};
};

}  // namespace tea::kit
