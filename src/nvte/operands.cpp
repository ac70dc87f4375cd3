// Checks of the tensor arguments of the supporting operations.
#include "nvte/operands.h"

#include "nvte/memory.h"
#include "nvte/problem.h"

namespace tea::nvte {
Operand::Operand(const char* parameter, NVTETensor handle)
    : name(parameter), tensor(&tea::nvte::tensor(parameter, handle)), shape(tensor->shape()) {}

int64_t Operand::size(int i) const {
  const int dim = i < 0 ? rank() + i : i;
  TEA_REQUIRE(dim >= 0 && dim < rank(), std::string(name) + ".ndim", rank(),
              "a dimension " + shown(i));
  return static_cast<int64_t>(shape.data[dim]);
}

void require_rank(const Operand& operand, int least, int most) {
  TEA_REQUIRE(operand.rank() >= least && operand.rank() <= most,
              std::string(operand.name) + ".ndim", operand.rank(),
              shown(least) + (least == most ? "" : " to " + shown(most)));
}

void require_elements(const Operand& operand, int64_t least) {
  TEA_REQUIRE(operand.elements() >= least, std::string(operand.name) + ".numel", operand.elements(),
              shown(least) + " or more");
}

void require_same_type(const Operand& operand, const Operand& like) {
  TEA_REQUIRE(operand.type() == like.type(), std::string(operand.name) + ".dtype",
              static_cast<int>(operand.type()),
              std::string("that of ") + like.name + ", " + shown(static_cast<int>(like.type())));
}

int32_t required_dtype(const Operand& operand, uint32_t allowed) {
  const tea_dtype dtype = dtype_of(operand.type());
  const std::string name = std::string(operand.name) + ".dtype";
  TEA_REQUIRE(dtype != TEA_DTYPE_DEFAULT, name, static_cast<int>(operand.type()),
              "a floating-point NVTEDType of 8, 16 or 32 bits");
  require_dtype(name.c_str(), dtype, allowed);
  return dtype;
}

int32_t* int32_data(const Operand& operand, int64_t least) {
  TEA_REQUIRE(operand.type() == kNVTEInt32, std::string(operand.name) + ".dtype",
              static_cast<int>(operand.type()), "kNVTEInt32, 2");
  require_elements(operand, least);
  return static_cast<int32_t*>(operand.data());
}

float* float_data(const Operand& operand, int64_t least) {
  TEA_REQUIRE(operand.type() == kNVTEFloat32, std::string(operand.name) + ".dtype",
              static_cast<int>(operand.type()), "kNVTEFloat32, 4");
  require_elements(operand, least);
  return static_cast<float*>(operand.data());
}

int64_t batch_of(const Operand& cu_seqlens) {
  require_elements(cu_seqlens, 2);
  return cu_seqlens.elements() - 1;
}

Place place_of(std::initializer_list<Operand> operands, cudaStream_t stream) {
  MemorySide side;
  for (const Operand& operand : operands) side.add(operand.name, operand.data());
  return {side.device(), stream};
}

int32_t* status_at(const Place& place, int32_t* status) {
  return place.device == kHost ? status : nullptr;
}

void require_valid(int32_t status, const char* arrays) {
  if (status) refuse_argument(arrays, "out of range in part", "positions inside the tensors");
}

}  // namespace tea::nvte
