// The kernel of fingerprints as a table of functions, one table a level. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/tables.hpp"

namespace fusible::fingerprint {

/// 128 bits that stand for a run of bytes.
struct Fingerprint {
    std::uint64_t first;
    std::uint64_t second;
};

/// Takes one value more into a fingerprint: one to one in the value for a given state, and in the state for a given value. Static, so that each level
/// has its own.
static inline void take(Fingerprint& state, std::uint64_t first, std::uint64_t second) {
    const std::uint64_t a = state.first ^ first, b = state.second ^ second;
    state.first = ((a << 29) | (a >> 35)) * 0x9E3779B97F4A7C15u;
    state.second = ((b << 41) | (b >> 23)) * 0xC2B2AE3D27D4EB4Fu;
}

struct Kernels {
    /// The fingerprint of `count` bytes, the same at every level.
    Fingerprint (*of)(const void* bytes, std::size_t count);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::fingerprint
