#include "poller.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace pd {

namespace {

// Keep the calling thread to these cores, of which there is at least one; an errno.
int pin_to(const std::vector<int> &cpus) {
    const auto [least, most] = std::minmax_element(cpus.begin(), cpus.end());
    if (*least < 0) {
        return EINVAL;
    }
    cpu_set_t *set = CPU_ALLOC(*most + 1);  // a cpu_set_t of its own has room for 1024 only
    if (set == nullptr) {
        return ENOMEM;
    }
    const std::size_t size = CPU_ALLOC_SIZE(*most + 1);
    CPU_ZERO_S(size, set);
    for (const auto cpu : cpus) {
        CPU_SET_S(cpu, size, set);
    }
    const int error = pthread_setaffinity_np(pthread_self(), size, set);
    CPU_FREE(set);
    return error;
}

}  // namespace

bool ArmedWrite::is_ready() const {
    return std::all_of(layers.begin(), layers.end(), [this](auto layer) { return words->is_ready(layer, step); });
}

Poller::Poller(std::shared_ptr<Bell> bell, std::shared_ptr<const NixlAbi> abi, std::chrono::nanoseconds nap,
               ThreadPlace place)
    : bell_(std::move(bell)), abi_(std::move(abi)), nap_(nap), thread_([this, place = std::move(place)] {
          settle(place);
          settled_.ring();
          run();
      }) {
    settled_.wait();
}

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

void Poller::settle(const ThreadPlace &place) {
    pthread_setname_np(pthread_self(), "pd-poller");
    prctl(PR_SET_TIMERSLACK, 1000UL);  // else Linux makes every nap 50 us longer
    if (!place.cpus.empty()) {
        pin_error_ = pin_to(place.cpus);
    }
    if (place.select_device != nullptr) {
        device_error_ = place.select_device(place.device);
    }
}

void Poller::run() {
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
