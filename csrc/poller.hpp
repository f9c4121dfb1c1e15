// A thread that sees layers become ready and posts their writes, without the GIL.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "bell.hpp"
#include "layer_words.hpp"
#include "nixl_abi.hpp"

namespace pd {

enum class State {
    armed,      // its layers are not all in memory
    posted,     // in flight, or just about to be
    done,       // its bytes are at the destination, its note was sent
    failed,     // the transport said so; bytes may be under way
    withdrawn,  // disarmed, or out of time, before it was posted
};

// A write that waits for layers of a step. Without a request it only says when they are ready (done).
struct ArmedWrite {
    std::shared_ptr<const LayerWords> words;
    std::vector<std::size_t> layers;
    std::uint64_t step;
    std::uintptr_t request;
    std::int64_t deadline_ns;  // monotonic; it is not posted later than this

    std::atomic<State> state{State::armed};
    std::atomic<std::int64_t> ready_ns{0};   // when its last layer was bumped, or seen ready
    std::atomic<std::int64_t> posted_ns{0};  // when the transport had taken it

    bool is_ready() const;
};

// Where the thread runs.
struct ThreadPlace {
    std::vector<int> cpus;  // the cores it keeps to; empty: any

    // Called once on the thread, before anything else there, with `device`; not 0 is a failure. Null: no device. A
    // pointer, so that nothing here has to be built or linked with the device's library.
    int (*select_device)(void *device) = nullptr;
    void *device = nullptr;
};

class Poller {
  public:
    // Rings `bell` whenever a write has come to an end. `abi` may be empty when no write has a request.
    // `nap`: between two looks while anything is armed or in flight, so that whoever computes a layer only has to store
    // its word. With nothing to look at it sleeps until it is woken.
    // `place`: what of it fails is told by `pin_error` and `device_error`, and the thread runs without it. It has been
    // tried when the constructor returns.
    Poller(std::shared_ptr<Bell> bell, std::shared_ptr<const NixlAbi> abi, std::chrono::nanoseconds nap,
           ThreadPlace place);
    ~Poller();

    Poller(const Poller &) = delete;
    Poller &operator=(const Poller &) = delete;

    // May wait for a post that is under way.
    void arm(std::shared_ptr<ArmedWrite> write);

    // True: it was not posted and never will be. False: it was posted, or had ended before.
    bool disarm(const ArmedWrite &write);

    // Look now, without the rest of the nap. Any thread.
    void wake() { awake_.ring(); }

    // An errno; 0 when the thread keeps to its cores, or may run on any.
    int pin_error() const { return pin_error_; }

    // What `select_device` returned; 0 where there is no device.
    int device_error() const { return device_error_; }

    // The thread has ended when this returns; writes that are armed stay so. Idempotent.
    void close();

  private:
    void settle(const ThreadPlace &place);
    void run();
    bool advance(ArmedWrite &write);
    void post(ArmedWrite &write);

    std::shared_ptr<Bell> bell_;
    std::shared_ptr<const NixlAbi> abi_;
    std::chrono::nanoseconds nap_;
    Bell awake_;
    Bell settled_;
    int pin_error_ = 0;  // these two are written before `settled_` rings
    int device_error_ = 0;
    std::mutex mutex_;
    std::vector<std::shared_ptr<ArmedWrite>> writes_;  // armed or posted; guarded by mutex_
    std::atomic<bool> is_closing_{false};
    std::thread thread_;
};

}  // namespace pd
