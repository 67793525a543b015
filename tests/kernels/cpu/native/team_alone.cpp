// Runs what test_team.py asks for, by the threads of team.h alone: `everything` or `without`.
#include <fcntl.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "team.h"

static void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Shares of random sizes, each of which reads what the one before has written.
static void everything(int size) {
    Team team(size);
    std::mt19937 random(size);
    std::vector<int64_t> before(400, 0), now(400, 0);
    int64_t shares = 0;
    for (int run = 0; run < 50; run++)
        team.run([&] {
            for (int i = 0; i < 20; i++, shares++) {
                const int64_t count = 1 + random() % now.size();
                team.share(count, [&](int64_t first, int64_t last) {
                    for (int64_t at = first; at < last; at++) now[at] = before[at] + 1;
                });
                for (int64_t at = 0; at < count; at++) require(now[at] == before[at] + 1, "an item was left out");
                team.share(count, [&](int64_t first, int64_t last) {
                    for (int64_t at = first; at < last; at++) before[at] += 1;
                });
                for (int64_t at = 0; at < count; at++) require(now[at] == before[at], "an item was done twice, or not at all");
                team.share(0, [](int64_t, int64_t) { require(false, "there was nothing to do"); });
            }
        });
    require(team.shares() == 2 * shares, "shares are counted");
}

static int stopped[2], let_go[2];

static void stop(int) {
    char byte = 0;
    if (write(stopped[1], &byte, 1) != 1 || read(let_go[0], &byte, 1) != 1) std::abort();
}

static std::set<std::string> threads() {
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) found.insert(entry.path().filename());
    return found;
}

// One of two threads is put aside, as by another process that has its core: the other one does all of the work meanwhile.
static void without() {
    char byte = 0;
    require(pipe(stopped) == 0 && pipe(let_go) == 0, "no pipes");
    signal(SIGUSR1, stop);
    const auto others = threads();
    Team team(2);
    std::string helper;
    for (const auto& name : threads())
        if (!others.contains(name)) helper = name;
    require(!helper.empty(), "the team has no second thread");
    require(syscall(SYS_tgkill, getpid(), std::stoi(helper), SIGUSR1) == 0, "the thread cannot be told");
    require(read(stopped[0], &byte, 1) == 1, "the thread does not stop");

    std::vector<int> done(64, 0);
    for (int run = 0; run < 10; run++)
        team.run([&] {
            for (int i = 0; i < 100; i++)
                team.share(int64_t(done.size()), [&](int64_t first, int64_t last) {
                    for (int64_t at = first; at < last; at++) done[at]++;
                });
        });
    for (const int count : done) require(count == 1000, "an item was left out");

    require(write(let_go[1], &byte, 1) == 1, "the thread cannot go on");
    std::atomic<bool> helps = false;
    const pid_t own = gettid();
    for (int run = 0; run < 10000 && !helps; run++)
        team.run([&] {
            team.share(8, [&](int64_t, int64_t) {
                if (gettid() != own) helps = true;
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            });
        });
    require(helps, "the thread that was put aside does not come back");
}

int main(int, char** arguments) {
    if (!std::strcmp(arguments[1], "without")) return without(), 0;
    for (const int size : {1, 2, 3, 5}) everything(size);
}
