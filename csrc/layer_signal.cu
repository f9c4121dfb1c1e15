// The layer signal on a CUDA stream: one thread stores the number of the present step into the layer's word.
//
// A word is 64 bits of pinned host memory that the device can write. A captured graph holds the store, not the number:
// the number is read from `epoch`, device memory that an ordinary launch sets before the step. So a replay, a warm-up or
// a dummy batch writes the number of the latest step, which its words hold already, and nothing has to be counted.
//
// The same file is compiled by nvcc into `_native`, and at run time by NVRTC (only the kernels) with the cupy extra.

// With PD_ON_HOST a C++ compiler takes the kernels as functions, for tests of what they do where there is no GPU.

#if defined(__CUDACC_RTC__) || defined(PD_KERNELS_ONLY) || defined(PD_ON_HOST)
#define PD_WITHOUT_HOST
#endif

#ifndef PD_WITHOUT_HOST
#include "layer_signal.hpp"
#endif

typedef unsigned long long pd_word;

// Everything this stream wrote before is visible to whoever reads the word afterwards, also outside the device.
#ifdef PD_ON_HOST
#define __global__
static void store_release(pd_word *word, pd_word value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
#else
static __device__ void store_release(pd_word *word, pd_word value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
#endif

extern "C" __global__ void pd_begin_step(pd_word *epoch, pd_word step) { *epoch = step; }

extern "C" __global__ void pd_signal_layer(const pd_word *epoch, pd_word *word) { store_release(word, *epoch); }

// Layers that nothing has announced; `unannounced` counts them over all steps.
extern "C" __global__ void pd_finish_step(const pd_word *epoch, pd_word *words, int num_layers, pd_word *unannounced) {
    pd_word missed = 0;
    for (int layer = 0; layer < num_layers; ++layer) {
        if (words[layer] < *epoch) {
            ++missed;
            store_release(words + layer, *epoch);
        }
    }
    *unannounced += missed;
}

#ifndef PD_WITHOUT_HOST

#include <stdexcept>
#include <string>

namespace pd {

namespace {

pd_word *pointer(std::uintptr_t address) { return reinterpret_cast<pd_word *>(address); }

cudaStream_t stream_of(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

void check(const char *kernel) {
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
        throw std::runtime_error(std::string(kernel) + " was not launched: " + cudaGetErrorString(error));
    }
}

}  // namespace

void begin_step(std::uintptr_t stream, std::uintptr_t epoch, std::uint64_t step) {
    pd_begin_step<<<1, 1, 0, stream_of(stream)>>>(pointer(epoch), step);
    check("pd_begin_step");
}

void signal_layer(std::uintptr_t stream, std::uintptr_t epoch, std::uintptr_t word) {
    pd_signal_layer<<<1, 1, 0, stream_of(stream)>>>(pointer(epoch), pointer(word));
    check("pd_signal_layer");
}

void finish_step(std::uintptr_t stream, std::uintptr_t epoch, std::uintptr_t words, int num_layers,
                 std::uintptr_t unannounced) {
    pd_finish_step<<<1, 1, 0, stream_of(stream)>>>(pointer(epoch), pointer(words), num_layers, pointer(unannounced));
    check("pd_finish_step");
}

}  // namespace pd

#endif
