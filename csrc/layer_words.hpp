// One 64-bit word for each layer: the number of the last step in which the layer's KV reached memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace pd {

// CLOCK_MONOTONIC, as Python's time.monotonic_ns.
inline std::int64_t monotonic_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

class LayerWords {
  public:
    LayerWords(const LayerWords &) = delete;
    LayerWords &operator=(const LayerWords &) = delete;

    // Words that `bump` writes.
    explicit LayerWords(std::size_t num_layers) : own_(num_layers), words_(own_.data()), bumped_ns_(num_layers) {}

    // Words that a device writes, in pinned memory of the caller that outlives this object.
    LayerWords(std::uintptr_t address, std::size_t num_layers)
        : words_(reinterpret_cast<std::uint64_t *>(address)), bumped_ns_(num_layers) {
        if (address == 0 || address % alignof(std::uint64_t) != 0) {
            throw std::invalid_argument("the words' address is null or not aligned to 8 bytes");
        }
    }

    std::size_t num_layers() const { return bumped_ns_.size(); }

    // For a backend that runs in the calling thread: the layer's KV is in memory now. A store and a look at the clock.
    void bump(std::uint64_t step, std::size_t layer) {
        bumped_ns_.at(layer).store(monotonic_ns(), std::memory_order_relaxed);
        word(layer).store(step, std::memory_order_release);
    }

    // As `bump` for the layers that nothing has announced in this step; how many there were.
    std::size_t finish(std::uint64_t step) {
        std::size_t unannounced = 0;
        for (std::size_t layer = 0; layer < num_layers(); ++layer) {
            if (!is_ready(layer, step)) {
                bump(step, layer);
                ++unannounced;
            }
        }
        return unannounced;
    }

    bool is_ready(std::size_t layer, std::uint64_t step) const {
        return word(layer).load(std::memory_order_acquire) >= step;
    }

    // When a ready layer was bumped; 0 where a device wrote the word.
    std::int64_t bumped_ns(std::size_t layer) const {
        return bumped_ns_.at(layer).load(std::memory_order_relaxed);
    }

  private:
    std::atomic_ref<std::uint64_t> word(std::size_t layer) const { return std::atomic_ref(words_[layer]); }

    std::vector<std::uint64_t> own_;
    std::uint64_t *words_;
    std::vector<std::atomic<std::int64_t>> bumped_ns_;  // the poller may look while a later step bumps
};

}  // namespace pd
