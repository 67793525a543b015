// Owns the ranks that compute one model on one machine: processes that sum, collect and tell each other in one shared segment.
// Never waits for a process that is gone: each locks a file of its own, and Linux ends the lock with the process. Long: one class.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "vector.h"

// What lies in the segment: this, two slots of each rank, and two slots for messages. All counters go around at 2^32.
constexpr int MAX_RANKS = 64;

struct alignas(64) RankLine {  // written by its rank alone
    enum State : uint32_t { ABSENT, JOINED, READY, CLOSED };
    std::atomic<uint32_t> state;
    std::atomic<uint32_t> meetings;  // it has come to
    std::atomic<uint32_t> received;  // pieces of messages
    std::atomic<int64_t> arrived_ns;  // at its last meeting
    std::atomic<int64_t> late_ns;     // that others waited for it alone
    std::atomic<int64_t> asked[2];    // what it came for, to even and odd meetings
    int64_t counts[2][MAX_RANKS];     // rows that it has for each rank, likewise
};

struct Segment {
    int64_t num_bytes, size, slot_bytes, message_bytes;
    alignas(64) std::atomic<uint32_t> arrivals;  // at all meetings, of all ranks
    alignas(64) std::atomic<uint32_t> sent;      // pieces of messages
    alignas(64) std::atomic<uint32_t> joins;     // changes with each rank's state
    alignas(64) std::atomic<uint32_t> sleepers;  // who may have to be woken
    alignas(64) std::atomic<uint32_t> failing, failed;
    char reason[512];  // once it has failed
    struct {
        int64_t total, size;  // bytes of the whole message and of this piece
    } pieces[2];
    RankLine lines[MAX_RANKS];
};

static_assert(std::atomic<int64_t>::is_always_lock_free, "a lock would lie in one process");

class Ranks {
   public:
    enum Outcome : int { DONE = 0, LOST = 1, LATER = 2 };
    static constexpr int LEADER = 0;
    static constexpr int64_t POLL_NS = 200'000'000;  // so often, a caller that waits without end sees its signals

    Ranks(std::string directory, int rank, int size, int64_t slot_bytes, int64_t message_bytes, int64_t timeout_ms)
        : directory_(std::move(directory)), rank_(rank), size_(size), slot_bytes_(slot_bytes), message_bytes_(message_bytes),
          timeout_ns_(timeout_ms * 1'000'000), locks_(size, -1) {}

    ~Ranks() { close(); }

    int size() const { return size_; }

    std::string reason() {
        std::lock_guard hold(reason_lock_);
        return reason_;
    }

    // The segment must be there, unless this is the leader, who makes it. LOST: it cannot be had; LATER: another process is
    // this rank. See `reason`.
    Outcome open() {
        if (!open_own()) return LOST;
        if (flock(locks_[rank_], LOCK_EX | LOCK_NB)) {
            keep_reason(lock_path(rank_) + " is locked: another process is this rank");
            return LATER;
        }
        if (!(rank_ == LEADER ? make_segment() : open_segment())) return LOST;
        set_state(RankLine::JOINED);
        return DONE;
    }

    // Wait until all ranks have joined and hold each other's files, which nobody needs by name then. LATER: call again.
    Outcome join() {
        Use use(*this);
        if (!use) return LOST;
        if (const Outcome found = wait_for_states(RankLine::JOINED); found != DONE) return found;
        for (int other = 0; other < size_; other++)
            if (other != rank_ && !open_lock(other)) return fail(other, "has lost the file that it locks: " + error_text());
        if (own().state.load() == RankLine::JOINED) set_state(RankLine::READY);
        return wait_for_states(RankLine::READY);
    }

    // Sum in the order of ranks, each rank the same numbers in the same order, and round once.
    template <class T>
    Outcome all_reduce(T* data, int64_t count) {
        Use use(*this);
        if (!use) return LOST;
        for (int64_t first = 0; first < count; first += piece<T>()) {
            const int64_t size = std::min(piece<T>(), count - first);
            put(data + first, 0, size);
            if (!meet_to_sum<T>(count)) return LOST;
            add_up(data + first, 0, size);
        }
        return DONE;
    }

