// Scratch memory of a thread, kept from call to call: fresh pages would cost more than what is computed in them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace fusible {

class Workspace {
  public:
    /// At least `count` elements at a cache line's beginning. Valid until the next call; the contents are unspecified.
    template <class T>
    T* of(std::size_t count) {
        constexpr std::size_t kLine = 64;
        const std::size_t bytes = (count * sizeof(T) + kLine - 1) / kLine * kLine;
        if (bytes > size_) {
            memory_.reset();
            size_ = 0;
            memory_.reset(std::aligned_alloc(kLine, bytes));
            if (memory_ == nullptr) throw std::bad_alloc();
            size_ = bytes;
        }
        return static_cast<T*>(memory_.get());
    }

  private:
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    std::unique_ptr<void, Free> memory_;
    std::size_t size_ = 0;
};

}  // namespace fusible
