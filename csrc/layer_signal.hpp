// Launches of the kernels in layer_signal.cu. All are asynchronous and can be captured in a CUDA graph.
// Addresses are of 64-bit words; `epoch` and `unannounced` in device or pinned host memory, `words` in pinned host memory.
#pragma once

#include <cstdint>

namespace pd {

// From here on, signals on this stream carry `step`. Not to be captured: a graph would carry an old number.
void begin_step(std::uintptr_t stream, std::uintptr_t epoch, std::uint64_t step);

// The layer's KV is in memory once this runs.
void signal_layer(std::uintptr_t stream, std::uintptr_t epoch, std::uintptr_t word);

// Announce the layers that were not, and count them.
void finish_step(std::uintptr_t stream, std::uintptr_t epoch, std::uintptr_t words, int num_layers,
                 std::uintptr_t unannounced);

}  // namespace pd
