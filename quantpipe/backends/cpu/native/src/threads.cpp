#include "threads.h"

#include <chrono>

namespace qp {
namespace {

constexpr auto kSpin = std::chrono::microseconds(3);
// A step's loops follow one another faster than a sleeping thread wakes.
constexpr auto kYield = std::chrono::microseconds(100);

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

// Waits until done() holds, at most kYield; false where it still does not.
template <class Done>
bool wait_briefly(Done done) {
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
        for (int i = 0; i < 16; ++i) {
            if (done()) return true;
            pause();
        }
        const auto waited = std::chrono::steady_clock::now() - start;
        if (waited > kYield) return false;
        if (waited > kSpin) std::this_thread::yield();
    }
}

}  // namespace

Threads::Threads(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
}

Threads::~Threads() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Threads::run(int num_chunks, Call call, void* body) {
    num_chunks_ = num_chunks;
    call_ = call;
    body_ = body;
    num_unfinished_.store(num_chunks);
    const uint64_t loop = (ticket_.load() >> 32) + 1;
    ticket_.store(loop << 32 | static_cast<uint32_t>(num_chunks));
    if (num_sleeping_.load() > 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    while (run_next_chunk(0)) {
    }
    while (!wait_briefly([this] { return num_unfinished_.load() == 0; })) {
    }
}

bool Threads::run_next_chunk(int thread) {
    uint64_t ticket = ticket_.load();
    do {
        if (static_cast<uint32_t>(ticket) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1));
    call_(body_, num_chunks_ - static_cast<int>(static_cast<uint32_t>(ticket)), thread);
    num_unfinished_.fetch_sub(1);
    return true;
}

void Threads::work(int thread) {
    while (wait_for_loop()) {
        while (run_next_chunk(thread)) {
        }
    }
}

// False when the workers are to end.
bool Threads::wait_for_loop() {
    if (wait_briefly([this] { return has_chunks() || stopping_; })) return !stopping_;
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_sleeping_;
    wake_.wait(lock, [this] { return has_chunks() || stopping_; });
    --num_sleeping_;
    return !stopping_;
}

}  // namespace qp
