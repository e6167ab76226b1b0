#include "runtime/level.hpp"

#include <atomic>

#include "fusible/errors.hpp"

#if defined(FUSIBLE_X86_KERNELS)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace fusible {

namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(FUSIBLE_X86_KERNELS)
constexpr int kCompiled = 5;

/// Whether the CPU has AMX for bf16, and the system lets this process use it, which asks for room to save the tiles in.
bool has_tiles() {
#if defined(__linux__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
    constexpr unsigned kTiles = 1u << 24;
    constexpr unsigned kBf16 = 1u << 22;
    if ((edx & kTiles) == 0 || (edx & kBf16) == 0) return false;
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool runs(int level) {
    switch (level) {
        case 0:
            return true;
        case 1:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
        case 2:
            return runs(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        case 3:
            return runs(2) && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
        default:
            return runs(3) && has_tiles();
    }
}
#else
constexpr int kCompiled = 1;

bool runs(int level) { return level == 0; }
#endif

int best_level() {
    int level = 0;
    while (level + 1 < kCompiled && runs(level + 1)) ++level;
    return level;
}

std::atomic<int>& chosen() {
    static std::atomic<int> level{best_level()};
    return level;
}

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

}  // namespace

const char* name_of(Level level) { return kNames[static_cast<int>(level)]; }

Level current_level() { return static_cast<Level>(chosen().load(std::memory_order_relaxed)); }

std::vector<std::string> usable_levels() {
    const std::vector<std::string> all = compiled_levels();
    return {all.begin(), all.begin() + best_level() + 1};
}

std::vector<std::string> compiled_levels() { return {kNames, kNames + kCompiled}; }

std::vector<std::string> cpu_features() {
    std::vector<std::string> features;
#if defined(FUSIBLE_X86_KERNELS)
#define FUSIBLE_FEATURE(name) \
    if (__builtin_cpu_supports(name)) features.emplace_back(name);
    FUSIBLE_FEATURE("sse4.2")
    FUSIBLE_FEATURE("avx")
    FUSIBLE_FEATURE("avx2")
    FUSIBLE_FEATURE("fma")
    FUSIBLE_FEATURE("f16c")
    FUSIBLE_FEATURE("avx512f")
    FUSIBLE_FEATURE("avx512bw")
    FUSIBLE_FEATURE("avx512vl")
    FUSIBLE_FEATURE("avx512dq")
    FUSIBLE_FEATURE("avx512vbmi")
    FUSIBLE_FEATURE("avx512vnni")
    FUSIBLE_FEATURE("avx512bf16")
    if (has_tiles()) features.emplace_back("amx_bf16");
#undef FUSIBLE_FEATURE
#endif
    return features;
}

std::string get_level() { return name_of(current_level()); }

void set_level(const std::string& name) {
    const int best = best_level();
    int level = name.empty() ? best : 0;
    if (!name.empty())
        while (level <= best && name != kNames[level]) ++level;
    if (level > best)
        throw ArgumentError(expected("one of " + joined(usable_levels()), "the level of the native kernels", "'" + name + "'",
                                     "choose a level that this CPU and this build have"));
    chosen().store(level, std::memory_order_relaxed);
}

}  // namespace fusible
