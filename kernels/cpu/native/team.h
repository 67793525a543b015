// Owns the threads of one engine: they sleep between steps, and meet at a barrier within one.
// Never spins for long: the server's other processes need the cores too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

class Team {
   public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; i++) threads_.emplace_back([this] { work(); });
    }

    ~Team() {
        ending_ = true;
        start();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }
    int64_t barriers() const { return phase_; }  // how often all threads have met, in 32 bits

    // Run `job` in every thread, the caller's included; returns when all are done.
    void run(const std::function<void()>& job) {
        job_ = &job;
        start();
        job();
        barrier();
    }

    // To be called by every thread of a job: returns once all have.
    void barrier() {
        const uint32_t phase = phase_.load();
        if (arrived_.fetch_add(1) + 1 == uint32_t(size_)) {
            arrived_ = 0;
            counter_ = 0;
            phase_ = phase + 1;
            phase_.notify_all();
            return;
        }
        for (int i = 0; i < SPINS + YIELDS; i++) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            if (i < SPINS)
                __builtin_ia32_pause();
            else
                std::this_thread::yield();
        }
        phase_.wait(phase);
    }

    // Share `count` items among the threads and meet at the end. Whoever is free takes a part of what is left, smaller and
    // smaller ones: a thread that was put aside by another process does not keep the others waiting for its half.
    template <class Work>
    void share(int64_t count, const Work& work) {
        int64_t first = counter_.load();
        while (first < count) {
            const int64_t last = first + std::max<int64_t>(1, (count - first) / (4 * size_));
            if (counter_.compare_exchange_weak(first, last)) {
                work(first, last);
                first = counter_.load();
            }
        }
        barrier();
    }

   private:
    // An uneven share takes some microseconds: spin that long. Then whoever else wants the core gets it, but the core is
    // not left idle: to wake a virtual one takes longer than most operations.
    static constexpr int SPINS = 200, YIELDS = 2000;

    void start() {
        start_.fetch_add(1);
        start_.notify_all();
    }

    void work() {
        for (uint32_t seen = 0;; seen++) {
            start_.wait(seen);
            if (ending_) return;
            (*job_)();
            barrier();
        }
    }

    const int size_;
    const std::function<void()>* job_ = nullptr;
    std::atomic<bool> ending_ = false;
    alignas(64) std::atomic<uint32_t> start_ = 0;
    alignas(64) std::atomic<uint32_t> arrived_ = 0;
    alignas(64) std::atomic<uint32_t> phase_ = 0;
    alignas(64) std::atomic<int64_t> counter_ = 0;
    std::vector<std::thread> threads_;
};
