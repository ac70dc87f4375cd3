// The driver of fake_driver.c, which the library finds in the place of CUDA's.
#pragma once

extern "C" {
// The compute capability, 10 * major + minor; whether its context is current on this thread;
// whether this process has made one.
void fake_gpu(int sm, int current, int used);
int fake_gpu_calls();     // of the driver so far
char* fake_gpu_memory();  // 4096 bytes
}
