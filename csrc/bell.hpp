// A bell that one thread waits for and any thread rings.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace pd {

class Bell {
  public:
    // Microseconds; a system call only when somebody sleeps.
    void ring() {
        {
            const std::lock_guard lock(mutex_);
            is_rung_ = true;
        }
        rung_.notify_one();
    }

    // Until it has been rung since the last wait, or the time is over. False when the time was over.
    bool wait_for(std::chrono::nanoseconds timeout) {
        std::unique_lock lock(mutex_);
        const bool was_rung = rung_.wait_for(lock, timeout, [this] { return is_rung_; });
        is_rung_ = false;
        return was_rung;
    }

    void wait() {
        std::unique_lock lock(mutex_);
        rung_.wait(lock, [this] { return is_rung_; });
        is_rung_ = false;
    }

  private:
    std::mutex mutex_;
    std::condition_variable rung_;
    bool is_rung_ = false;
};

}  // namespace pd
