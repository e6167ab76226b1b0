// Counter-based random words (tex/backends/torch_backend/random.py has the formula and its sources). Static, so that each unit has its own.
#pragma once

#include <cstdint>

namespace fusible {

/// The odd key of a seed.
[[maybe_unused]] static inline std::uint64_t key_of_seed(std::uint64_t seed) {
    std::uint64_t z = seed + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) | 1;
}

[[maybe_unused]] static inline std::uint64_t rotate32(std::uint64_t x) { return (x >> 32) | (x << 32); }

/// What four rounds leave of y, the product of a counter and a key, and of z, that and the key.
[[maybe_unused]] static inline std::uint64_t four_rounds(std::uint64_t y, std::uint64_t z) {
    std::uint64_t x = rotate32(y * y + y);
    x = rotate32(x * x + z);
    x = rotate32(x * x + y);
    return x * x + z;
}

/// The word of a counter, in [0, 2^32).
[[maybe_unused]] static inline std::uint64_t random_word(std::uint64_t key, std::uint64_t counter) {
    const std::uint64_t y = counter * key;
    return four_rounds(y, y + key) >> 32;
}

/// The long word of a counter, of 64 bits.
[[maybe_unused]] static inline std::uint64_t long_random_word(std::uint64_t key, std::uint64_t counter) {
    const std::uint64_t y = counter * key;
    const std::uint64_t word = four_rounds(y, y + key);
    const std::uint64_t x = rotate32(word);
    return word ^ ((x * x + y) >> 32);
}

}  // namespace fusible
