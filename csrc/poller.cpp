#include "poller.hpp"

#include <sys/prctl.h>

#include <algorithm>

namespace pd {

bool ArmedWrite::is_ready() const {
    return std::all_of(layers.begin(), layers.end(), [this](auto layer) { return words->is_ready(layer, step); });
}

Poller::Poller(std::shared_ptr<Bell> bell, std::shared_ptr<const NixlAbi> abi, std::chrono::nanoseconds nap)
    : bell_(std::move(bell)), abi_(std::move(abi)), nap_(nap), thread_([this] { run(); }) {}

Poller::~Poller() { close(); }

void Poller::arm(std::shared_ptr<ArmedWrite> write) {
    if (write->request != 0 && abi_ == nullptr) {
        throw std::invalid_argument("this poller was made without a way to post");
    }
    {
        const std::lock_guard lock(mutex_);
        writes_.push_back(std::move(write));
    }
    wake();
}

bool Poller::disarm(const ArmedWrite &write) {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(writes_.begin(), writes_.end(), [&write](const auto &one) { return one.get() == &write; });
    if (found == writes_.end() || write.state != State::armed) {
        return write.state == State::withdrawn;
    }
    (*found)->state = State::withdrawn;
    writes_.erase(found);
    return true;
}

void Poller::close() {
    is_closing_ = true;
    wake();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void Poller::run() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // else Linux makes every nap 50 us longer
    while (!is_closing_) {
        bool is_over = false;
        bool is_idle = false;
        {
            const std::lock_guard lock(mutex_);
            is_over = std::erase_if(writes_, [this](const auto &write) { return advance(*write); }) > 0;
            is_idle = writes_.empty();
        }
        if (is_over) {
            bell_->ring();
        }
        if (is_idle) {
            awake_.wait();  // an idle process uses no CPU
        } else {
            awake_.wait_for(nap_);
        }
    }
}

// True when the write has come to an end.
bool Poller::advance(ArmedWrite &write) {
    if (write.state == State::armed) {
        if (monotonic_ns() > write.deadline_ns) {
            write.state = State::withdrawn;
            return true;
        }
        if (!write.is_ready()) {
            return false;
        }
        post(write);
    } else if (const Posted now = abi_->status(write.request); now != Posted::in_progress) {
        write.state = now == Posted::done ? State::done : State::failed;
    }
    return write.state != State::posted;
}

void Poller::post(ArmedWrite &write) {
    std::int64_t ready = 0;
    for (const auto layer : write.layers) {
        ready = std::max(ready, write.words->bumped_ns(layer));
    }
    write.ready_ns = ready != 0 ? ready : monotonic_ns();
    Posted now = Posted::done;
    if (write.request != 0) {
        write.state = State::posted;  // before the call: nobody may take it for unposted while it runs
        now = abi_->post(write.request);
    }
    write.posted_ns = monotonic_ns();
    if (now != Posted::in_progress) {
        write.state = now == Posted::done ? State::done : State::failed;
    }
}

}  // namespace pd
