// Workers that share the chunks of one loop at a time.
//
// Whoever is free claims the next chunk, so the caller waits only for chunks that a worker has begun: a worker that the
// operating system has put aside holds nothing up. Workers look for the next loop for some microseconds, then give way
// to other processes, then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace qp {

class Threads {
   public:
    // The calling thread and num_threads - 1 workers.
    explicit Threads(int num_threads);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls fn(chunk, thread) once for every chunk in [0, num_chunks), thread in [0, size()); returns when all are done.
    // fn must not throw, and must not start a loop of its own. One caller at a time.
    template <class Fn>
    void parallel_for(int num_chunks, Fn&& fn) {
        if (num_chunks <= 1 || workers_.empty()) {
            for (int chunk = 0; chunk < num_chunks; ++chunk) fn(chunk, 0);
            return;
        }
        using Body = std::remove_reference_t<Fn>;
        run(num_chunks, [](void* body, int chunk, int thread) { (*static_cast<Body*>(body))(chunk, thread); },
            const_cast<void*>(static_cast<const void*>(&fn)));
    }

   private:
    using Call = void (*)(void*, int, int);

    void run(int num_chunks, Call call, void* body);
    void work(int thread);
    bool run_next_chunk(int thread);
    bool wait_for_loop();
    bool has_chunks() const { return static_cast<uint32_t>(ticket_.load()) != 0; }

    // Number of the loop in the upper half, chunks not yet claimed in the lower: a claim succeeds only within the loop
    // it was read in, and the fields below stay as they are until every claimed chunk is done.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<int> num_unfinished_{0};
    int num_chunks_ = 0;
    Call call_ = nullptr;
    void* body_ = nullptr;

    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<int> num_sleeping_{0};
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> workers_;
};

}  // namespace qp