    // The parts of all_reduce for several threads: each puts a part, one meets the other ranks, each adds up a part.
    template <class T>
    int64_t piece() const {
        return slot_bytes_ / int64_t(sizeof(T));
    }

    template <class T>
    void put(const T* from, int64_t first, int64_t last) {
        std::copy(from + first, from + last, slot<T>(rank_, meetings_ + 1) + first);
    }

    template <class T>
    bool meet_to_sum(int64_t count) {
        return meet(int64_t(sizeof(T)) << 56 | count);
    }

    // Numbers that do not fill a vector go through one, too: a sum has the same bits wherever it lies.
    template <class T>
    void add_up(T* to, int64_t first, int64_t last) {
        for (; first + LANES <= last; first += LANES)
            store(to + first, sum_lanes<T>([&](int rank) { return slot<T>(rank, meetings_) + first; }));
        if (first == last) return;
        const int64_t left = last - first;
        T found[LANES] = {};
        store(found, sum_lanes<T>([&](int rank) {
                  std::copy_n(slot<T>(rank, meetings_) + first, left, found);
                  return found;
              }));
        std::copy_n(found, left, to + first);
    }

    // x: [rows, sizes[rank]]; out: [rows, sum of sizes], of the leader.
    Outcome gather(const float* x, int64_t rows, const int64_t* sizes, float* out) {
        Use use(*this);
        if (!use) return LOST;
        int64_t total = 0;
        for (int rank = 0; rank < size_; rank++) total += sizes[rank];
        const int64_t longest = rows * *std::max_element(sizes, sizes + size_);
        for (int64_t first = 0; first < longest; first += piece<float>()) {
            const auto part = [&](int rank) { return std::clamp<int64_t>(rows * sizes[rank] - first, 0, piece<float>()); };
            if (rank_ != LEADER) std::copy_n(x + first, part(rank_), slot<float>(rank_, meetings_ + 1));
            if (!meet(GATHERED | rows * total)) return LOST;
            if (rank_ != LEADER) continue;
            for (int64_t rank = 0, column = 0; rank < size_; column += sizes[rank++])
                lay(rank == rank_ ? x + first : slot<float>(rank, meetings_), first, part(rank), sizes[rank], out + column, total);
        }
        return DONE;
    }

    // Exchange rows of `row_bytes`: x has counts[0] for rank 0, then counts[1] for rank 1, and so on. In two calls, between
    // which the caller makes room: `offer` says how many there are from each rank, and `take` gives them, rank 0's first.
    Outcome offer(const char* x, int64_t row_bytes, const int64_t* counts, int64_t* received) {
        Use use(*this);
        if (!use) return LOST;
        offered_ = x;
        row_bytes_ = row_bytes;
        std::copy_n(counts, size_, own().counts[(meetings_ + 1) & 1]);
        given_.assign(size_ * size_, 0);
        std::copy_n(counts, size_, given_.begin() + rank_ * size_);
        put_offered(0);
        if (!meet(EXCHANGED | row_bytes)) return LOST;
        for (int rank = 0; rank < size_; rank++) {
            std::copy_n(segment_->lines[rank].counts[meetings_ & 1], size_, given_.begin() + rank * size_);
            received[rank] = given_[rank * size_ + rank_];
        }
        return DONE;
    }

    Outcome take(char* out) {
        Use use(*this, /*though_lost=*/true);  // a rank that has what it needs may have left, and this one has all, too
        if (!use) return LOST;
        int64_t longest = 0;
        for (int rank = 0; rank < size_; rank++) longest = std::max(longest, stream_bytes(rank, size_));
        for (int64_t first = 0;;) {
            lay_taken(first, out);
            first += slot_bytes_;
            if (first >= longest) return DONE;
            put_offered(first);
            if (!meet(EXCHANGED | row_bytes_)) return LOST;
        }
    }

    // The leader's alone. Waits for those who have not taken the piece before the last one.
    Outcome send(const char* message, int64_t bytes) {
        Use use(*this);
        if (!use) return LOST;
        int64_t first = 0;
        do {
            const int64_t size = std::min(message_bytes_, bytes - first);
            for (int rank = 0; rank < size_; rank++)
                if (rank != rank_ && !wait_for_room(rank)) return LOST;
            segment_->pieces[sent_ & 1] = {bytes, size};
            std::copy_n(message + first, size, message_slot(sent_));
            segment_->sent.store(++sent_);
            wake(segment_->sent);
            first += size;
        } while (first < bytes);
        return DONE;
    }

