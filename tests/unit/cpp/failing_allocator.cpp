// Preloaded into a process, lets the n-th allocation of scratch memory from now on fail: operator new and aligned_alloc are what kernels take it by.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<long> left{-1};
std::atomic<long> failures{0};

bool fails() {
    if (left.load() < 0) return false;
    if (left.fetch_sub(1) != 0) return false;
    ++failures;
    return true;
}

}  // namespace

extern "C" {

/// The allocation after `count` more ones fails, and the ones after that do not; none, where it is negative.
void fail_after(long count) { left.store(count); }

long failed() { return failures.load(); }

void* aligned_alloc(std::size_t alignment, std::size_t size) {
    static const auto real = reinterpret_cast<void* (*)(std::size_t, std::size_t)>(dlsym(RTLD_NEXT, "aligned_alloc"));
    return fails() ? nullptr : real(alignment, size);
}
}

void* operator new(std::size_t size) {
    void* memory = fails() ? nullptr : std::malloc(size > 0 ? size : 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
