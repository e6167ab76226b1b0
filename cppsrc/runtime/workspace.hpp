// Scratch memory of a thread, kept from call to call: fresh pages would cost more than what is computed in them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fusible {

class Workspace {
    static constexpr std::size_t kLine = 64;

  public:
    /// At least `count` elements at a cache line's beginning. Valid until the next call; the contents are unspecified.
    template <class T>
    T* of(std::size_t count) {
        const std::size_t bytes = (count * sizeof(T) + kLine - 1) / kLine * kLine;
        if (bytes > size_) {
            memory_.reset();
            size_ = 0;
            memory_.reset(allocate(bytes));
            size_ = bytes;
        }
        return static_cast<T*>(memory_.get());
    }

  private:
    /// Large memory comes in whole large pages, where the system has them: it is read in panels that lie far apart.
    static void* allocate(std::size_t bytes) {
        constexpr std::size_t kLargePage = std::size_t{1} << 21;
        const bool large = bytes >= kLargePage;
        const std::size_t page = large ? kLargePage : kLine;
        void* memory = std::aligned_alloc(page, (bytes + page - 1) / page * page);
        if (memory == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
        if (large) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
        return memory;
    }

    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };

    std::unique_ptr<void, Free> memory_;
    std::size_t size_ = 0;
};

}  // namespace fusible
