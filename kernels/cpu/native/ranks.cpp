// Owns the C interface of ranks.h.
// Never computes.
#include "ranks.h"

extern "C" {

Ranks* ranks_create(const char* directory, int rank, int size, int64_t slot_bytes, int64_t message_bytes,
                    int64_t timeout_ms) {
    return new Ranks(directory, rank, size, slot_bytes, message_bytes, timeout_ms);
}

void ranks_destroy(Ranks* ranks) { delete ranks; }

// The functions that return a number: 0: done; 1: not, and `ranks_reason` says why; 2: not yet.
int ranks_open(Ranks* ranks) { return ranks->open(); }

int ranks_join(Ranks* ranks) { return ranks->join(); }

int ranks_all_reduce(Ranks* ranks, int wide, void* data, int64_t count) {
    return wide ? ranks->all_reduce(static_cast<float*>(data), count) : ranks->all_reduce(static_cast<bf16*>(data), count);
}

int ranks_gather(Ranks* ranks, const float* x, int64_t rows, const int64_t* sizes, float* out) {
    return ranks->gather(x, rows, sizes, out);
}

int ranks_offer(Ranks* ranks, const char* rows, int64_t row_bytes, const int64_t* counts, int64_t* received) {
    return ranks->offer(rows, row_bytes, counts, received);
}

int ranks_take(Ranks* ranks, char* out) { return ranks->take(out); }

// Both, where `out` has room for so many rows. Who has none for what came ends the group.
int ranks_exchange(Ranks* ranks, const char* rows, int64_t row_bytes, const int64_t* counts, int64_t* received, char* out,
                   int64_t room) {
    if (const int outcome = ranks->offer(rows, row_bytes, counts, received)) return outcome;
    int64_t total = 0;
    for (int rank = 0; rank < ranks->size(); rank++) total += received[rank];
    if (total <= room) return ranks->take(out);
    ranks->give_up(("it has room for " + std::to_string(room) + " rows, and " + std::to_string(total) + " came").c_str());
    return Ranks::LOST;
}

int ranks_send(Ranks* ranks, const char* message, int64_t bytes) { return ranks->send(message, bytes); }

int ranks_pending(Ranks* ranks, int64_t* bytes) { return ranks->pending(bytes); }

int ranks_receive(Ranks* ranks, char* out, int64_t bytes) { return ranks->receive(out, bytes); }

int ranks_check(Ranks* ranks) { return ranks->check(); }

void ranks_give_up(Ranks* ranks, const char* why) { ranks->give_up(why); }

void ranks_late(Ranks* ranks, int64_t* out_ns) { ranks->late(out_ns); }

void ranks_meetings(Ranks* ranks, int64_t* out) { ranks->meetings(out); }

void ranks_close(Ranks* ranks) { ranks->close(); }

void ranks_reason(Ranks* ranks, char* out, int64_t bytes) {
    const std::string reason = ranks->reason();
    const int64_t size = std::min<int64_t>(bytes - 1, reason.size());
    std::copy_n(reason.data(), size, out);
    out[size] = 0;
}

}  // extern "C"
