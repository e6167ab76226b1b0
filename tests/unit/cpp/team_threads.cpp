// Threads that share the loops of a team: with OpenMP's as members, and under the thread sanitizer, which cannot see what OpenMP does, with others.
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/team.cpp"

namespace fusible {

namespace {

void check(bool held, const char* what) {
    if (held) return;
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

/// A loop that only so many threads at once come to the end of.
void meet(int threads) {
    std::atomic<int> here{0};
    parallel_for(static_cast<std::size_t>(threads), threads, [&](std::size_t) {
        check(is_helping() && get_num_threads() == 1, "a task is one thread's");
        here.fetch_add(1);
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (here.load() < threads && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        check(here.load() == threads, "nobody helps");
    });
}

void no_more_than(int threads) {
    std::mutex lock;
    std::set<std::thread::id> seen;
    parallel_for(64, threads, [&](std::size_t) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const std::lock_guard<std::mutex> held(lock);
        seen.insert(std::this_thread::get_id());
    });
    check(seen.size() <= static_cast<std::size_t>(threads), "more threads than were asked for");
}

void each_task_once(std::size_t count, int threads) {
    std::vector<int> done(count);
    parallel_for(count, threads, [&](std::size_t i) { ++done[i]; });
    for (const int times : done) check(times == 1, "each task once");
}

void in_turns(int threads) {
    for (int i = 0; i < 200; ++i) {
        const Turn turn;
        check(has_turn(), "it is its turn");
        each_task_once(static_cast<std::size_t>(1 + i * 7 % 50), threads);
    }
    check(!has_turn(), "its turn is over");
}

void an_error_reaches_the_caller() {
    const Turn turn;
    std::string found;
    try {
        parallel_for(100, 3, [](std::size_t i) {
            if (i == 50) throw std::runtime_error("fifty");
        });
    } catch (const std::runtime_error& error) {
        found = error.what();
    }
    check(found == "fifty", "an error is lost");
    each_task_once(10, 3);
}

void by_members() {
    std::atomic<bool> over{false};
    std::array<std::thread, 2> members{std::thread([&] { team().serve(over); }), std::thread([&] { team().serve(over); })};
    {
        const Turn turn;
        meet(3);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // they sleep now
        meet(3);
        meet(2);
        no_more_than(2);
    }
    an_error_reaches_the_caller();
    std::array<std::thread, 3> callers;
    for (auto& caller : callers) caller = std::thread([] { in_turns(3); });
    for (auto& caller : callers) caller.join();
    team().dismiss(over);
    for (auto& member : members) member.join();
}

void who_waits_helps() {
    std::thread second;
    {
        const Turn turn;
        second = std::thread([] { const Turn later; });
        meet(2);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        meet(2);
    }
    second.join();
}

void by_openmp() {
    set_num_threads(3);
    check(team_size() == 1, "nobody helps yet");
    for (int i = 0; i < 50; ++i)
        run_with_team([] {
            check(team_size() == 3 && get_num_threads() == 1, "two help, in a turn alone");
            run_with_team([] { check(team_size() == 3, "they help already"); });
            std::thread([] { run_with_team([] { check(team_size() == 3, "two help already"); }); }).join();
            std::thread([] {  // as one of XLA's
                const Turn turn;
                check(get_num_threads() == 3, "a call has the team");
                meet(3);
            }).join();
            const Turn turn;
            check(get_num_threads() == 3, "a call has the team, on the thread that began, too");
            meet(3);
        });
    std::string found;
    try {
        run_with_team([] { throw std::runtime_error("before it ends"); });
    } catch (const std::runtime_error& error) {
        found = error.what();
    }
    check(found == "before it ends" && team_size() == 1, "an error is lost");
    set_num_threads(1);
    run_with_team([] {
        const Turn turn;
        check(team_size() == 1 && get_num_threads() == 1, "one thread has nobody");
        each_task_once(10, get_num_threads());
    });
}

}  // namespace

}  // namespace fusible

int main() {
    fusible::who_waits_helps();
    fusible::by_members();
    if (fusible::has_openmp()) fusible::by_openmp();
    std::puts("done");
}
