#include "runtime/threads.hpp"

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>

#include "fusible/errors.hpp"
#include "runtime/first_error.hpp"
#include "runtime/team.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define FUSIBLE_HAS_FORK 1
#endif

namespace fusible {

namespace {

constexpr std::size_t kBytesPerThread = 64 * 1024;

std::atomic<int> setting{0};
std::atomic<bool> in_forked_child{false};

#if defined(FUSIBLE_HAS_FORK)
[[maybe_unused]] const int watches_fork =
    pthread_atfork(nullptr, nullptr, [] { in_forked_child.store(true, std::memory_order_relaxed); });
#endif

int default_threads() {
#if defined(_OPENMP)
    return omp_get_max_threads();
#else
    return 1;
#endif
}

bool must_be_serial() {
    if (is_helping() || in_forked_child.load(std::memory_order_relaxed)) return true;
    if (has_turn()) return false;
#if defined(_OPENMP)
    return omp_in_parallel() != 0;
#else
    return true;
#endif
}

/// OpenMP ends the process where the system has no more threads to give.
int most_threads() {
    static const int most = std::max(64, 4 * static_cast<int>(std::thread::hardware_concurrency()));
    return most;
}

}  // namespace

void set_num_threads(int count) {
    if (count < 0)
        throw ArgumentError(expected("a number >= 0", "num_threads", std::to_string(count), "pass 0 to follow torch"));
    setting.store(count, std::memory_order_relaxed);
}

int get_num_threads() {
    if (must_be_serial()) return 1;
    if (has_turn()) return team_size();
    const int chosen = setting.load(std::memory_order_relaxed);
    return chosen > 0 ? std::min(chosen, most_threads()) : default_threads();
}

bool has_openmp() {
#if defined(_OPENMP)
    return true;
#else
    return false;
#endif
}

int threads_for(int requested, std::size_t bytes) {
    if (must_be_serial()) return 1;
    if (requested > 0) return std::min(requested, most_threads());
    const std::size_t worthwhile = std::max<std::size_t>(1, bytes / kBytesPerThread);
    return static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(get_num_threads()), worthwhile));
}

void run_tasks(std::size_t count, int threads, Task task, const void* context) {
    [[maybe_unused]] const auto workers = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count));
    if (workers > 1 && has_turn()) return run_by_team(count, workers, task, context);
#if defined(_OPENMP)
    if (workers > 1) {
        FirstError error;
#pragma omp parallel for num_threads(workers) schedule(static)
        for (std::size_t i = 0; i < count; ++i) error.guard([&] { task(context, i); });
        error.rethrow();
        return;
    }
#endif
    for (std::size_t i = 0; i < count; ++i) task(context, i);
}

}  // namespace fusible
