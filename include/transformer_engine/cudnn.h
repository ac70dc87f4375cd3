/* cudnn.h: what callers of TransformerEngine use to prepare cuDNN. Empty in C. */
#ifndef TRANSFORMER_ENGINE_CUDNN_H_
#define TRANSFORMER_ENGINE_CUDNN_H_

#include "transformer_engine.h"

#ifdef __cplusplus
#pragma GCC visibility push(default)

namespace transformer_engine {

// Does nothing: this library's engines need no cuDNN handle, so none has to exist before a capture.
void nvte_cudnn_handle_init();

}  // namespace transformer_engine

#pragma GCC visibility pop
#endif
#endif