    // DONE: `bytes` is the size of the message that `receive` gives next. LATER: there is none yet; call again.
    Outcome pending(int64_t* bytes) {
        Use use(*this, /*though_lost=*/true);  // what was sent before the leader left is received
        if (!use) return LOST;
        const Outcome found = wait(segment_->sent, [&] { return segment_->sent.load() != received_; }, POLL_NS);
        if (found == DONE) *bytes = segment_->pieces[received_ & 1].total;
        return found;
    }

    Outcome receive(char* out, int64_t bytes) {
        Use use(*this, /*though_lost=*/true);
        if (!use) return LOST;
        int64_t first = 0;
        do {
            const Outcome found = wait(segment_->sent, [&] { return segment_->sent.load() != received_; }, timeout_ns_);
            if (found != DONE) return found == LOST ? LOST : fail(LEADER, "did not finish its message within " + seconds_text(timeout_ns_));
            const int64_t size = segment_->pieces[received_ & 1].size;
            std::copy_n(message_slot(received_), size, out + first);
            own().received.store(++received_);
            wake(own().received);
            first += size;
        } while (first < bytes);
        return DONE;
    }

    // LOST once a rank is lost; waits for nothing.
    Outcome check() {
        Use use(*this);
        return use && nobody_is_gone([] { return false; }) ? DONE : LOST;
    }

    // Any thread.
    void give_up(const char* why) {
        if (Use use(*this); use) fail(rank_, std::string("gave up: ") + why);
    }

    void late(int64_t* out_ns) {
        Use use(*this, /*though_lost=*/true);
        for (int rank = 0; use && rank < size_; rank++) out_ns[rank] = segment_->lines[rank].late_ns.load();
    }

    void meetings(int64_t* out) {
        Use use(*this, /*though_lost=*/true);
        for (int rank = 0; use && rank < size_; rank++) out[rank] = segment_->lines[rank].meetings.load();
    }

    // Waits for the call that another thread is in, if any: let that one end first, by give_up where it may be long.
    void close() {
        if (closed_.exchange(true)) return;
        while (users_.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (segment_) {
            if (process_ == getpid()) set_state(RankLine::CLOSED);  // not where a forked copy is destroyed
            munmap(segment_, segment_->num_bytes);
        }
        for (const int lock : locks_)
            if (lock >= 0) ::close(lock);
    }

    // Holds the segment in place during a call. False: it is closed, or, unless the caller goes on `though_lost`, lost.
    class Use {
       public:
        explicit Use(Ranks& ranks, bool though_lost = false) : ranks_(ranks) {
            ranks.users_.fetch_add(1);
            if (ranks.closed_.load() || !ranks.segment_)
                ranks.keep_reason("This rank has closed its group.");
            else
                may_ = though_lost || !ranks.has_failed();
        }
        ~Use() { ranks_.users_.fetch_sub(1); }
        explicit operator bool() const { return may_; }

       private:
        Ranks& ranks_;
        bool may_ = false;
    };

   private:
    // The others compute as much as this rank: spin for what their unevenness is, then let others have the core without
    // leaving it idle, and sleep where a rank is far behind. Look for the dead as often as that.
    static constexpr int64_t SPIN_NS = 5'000, YIELD_NS = 200'000, SLEEP_NS = 100'000'000;
    static constexpr int64_t GATHERED = int64_t(1) << 56, EXCHANGED = int64_t(3) << 56;

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1'000'000'000 + now.tv_nsec;
    }

    static std::string error_text() { return std::strerror(errno); }

    static std::string seconds_text(int64_t ns) {
        char text[32];
        std::snprintf(text, sizeof text, "%g s", double(ns) / 1e9);
        return text;
    }

    RankLine& own() { return segment_->lines[rank_]; }

    // --- the segment --------------------------------------------------------------------------------------------------

    static int64_t header_bytes() { return (sizeof(Segment) + 4095) / 4096 * 4096; }

    int64_t num_bytes() const { return header_bytes() + 2 * size_ * slot_bytes_ + 2 * message_bytes_; }

    char* slots() { return reinterpret_cast<char*>(segment_) + header_bytes(); }

