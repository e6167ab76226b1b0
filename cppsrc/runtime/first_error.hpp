// The first exception of several threads.
#pragma once

#include <atomic>
#include <exception>

namespace fusible {

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

}  // namespace fusible
