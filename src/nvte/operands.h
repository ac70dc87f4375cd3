// Tensor arguments of the helpers beside attention: looked up once, named in every message, checked
// before anything is written.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "nvte/tensor.h"
#include "ops/args.h"

namespace tea::nvte {

struct Operand {
  const char* name;
  const Tensor* tensor;  // never NULL
  NVTEShape shape;       // logical

  Operand(const char* parameter, NVTETensor handle);  // throws "Invalid tensor."
  void* data() const { return tensor->data.data_ptr; }
  NVTEDType type() const { return tensor->dtype(); }
  int rank() const { return static_cast<int>(shape.ndim); }
  int64_t elements() const { return static_cast<int64_t>(numel(shape)); }
  // Dimension i, from the end where i is negative; throws if there is none.
  int64_t size(int i) const;
};

// Each throws Error with the operand's name, the value seen and the value needed.
void require_rank(const Operand& operand, int least, int most);
void require_elements(const Operand& operand, int64_t least);
void require_same_type(const Operand& operand, const Operand& like);
// The tea_dtype of an operand whose type is in the set (see ops/args.h).
int32_t required_dtype(const Operand& operand, uint32_t allowed);
// The data of an int32 or fp32 operand of at least so many elements.
int32_t* int32_data(const Operand& operand, int64_t least);
float* float_data(const Operand& operand, int64_t least);
// The number of sequences of a cu_seqlens operand: at least one.
int64_t batch_of(const Operand& cu_seqlens);

// Where the operands lie: all on one side.
Place place_of(std::initializer_list<Operand> operands, cudaStream_t stream);

// Where an operation reports nonsense in arrays: nowhere on a GPU, for asking would mean waiting.
int32_t* status_at(const Place& place, int32_t* status);
// Throws if an operation reported nonsense in `arrays`. It has skipped what was out of range.
void require_sane(int32_t status, const char* arrays);

}  // namespace tea::nvte
