// Owns the threads of one engine: one runs a program, and the others help with what it shares out. They sleep between steps.
// Never waits for a thread that has nothing in hand, and never spins for long: the server's other processes need the cores too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

class Team {
   public:
    // Throws std::system_error if the system grants fewer threads, and keeps none of them.
    explicit Team(int size) : size_(size) {
        try {
            for (int i = 1; i < size; i++) threads_.emplace_back([this] { help(); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Team() { end(); }

    int size() const { return size_; }
    int64_t shares() const { return shares_; }  // how often work has been shared out

    // Runs `job`, which shares out work, in the thread that calls. The others wake up meanwhile, and sleep afterwards.
    template <class Job>
    void run(const Job& job) {
        runs_.value.fetch_add(1);
        runs_.wake();
        job();
        runs_.value.fetch_add(1);
    }

    // Shares out `count` items, and returns when all of them are done. Whoever is free takes a part of what is left,
    // smaller and smaller ones. A thread that another process has put aside is waited for only if it was put aside in the
    // middle of a part: the others do the rest, and go on to what comes next without it.
    template <class Work>
    void share(int64_t count, const Work& work) {
        if (count <= 0) return;
        shares_++;
        if (count == 1 || size_ <= 1 || count > std::numeric_limits<uint32_t>::max()) return work(0, count);
        const auto call = [](const void* what, int64_t first, int64_t last) { (*static_cast<const Work*>(what))(first, last); };
        const Shared shared{uint32_t(count), call, &work};
        const uint32_t epoch = epoch_.value.load(std::memory_order_relaxed) + 1;
        done_.value.store(0, std::memory_order_relaxed);
        shared_.store(&shared, std::memory_order_release);
        open_.store(uint64_t(epoch) << 32 | shared.count, std::memory_order_release);
        epoch_.value.store(epoch);
        epoch_.wake();
        take(epoch);
        wait_while(done_, [&](uint32_t done) { return done != shared.count; });
    }

   private:
    struct Shared {
        uint32_t count;
        void (*call)(const void* what, int64_t first, int64_t last);
        const void* what;
    };

    void end() {
        ending_ = true;
        for (auto* counter : {&runs_, &epoch_}) {
            counter->value.fetch_add(1);
            counter->wake();
        }
        for (auto& thread : threads_) thread.join();
    }

    // What is waited for. Who sleeps says so: libstdc++ 12 counts the sleepers of many such words together, and would call
    // Linux each time.
    struct alignas(64) Counter {
        std::atomic<uint32_t> value = 0, sleepers = 0;

        void wake() {
            if (sleepers.load() > 0) value.notify_all();
        }

        void sleep(uint32_t seen) {
            sleepers.fetch_add(1);
            value.wait(seen);
            sleepers.fetch_sub(1);
        }
    };

    // An uneven share takes some microseconds: spin that long. Then whoever else wants the core gets it, but the core is
    // not left idle: to wake a virtual one takes longer than most operations.
    static constexpr int SPINS = 200, YIELDS = 2000;

    template <class Goes>
    static void wait_while(Counter& counter, const Goes& goes_on) {
        for (int i = 0;; i++) {
            const uint32_t seen = counter.value.load(std::memory_order_acquire);
            if (!goes_on(seen)) return;
            if (i < SPINS)
                __builtin_ia32_pause();
            else if (i < SPINS + YIELDS)
                std::this_thread::yield();
            else
                counter.sleep(seen);
        }
    }

    // Works on what is shared in this epoch until all of it has been taken. `shared_` is read before a part is taken, and
    // what it points to afterwards: having got the part, nobody can have shared anything else in between, nor can until the
    // part is done.
    void take(uint32_t epoch) {
        uint64_t open = open_.load(std::memory_order_acquire);
        while (uint32_t(open >> 32) == epoch && uint32_t(open) > 0) {
            const uint32_t left = uint32_t(open), part = std::max(1u, left / (4 * size_));
            const Shared* shared = shared_.load(std::memory_order_acquire);
            if (!open_.compare_exchange_weak(open, open - part, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            const uint32_t count = shared->count, first = count - left;
            shared->call(shared->what, first, int64_t(first) + part);
            if (done_.value.fetch_add(part) + part == count) done_.wake();
            open = open_.load(std::memory_order_acquire);
        }
    }

    void help() {
        for (uint32_t seen = 0; !ending_;) {
            const uint32_t runs = runs_.value.load(std::memory_order_acquire);
            if (runs % 2 == 0) {
                runs_.sleep(runs);
                continue;
            }
            const auto is_running = [&] { return runs_.value.load(std::memory_order_relaxed) == runs; };
            wait_while(epoch_, [&](uint32_t epoch) { return epoch == seen && is_running(); });
            if (const uint32_t epoch = epoch_.value.load(std::memory_order_acquire); epoch != seen) take(seen = epoch);
        }
    }

    const uint32_t size_;
    std::atomic<bool> ending_ = false;
    Counter runs_;   // begun and ended: odd within one
    Counter epoch_;  // what has been shared out
    Counter done_;   // items of this epoch
    alignas(64) std::atomic<uint64_t> open_ = 0;  // the epoch, and how many of its items nobody has taken
    std::atomic<const Shared*> shared_ = nullptr;
    int64_t shares_ = 0;
    std::vector<std::thread> threads_;
};
