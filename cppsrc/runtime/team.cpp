#include "runtime/team.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "fusible/default_arithmetic.hpp"
#include "runtime/first_error.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace fusible {

namespace {

thread_local bool its_turn = false;
thread_local bool helping = false;

/// The caller takes part, and waits for nobody who has not begun: such a one finds nothing left to do, perhaps much later, and so the loop lives as
/// long as the last who has it. Each takes `step` tasks at a time that follow one another, as those of OpenMP's schedule do: what neighbouring tasks
/// read lies side by side, and two threads that took turns would each fetch all of it.
struct Loop {
    std::size_t count;
    std::size_t step;
    Task task;
    const void* context;
    std::atomic<int> places;  // for threads that help and have not begun
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> done{0};
    FirstError error;

    Loop(std::size_t tasks, std::size_t at_a_time, int helpers, Task body, const void* of)
        : count(tasks), step(at_a_time), task(body), context(of), places(helpers) {}

    void help() {
        if (places.fetch_sub(1) > 0) take_part();
    }

    void take_part() {
        const DefaultArithmetic as_the_caller;
        helping = true;
        for (std::size_t begin = next.fetch_add(step); begin < count; begin = next.fetch_add(step)) {
            const std::size_t end = std::min(begin + step, count);
            for (std::size_t i = begin; i < end; ++i) error.guard([&] { task(context, i); });
            done.fetch_add(end - begin, std::memory_order_release);
        }
        helping = false;
    }
};

/// Who waits looks for news for this long before it sleeps: to be woken takes about as long, and the next loop mostly begins sooner.
constexpr std::chrono::microseconds kLooks{50};

class Team {
  public:
    void take_turn() {
        std::unique_lock<std::mutex> held(lock_);
        while (taken_) help_or_wait(held, waiting_);
        taken_ = true;
    }

    void give_turn() {
        const std::lock_guard<std::mutex> held(lock_);
        taken_ = false;
        news_.fetch_add(1, std::memory_order_release);
        waiting_.changed.notify_one();
    }

    /// Has others help with a loop; those that wait for their turn come first.
    void begin(const std::shared_ptr<Loop>& loop, int helpers) {
        const std::lock_guard<std::mutex> held(lock_);
        loop_ = loop;
        news_.fetch_add(1, std::memory_order_release);
        const int waiting = std::min(waiting_.asleep, helpers);
        if (waiting > 0) waiting_.changed.notify_all();
        for (int i = waiting; i < helpers; ++i) members_.changed.notify_one();
    }

    void end() {
        const std::lock_guard<std::mutex> held(lock_);
        loop_.reset();
    }

    /// Helps until it is `over`.
    void serve(const std::atomic<bool>& over) {
        std::unique_lock<std::mutex> held(lock_);
        while (!over.load(std::memory_order_relaxed)) help_or_wait(held, members_);
    }

    void dismiss(std::atomic<bool>& over) {
        const std::lock_guard<std::mutex> held(lock_);
        over.store(true, std::memory_order_relaxed);
        news_.fetch_add(1, std::memory_order_release);
        members_.changed.notify_all();
    }

    std::atomic<int> size{0};  // members that serve, or will

  private:
    struct Sleepers {
        std::condition_variable changed;
        int asleep = 0;
    };

    void help_or_wait(std::unique_lock<std::mutex>& held, Sleepers& sleepers) {
        if (const std::shared_ptr<Loop> loop = loop_) {
            held.unlock();
            loop->help();
            held.lock();
            if (loop_ == loop) loop_.reset();
            return;
        }
        const unsigned seen = news_.load(std::memory_order_relaxed);
        held.unlock();
        const auto until = std::chrono::steady_clock::now() + kLooks;
        while (news_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) std::this_thread::yield();
        held.lock();
        ++sleepers.asleep;
        sleepers.changed.wait(held, [&] { return news_.load(std::memory_order_relaxed) != seen; });
        --sleepers.asleep;
    }

    std::mutex lock_;
    Sleepers waiting_;  // for their turn
    Sleepers members_;  // for a loop
    std::atomic<unsigned> news_{0};
    bool taken_ = false;
    std::shared_ptr<Loop> loop_;  // of whose turn it is, where others may find tasks in it
};

Team& team() {
    static auto* const only = new Team;  // threads of XLA's may outlive what ends with the process
    return *only;
}

constexpr std::size_t kShares = 4;  // of a loop, for each thread: so that one that comes late, or is slow, holds up little

}  // namespace

void run_with_team(const std::function<void()>& body) {
#if defined(_OPENMP)
    const int threads = get_num_threads();
    if (threads > 1 && team_size() < threads) {  // programs that other threads run meanwhile have the same team
        FirstError error;
        std::atomic<bool> over{false};
        team().size.fetch_add(threads - 1);
#pragma omp parallel num_threads(threads)
        {
            if (omp_get_thread_num() == 0) {
                error.guard(body);
                team().dismiss(over);
            } else {
                error.guard([&] { team().serve(over); });
            }
        }
        team().size.fetch_sub(threads - 1);
        return error.rethrow();
    }
#endif
    body();
}

Turn::Turn() {
    team().take_turn();
    its_turn = true;
}

Turn::~Turn() {
    its_turn = false;
    team().give_turn();
}

bool has_turn() { return its_turn; }

bool is_helping() { return helping; }

int team_size() { return 1 + team().size.load(); }

void run_by_team(std::size_t count, int threads, Task task, const void* context) {
    const std::size_t step = std::max<std::size_t>(1, count / (kShares * static_cast<std::size_t>(threads)));
    const auto loop = std::make_shared<Loop>(count, step, threads - 1, task, context);
    team().begin(loop, threads - 1);
    loop->take_part();
    team().end();
    while (loop->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
    loop->error.rethrow();
}

}  // namespace fusible
