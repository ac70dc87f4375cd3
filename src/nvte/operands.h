// Tensor arguments of the supporting operations: looked up once, named in every message, and
// checked before any output is written.
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
  // Dimension i, counted from the end if i is negative; throws if it does not exist.
  int64_t size(int i) const;
};

// Each throws Error with the operand's name, the value seen and the value needed.
void require_rank(const Operand& operand, int least, int most);
void require_elements(const Operand& operand, int64_t least);
void require_same_type(const Operand& operand, const Operand& like);
// The tea_dtype of an operand whose type is in the set (see ops/args.h).
int32_t required_dtype(const Operand& operand, uint32_t allowed);
// The data of an int32 or fp32 operand of at least `least` elements.
int32_t* int32_data(const Operand& operand, int64_t least);
float* float_data(const Operand& operand, int64_t least);
// The number of sequences of a cu_seqlens operand: at least one.
int64_t batch_of(const Operand& cu_seqlens);

// The device or host of the operands, which must be the same for all.
Place place_of(std::initializer_list<Operand> operands, cudaStream_t stream);

// The status word for invalid values in arrays. NULL on a GPU, because reading it synchronises.
int32_t* status_at(const Place& place, int32_t* status);
// Throws if an operation reported invalid values in `arrays`, which it has skipped.
void require_valid(int32_t status, const char* arrays);

// Runs an operation, and throws if it found invalid values in `arrays` on the host.
template <class Args>
void run(void (*operation)(const Args&, const Place&), Args args, const Place& place,
         const char* arrays = "cu_seqlens") {
  int32_t status = 0;
  args.status = status_at(place, &status);
  operation(args, place);
  require_valid(status, arrays);
}

}  // namespace tea::nvte
