/* A CUDA driver with one GPU that is not there: its memory is an array, and its context is current
   or not as a test says. */
#include <string.h>

static struct { int sm, current, used, calls; } gpu = {90, 0, 0, 0};
static char memory[4096];

/* The functions for the tests. */
void fake_gpu(int sm, int current, int used) {
  gpu.sm = sm, gpu.current = current, gpu.used = used;
}
int fake_gpu_calls(void) { return gpu.calls; }
char* fake_gpu_memory(void) { return memory; }

/* The functions that the library calls, with the numbers of CUDA's binary interface. */
enum { kOk = 0, kNoContext = 201 };
enum { kMultiprocessors = 16, kMajor = 75, kMinor = 76, kSharedOptIn = 97 };
enum { kMemoryType = 2, kIsManaged = 8, kOrdinal = 9, kBegin = 11, kBytes = 12, kDevice = 2 };

static int called(void) {
  ++gpu.calls;
  return kOk;
}

int cuInit(unsigned flags) { return (void)flags, called(); }
int cuGetErrorName(int code, const char** name) { return (void)code, *name = "FAKE", called(); }
int cuDeviceGetCount(int* count) { return *count = 1, called(); }
int cuDeviceGet(int* device, int index) { return *device = index, called(); }

int cuDeviceGetAttribute(int* value, int which, int device) {
  (void)device;
  *value = which == kMajor             ? gpu.sm / 10
           : which == kMinor           ? gpu.sm % 10
           : which == kMultiprocessors ? 1
           : which == kSharedOptIn     ? 49152
                                       : 0;
  return called();
}

int cuCtxGetDevice(int* device) {
  called();
  if (!gpu.current) return kNoContext;
  return *device = 0, kOk;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  (void)device;
  *flags = 0, *active = gpu.used;
  return called();
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  (void)device;
  *context = &gpu;
  return called();
}
int cuCtxPushCurrent_v2(void* context) { return (void)context, called(); }
int cuCtxPopCurrent_v2(void** context) { return *context = &gpu, called(); }

int cuPointerGetAttributes(unsigned count, const int* which, void** values,
                           unsigned long long address) {
  const unsigned long long begin = (unsigned long long)(size_t)memory;
  const int mine = address - begin < sizeof memory;
  for (unsigned i = 0; i < count; ++i) {
    if (which[i] == kMemoryType) *(unsigned*)values[i] = mine ? kDevice : 0;
    if (which[i] == kIsManaged) *(unsigned*)values[i] = 0;
    if (which[i] == kOrdinal) *(int*)values[i] = mine ? 0 : -2;
    if (which[i] == kBegin) *(unsigned long long*)values[i] = mine ? begin : 0;
    if (which[i] == kBytes) *(size_t*)values[i] = mine ? sizeof memory : 0;
  }
  return called();
}

int cuStreamIsCapturing(void* stream, int* capturing) {
  (void)stream;
  return *capturing = 0, called();
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return (void)mode, called(); }

int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void* stream) {
  (void)stream;
  memset((void*)(size_t)to, value, bytes);
  return called();
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)(size_t)to, (const void*)(size_t)from, bytes);
  return called();
}
