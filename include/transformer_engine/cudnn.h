/* cudnn.h: the name that callers of TransformerEngine use to prepare cuDNN. C++ only in substance.
 */
#ifndef TRANSFORMER_ENGINE_CUDNN_H_
#define TRANSFORMER_ENGINE_CUDNN_H_

#include "transformer_engine.h"

#ifdef __cplusplus
namespace transformer_engine {

#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif
// Does nothing: this library's engines need no cuDNN handle, so none has to exist before a capture.
void nvte_cudnn_handle_init();
#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

}  // namespace transformer_engine
#endif
#endif