    template <class T>
    T* slot(int rank, uint32_t meeting) {
        return reinterpret_cast<T*>(slots() + (int64_t(meeting & 1) * size_ + rank) * slot_bytes_);
    }

    char* message_slot(uint32_t piece) { return slots() + 2 * size_ * slot_bytes_ + int64_t(piece & 1) * message_bytes_; }

    // Made aside and renamed, so that who finds it finds it whole. Its memory is reserved now: a write could only crash.
    bool make_segment() {
        const std::string aside = directory_ + "/segment.new", path = directory_ + "/segment";
        const int file = ::open(aside.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (file < 0) return refuse(aside + " cannot be made: " + error_text());
        if (const int error = posix_fallocate(file, 0, num_bytes())) {
            ::close(file);
            return refuse(directory_ + " has no room for " + std::to_string(num_bytes()) + " bytes: " + std::strerror(error));
        }
        if (!map(file)) return false;
        new (segment_) Segment{num_bytes(), size_, slot_bytes_, message_bytes_};
        return !rename(aside.c_str(), path.c_str()) || refuse(path + " cannot be made: " + error_text());
    }

    bool open_segment() {
        const std::string path = directory_ + "/segment";
        const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        struct stat found;
        if (file < 0 || fstat(file, &found)) return refuse(path + " cannot be opened: " + error_text());
        const std::string other = path + " was not made for " + std::to_string(size_) + " ranks with slots of " +
                                  std::to_string(slot_bytes_) + " bytes and messages of " + std::to_string(message_bytes_);
        if (found.st_size != num_bytes()) {
            ::close(file);
            return refuse(other);
        }
        if (!map(file)) return false;
        const Segment& has = *segment_;
        return (has.size == size_ && has.slot_bytes == slot_bytes_ && has.message_bytes == message_bytes_) || refuse(other);
    }

    bool map(int file) {
        void* found = mmap(nullptr, num_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        ::close(file);
        if (found == MAP_FAILED) return refuse("the segment cannot be mapped: " + error_text());
        segment_ = static_cast<Segment*>(found);
        return true;
    }

    bool refuse(const std::string& why) {
        keep_reason(why);
        return false;
    }

    // --- who lives ----------------------------------------------------------------------------------------------------

    std::string lock_path(int rank) const { return directory_ + "/rank-" + std::to_string(rank); }

    bool open_own() {
        const std::string path = lock_path(rank_);
        locks_[rank_] = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        return locks_[rank_] >= 0 || refuse(path + " cannot be made: " + error_text());
    }

    bool open_lock(int rank) {
        if (locks_[rank] < 0) locks_[rank] = ::open(lock_path(rank).c_str(), O_RDWR | O_CLOEXEC);
        return locks_[rank] >= 0;
    }

    // Shared, so that two who look at once do not see each other. A rank that has not joined is late, not gone.
    bool is_gone(int rank) {
        const uint32_t state = segment_->lines[rank].state.load();
        if (rank == rank_ || state == RankLine::ABSENT) return false;
        if (state == RankLine::CLOSED) return true;
        if (!open_lock(rank) || flock(locks_[rank], LOCK_SH | LOCK_NB)) return false;
        flock(locks_[rank], LOCK_UN);
        return true;
    }

    // `done` is looked at again once a rank is found gone: it may have left after what is waited for.
    template <class Done>
    bool nobody_is_gone(const Done& done) {
        for (int rank = 0; rank < size_; rank++) {
            if (!is_gone(rank) || done()) continue;
            fail(rank, segment_->lines[rank].state.load() == RankLine::CLOSED ? "has left" : "has died");
            return false;
        }
        return true;
    }

    Outcome fail(int rank, const std::string& how) { return fail("Rank " + std::to_string(rank) + " " + how + "."); }

    // The first reason is everybody's.
    Outcome fail(const std::string& message) {
        uint32_t nobody = 0;
        if (segment_->failing.compare_exchange_strong(nobody, 1)) {
            std::strncpy(segment_->reason, message.c_str(), sizeof segment_->reason - 1);
            segment_->failed.store(1);
            for (auto* word : {&segment_->arrivals, &segment_->sent, &segment_->joins}) wake(*word);
            for (int other = 0; other < size_; other++) wake(segment_->lines[other].received);
        }
        if (!has_failed()) keep_reason(message);  // whoever failed first may have died before it said why
        return LOST;
    }

    bool has_failed() {
        if (!segment_->failed.load(std::memory_order_acquire)) return false;
        keep_reason(segment_->reason);
        return true;
    }

    void keep_reason(const std::string& reason) {
        std::lock_guard hold(reason_lock_);
        if (reason_.empty()) reason_ = reason;
    }

    void set_state(RankLine::State state) {
        own().state.store(state);
        segment_->joins.fetch_add(1);
        wake(segment_->joins);
    }

    // --- waiting ------------------------------------------------------------------------------------------------------

    // The word has changed. Who is about to sleep has said so, or sees that.
    void wake(std::atomic<uint32_t>& word) {
        if (segment_->sleepers.load()) syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // Not a private futex: the word is in other processes, too.
    void sleep(std::atomic<uint32_t>& word, uint32_t seen) {
        const timespec limit{0, SLEEP_NS};
        segment_->sleepers.fetch_add(1);
        syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
        segment_->sleepers.fetch_sub(1);
    }

    // Wait until done(), which changes only where `word` does. LOST: a rank is. LATER: not within `limit_ns`.
    template <class Done>
    Outcome wait(std::atomic<uint32_t>& word, const Done& done, int64_t limit_ns) {
        if (done()) return DONE;
        const int64_t begun = now_ns();
        for (int64_t now = begun; now - begun < YIELD_NS; now = now_ns()) {
            if (now - begun < SPIN_NS)
                __builtin_ia32_pause();
            else
                std::this_thread::yield();
            if (done()) return DONE;
        }
        for (int64_t looked = begun;;) {
            const uint32_t seen = word.load();
            if (done()) return DONE;
            if (has_failed()) return LOST;
            const int64_t now = now_ns();
            if (now - looked >= SLEEP_NS) {
                if (!nobody_is_gone(done)) return LOST;
                looked = now;
            }
            if (now - begun >= limit_ns) return done() ? DONE : LATER;
            sleep(word, seen);
        }
    }

    Outcome wait_for_states(RankLine::State least) {
        const auto reached = [&] {
            return std::all_of(segment_->lines, segment_->lines + size_,
                               [least](const RankLine& line) { return line.state.load() >= least; });
        };
        return wait(segment_->joins, reached, POLL_NS);
    }

    bool wait_for_room(int rank) {
        std::atomic<uint32_t>& received = segment_->lines[rank].received;
        const Outcome found = wait(received, [&] { return sent_ - received.load() < 2; }, timeout_ns_);
        if (found == LATER) fail(rank, "did not receive a message within " + seconds_text(timeout_ns_));
        return found == DONE;
    }

    // --- meetings -----------------------------------------------------------------------------------------------------

    // Return once all ranks have come to this meeting. What they put before it is there to read until this rank comes to the
    // next one, and the slots of the other parity are free to write: so one meeting an exchange is enough.
    bool meet(int64_t asked) {
        const uint32_t number = ++meetings_, all = number * uint32_t(size_);
        const int64_t now = now_ns();
        own().asked[number & 1].store(asked, std::memory_order_relaxed);
        own().arrived_ns.store(now, std::memory_order_relaxed);
        own().meetings.store(number, std::memory_order_relaxed);
        if (segment_->arrivals.fetch_add(1) + 1 == all) {
            charge(now);
            wake(segment_->arrivals);
            return agree(asked);
        }
        const auto complete = [&] { return int32_t(segment_->arrivals.load(std::memory_order_acquire) - all) >= 0; };
        const Outcome found = wait(segment_->arrivals, complete, timeout_ns_);
        if (found == LATER) fail(missing(number), "did not arrive within " + seconds_text(timeout_ns_));
        return found == DONE && agree(asked);
    }

    int missing(uint32_t number) {
        for (int rank = 0; rank < size_; rank++)
            if (int32_t(segment_->lines[rank].meetings.load() - number) < 0) return rank;
        return rank_;  // it came in this instant
    }

    // The last one is charged with the time since the one before it.
    void charge(int64_t now) {
        int64_t before = 0;
        for (int rank = 0; rank < size_; rank++)
            if (rank != rank_) before = std::max(before, segment_->lines[rank].arrived_ns.load(std::memory_order_relaxed));
        own().late_ns.fetch_add(std::max<int64_t>(0, now - before), std::memory_order_relaxed);
    }

    // Ranks that do not compute the same step would add up numbers of different things, and nobody would see it.
    bool agree(int64_t asked) {
        for (int rank = 0; rank < size_; rank++) {
            const int64_t other = segment_->lines[rank].asked[meetings_ & 1].load(std::memory_order_relaxed);
            if (other == asked) continue;
            fail("Rank " + std::to_string(rank) + " " + ask_text(other) + " where rank " + std::to_string(rank_) + " " +
                 ask_text(asked) + ".");
            return false;
        }
        return true;
    }

    static std::string ask_text(int64_t asked) {
        const int64_t kind = asked >> 56;
        const std::string count = std::to_string(asked & (GATHERED - 1));
        if (kind == EXCHANGED >> 56) return "exchanges rows of " + count + " bytes";
        return (kind == GATHERED >> 56 ? "collects " : "sums ") + count + (kind == sizeof(bf16) ? " bfloat16" : " float32");
    }

    // A rank's rows for all others, without those for itself, go through its slot one slot after another: a stream. Return
    // its bytes for the ranks before `to`.
    int64_t stream_bytes(int from, int to) const {
        int64_t rows = 0;
        for (int rank = 0; rank < to; rank++)
            if (rank != from) rows += given_[from * size_ + rank];
        return rows * row_bytes_;
    }

    int64_t bytes_for(int from, int to) const { return given_[from * size_ + to] * row_bytes_; }

    // Put the bytes of the own stream from `first` on that a slot has room for.
    void put_offered(int64_t first) {
        const int64_t before = stream_bytes(rank_, rank_), end = std::min(first + slot_bytes_, stream_bytes(rank_, size_));
        char* to = slot<char>(rank_, meetings_ + 1);
        const auto copy = [&](int64_t begin, int64_t end, int64_t skipped) {
            if (begin < end) to = std::copy(offered_ + skipped + begin, offered_ + skipped + end, to);
        };
        copy(first, std::min(end, before), 0);
        copy(std::max(first, before), end, bytes_for(rank_, rank_));
    }

    // Lay what the slots have, which is each stream from `first` on, where this rank's rows belong.
    void lay_taken(int64_t first, char* out) {
        for (int rank = 0; rank < size_; out += bytes_for(rank++, rank_)) {
            const int64_t begin = stream_bytes(rank, rank_), end = begin + bytes_for(rank, rank_);
            if (rank == rank_) {
                if (first == 0) std::copy_n(offered_ + begin, end - begin, out);
                continue;
            }
            const int64_t from = std::max(begin, first), to = std::min(end, first + slot_bytes_);
            if (from < to) std::copy_n(slot<char>(rank, meetings_) + from - first, to - from, out + from - begin);
        }
    }

    template <class T, class From>
    f32x16 sum_lanes(const From& from) {
        f32x16 sum = load(from(0));
        for (int rank = 1; rank < size_; rank++) sum += load(from(rank));
        return sum;
    }

    // Numbers `first` to `first + count` of a rank's [rows, width], to the same places of its columns.
    static void lay(const float* from, int64_t first, int64_t count, int64_t width, float* columns, int64_t total) {
        for (const float* end = from + count; from < end;) {
            const int64_t row = first / width, column = first % width, size = std::min<int64_t>(width - column, end - from);
            std::copy_n(from, size, columns + row * total + column);
            from += size;
            first += size;
        }
    }

    const std::string directory_;
    const int rank_, size_;
    const int64_t slot_bytes_, message_bytes_, timeout_ns_;
    const pid_t process_ = getpid();
    std::vector<int> locks_;  // [size] files: this rank's own, locked, and the others'
    Segment* segment_ = nullptr;
    const char* offered_ = nullptr;
    int64_t row_bytes_ = 0;
    std::vector<int64_t> given_;  // [size, size] rows of an exchange, from each rank to each
    uint32_t meetings_ = 0, sent_ = 0, received_ = 0;
    std::atomic<int> users_ = 0;
    std::atomic<bool> closed_ = false;
    std::mutex reason_lock_;
    std::string reason_;
};
