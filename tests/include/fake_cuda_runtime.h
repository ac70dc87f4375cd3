/* The declarations of the CUDA runtime's headers whose names the public headers declare too. */
#ifndef TESTS_INCLUDE_FAKE_CUDA_RUNTIME_H_
#define TESTS_INCLUDE_FAKE_CUDA_RUNTIME_H_

struct CUstream_st;
typedef struct CUstream_st* cudaStream_t;

#endif
