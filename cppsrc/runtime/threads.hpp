// Threads of the native kernels: how many, and a parallel loop over independent tasks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fusible {

/// Sets how many threads kernels use where a call does not say; 0 follows OpenMP, whose runtime torch shares.
void set_num_threads(int count);

int get_num_threads();

bool has_openmp();

/// Threads for one call. `requested` > 0 is taken as it is, up to four times the CPU's; otherwise work below 64 KiB a thread stays on fewer.
/// One thread in a forked child (an OpenMP runtime that has run before the fork can hang there) and inside a parallel region; those of the team in a
/// compiled program's call (team.hpp).
int threads_for(int requested, std::size_t bytes);

using Task = void (*)(const void* context, std::size_t index);

/// Where a task throws, tasks that have not begun are left out, and the first exception is thrown again once all threads have stopped.
void run_tasks(std::size_t count, int threads, Task task, const void* context);

/// Calls `body(index)` for index in [0, count), each exactly once, in any order. What `body` throws (memory is taken in it) reaches the caller.
template <class Body>
void parallel_for(std::size_t count, int threads, const Body& body) {
    run_tasks(
        count, threads, [](const void* context, std::size_t index) { (*static_cast<const Body*>(context))(index); }, &body);
}

/// As parallel_for, for tasks of unequal cost: a thread that is done takes the next one. They begin in order.
template <class Body>
void parallel_for_uneven(std::size_t count, int threads, const Body& body) {
    std::atomic<std::size_t> next{0};
    const auto workers = static_cast<std::size_t>(threads);
    parallel_for(workers < count ? workers : count, threads, [&](std::size_t) {
        for (std::size_t i = next.fetch_add(1, std::memory_order_relaxed); i < count; i = next.fetch_add(1, std::memory_order_relaxed)) body(i);
    });
}

}  // namespace fusible
