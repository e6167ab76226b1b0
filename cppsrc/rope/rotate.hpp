// The rotation of a token's heads.
#pragma once

#include "rope/kernels.hpp"
#include "simd/each.hpp"

namespace fusible::rope::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Element i of the first half turns with element i of the second.
struct Halves {
    template <class S>
    static void rotate(const S* x, S* y, const float* cosines, const float* sines, int rotated) {
        const int half = rotated / 2;
        each_vector(half, [=](std::int64_t i, auto lanes) {
            const std::int64_t j = i + half;
            const F32 low = load(x + i, lanes);
            const F32 high = load(x + j, lanes);
            store(y + i, fma(high, load(sines + i, lanes), mul(low, load(cosines + i, lanes))), lanes);
            store(y + j, fma(low, load(sines + j, lanes), mul(high, load(cosines + j, lanes))), lanes);
        });
    }
};

/// Element 2i turns with element 2i + 1.
struct Neighbours {
    template <class S>
    static void rotate(const S* x, S* y, const float* cosines, const float* sines, int rotated) {
        each_vector(rotated, [=](std::int64_t i, auto lanes) {
            const F32 value = load(x + i, lanes);
            store(y + i, fma(swap_pairs(value), load(sines + i, lanes), mul(value, load(cosines + i, lanes))), lanes);
        });
    }
};

template <class S, class Pairs>
void rotate(const RopeToken& token) {
    const auto rest = static_cast<std::size_t>(token.width - token.rotated);
    for (int head = 0; head < token.heads; ++head) {
        const S* x = static_cast<const S*>(token.source) + head * token.source_stride;
        S* y = static_cast<S*>(token.out) + static_cast<std::ptrdiff_t>(head) * token.width;
        Pairs::rotate(x, y, token.cosines, token.sines, token.rotated);
        if (rest != 0) std::memcpy(static_cast<void*>(y + token.rotated), x + token.rotated, rest * sizeof(S));
    }
}

}  // namespace
}  // namespace fusible::rope::FUSIBLE_LEVEL
