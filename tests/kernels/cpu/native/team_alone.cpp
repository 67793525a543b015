// Runs what test_team.py asks for, by the threads of team.h alone.
#include <dirent.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "team.h"

static void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

// Shares of random sizes, each of which reads what the one before has written.
static void in_order(int size) {
    Team team(size);
    uint32_t random = uint32_t(size);
    const auto next = [&] { return (random = random * 1664525 + 1013904223) >> 8; };
    std::vector<int64_t> before(400, 0), now(400, 0);
    int64_t shares = 0;
    for (int run = 0; run < 50; run++)
        team.run([&] {
            for (int i = 0; i < 20; i++, shares++) {
                const int64_t count = 1 + next() % now.size();
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

// The other thread of a team of two, which are all of this process.
static int helper() {
    int found = 0;
    DIR* folder = opendir("/proc/self/task");
    for (const dirent* entry; (entry = readdir(folder));)
        if (const int thread = std::atoi(entry->d_name); thread > 0 && thread != gettid()) found = thread;
    closedir(folder);
    require(found != 0, "the team has no second thread");
    return found;
}

static void tell(int thread) { require(syscall(SYS_tgkill, getpid(), thread, SIGUSR1) == 0, "the thread cannot be told"); }

static void doze() { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }

// The other thread comes to help, wherever it sleeps, and wakes the one that waits for it.
static void asleep() {
    Team team(2);
    const pid_t own = gettid();
    for (int run = 0; run < 3; run++)
        team.run([&] {
            doze();  // the helper gives up looking for work
            std::atomic<int> begun = 0;
            team.share(2, [&](int64_t first, int64_t last) {
                require(last == first + 1, "two items are two parts");
                begun++;
                for (int i = 0; begun < 2 && i < 100; i++) doze();
                require(begun == 2, "nobody comes to help");
                if (gettid() != own) doze();  // the other one gives up looking for its end
            });
        });
    team.run(doze);
}

static int stopped[2], let_go[2];

static void stop(int) {
    char byte = 0;
    if (write(stopped[1], &byte, 1) != 1 || read(let_go[0], &byte, 1) != 1) std::abort();
}

// One of two threads is put aside, as by another process that has its core: the other one does all of the work meanwhile.
static void without() {
    char byte = 0;
    require(pipe(stopped) == 0 && pipe(let_go) == 0, "no pipes");
    signal(SIGUSR1, stop);
    Team team(2);
    tell(helper());
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
}

static std::atomic<int> stops = 0;

static void pause_a_little(int) {
    const int number = stops++;
    for (const auto begin = std::chrono::steady_clock::now();
         std::chrono::steady_clock::now() - begin < std::chrono::microseconds(20 + number % 7 * 40);) {
    }
}

// One of two threads is put aside again and again, also between looking at a part and taking it. Shares are alike, so that
// a part of an earlier one looks like one of a later one.
static void interrupted() {
    signal(SIGUSR1, pause_a_little);
    Team team(2);
    const int other = helper();
    std::atomic<bool> ends = false;
    std::thread teller([&] {
        while (!ends) {
            tell(other);
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
    });
    std::vector<int64_t> even(16, 0), odd(16, 0);
    std::atomic<int64_t> helped = 0;
    const pid_t own = gettid();
    int64_t shares = 0;
    for (const auto begin = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - begin < std::chrono::seconds(2);)
        team.run([&] {
            for (int i = 0; i < 200; i++, shares++) {
                auto& now = shares % 2 ? odd : even;
                team.share(int64_t(now.size()), [&now, &helped, own](int64_t first, int64_t last) {
                    for (int64_t at = first; at < last; at++) now[at]++;
                    if (gettid() != own) helped++;
                });
            }
        });
    ends = true;
    teller.join();
    for (size_t at = 0; at < even.size(); at++)
        require(even[at] == (shares + 1) / 2 && odd[at] == shares / 2, "an item was done twice, left out, or of another share");
    require(helped > 0 && stops > 0, "nothing happened to the other thread");
}

int main(int, char** arguments) {
    const auto asks_for = [&](const char* what) { return !std::strcmp(arguments[1], what); };
    if (asks_for("in_order"))
        for (const int size : {1, 2, 3, 5}) in_order(size);
    else if (asks_for("asleep"))
        asleep();
    else if (asks_for("without"))
        without();
    else if (asks_for("interrupted"))
        interrupted();
    else
        return 2;
}
