/* cudnn.h: the function with which callers of TransformerEngine prepare cuDNN. Empty in C. */
#ifndef TRANSFORMER_ENGINE_CUDNN_H_
#define TRANSFORMER_ENGINE_CUDNN_H_

#include "transformer_engine.h"

#ifdef __cplusplus
#pragma GCC visibility push(default)

namespace transformer_engine {

// Has no effect: no engine of this library needs a cuDNN handle before a capture.
void nvte_cudnn_handle_init();

}  // namespace transformer_engine

#pragma GCC visibility pop
#endif
#endif
