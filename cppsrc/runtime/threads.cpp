#include "runtime/threads.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "fusible/default_arithmetic.hpp"
#include "fusible/errors.hpp"

#if defined(_OPENMP)
#include <omp.h>
#if defined(__clang__) || __GNUC__ >= 9
#define FUSIBLE_CAN_END_THREADS 1
#pragma weak omp_pause_resource_all  // OpenMP 5.0; what torch brings may be older than the compiler's
#endif
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
thread_local const Pool* pool = nullptr;
thread_local bool helps = false;  // whether this thread runs tasks of a loop by a pool

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
    if (helps || in_forked_child.load(std::memory_order_relaxed)) return true;
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

void end_idle_threads() {
#if defined(FUSIBLE_CAN_END_THREADS)
    if (omp_pause_resource_all != nullptr && !must_be_serial()) omp_pause_resource_all(omp_pause_soft);
#endif
}

int threads_for(int requested, std::size_t bytes) {
    if (must_be_serial()) return 1;
    if (requested > 0) return std::min(requested, most_threads());
    const std::size_t worthwhile = std::max<std::size_t>(1, bytes / kBytesPerThread);
    return static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(get_num_threads()), worthwhile));
}

UsingPool::UsingPool(const Pool& used) : former_(pool) { pool = &used; }
UsingPool::~UsingPool() { pool = former_; }

namespace {

/// The first exception of a parallel region. One that left the region would end the process; so it waits here until all threads are done.
class FirstError {
  public:
    template <class Body>
    void guard(const Body& body) {
        if (seen_.load(std::memory_order_relaxed)) return;
        try {
            body();
        } catch (...) {
            if (!seen_.exchange(true, std::memory_order_relaxed)) error_ = std::current_exception();
        }
    }

    void rethrow() const {
        if (error_) std::rethrow_exception(error_);
    }

  private:
    std::atomic<bool> seen_{false};
    std::exception_ptr error_;
};

/// A loop by a pool. The caller takes part, and waits for no helper that has not begun: such a one finds nothing left to do, perhaps much later, and
/// so the loop lives as long as the last of them. Each takes `step` tasks at a time that follow one another, as those of OpenMP's schedule do: what
/// neighbouring tasks read lies side by side, and two threads that took turns would each fetch all of it.
struct PooledLoop {
    std::size_t count;
    std::size_t step;
    Task task;
    const void* context;
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> done{0};
    FirstError error;

    void take_part() {
        const DefaultArithmetic as_the_caller;
        helps = true;
        for (std::size_t begin = next.fetch_add(step); begin < count; begin = next.fetch_add(step)) {
            const std::size_t end = std::min(begin + step, count);
            for (std::size_t i = begin; i < end; ++i) error.guard([&] { task(context, i); });
            done.fetch_add(end - begin, std::memory_order_release);
        }
        helps = false;
    }
};

constexpr std::size_t kShares = 4;  // of a loop, for each thread: so that one that comes late, or is slow, holds up little

void run_by_pool(std::size_t count, int helpers, Task task, const void* context) {
    const auto loop = std::make_shared<PooledLoop>();
    loop->count = count;
    loop->step = std::max<std::size_t>(1, count / (kShares * static_cast<std::size_t>(helpers + 1)));
    loop->task = task;
    loop->context = context;
    for (int i = 0; i < helpers; ++i) {
        const auto help = [](void* shared) {
            const std::unique_ptr<std::shared_ptr<PooledLoop>> own(static_cast<std::shared_ptr<PooledLoop>*>(shared));
            (*own)->take_part();
        };
        auto* const shared = new (std::nothrow) std::shared_ptr<PooledLoop>(loop);
        if (shared == nullptr) break;  // nothing may throw while a helper reads what the caller has
        pool->schedule(pool->owner, help, shared);
    }
    loop->take_part();
    while (loop->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
    loop->error.rethrow();
}

}  // namespace

void run_tasks(std::size_t count, int threads, Task task, const void* context) {
    [[maybe_unused]] const auto workers = static_cast<int>(std::min<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), count));
    if (workers > 1 && pool != nullptr) return run_by_pool(count, workers - 1, task, context);
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
