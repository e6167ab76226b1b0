// The passes over a run of elements that scale it and that sum its squares.
#pragma once

#include "optimizer/kernels.hpp"
#include "simd/each.hpp"

namespace fusible::optimizer::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr std::size_t kNormBlock = 256;

/// A block as fp32, zeros beyond its `length`: where it lies, or in `buffer`.
template <class S>
inline const float* block_of(const S* source, std::size_t length, float* buffer) {
    if constexpr (sizeof(S) == sizeof(float))
        if (length == kNormBlock) return source;
    load_run(source, buffer, static_cast<std::int64_t>(length));
    for (std::size_t i = length; i < kNormBlock; ++i) buffer[i] = 0;
    return buffer;
}

/// Sixteen sums in double, which neither overflow nor lose what is small; the same at every level. The squares are exact.
template <class S>
double sum_of_squares(const void* untyped, std::size_t count) {
    constexpr std::size_t kSums = 16;
    const S* source = static_cast<const S*>(untyped);
    double sums[kSums] = {};
    for (std::size_t begin = 0; begin < count; begin += kNormBlock) {
        float buffer[kNormBlock];
        const float* values = block_of(source + begin, count - begin < kNormBlock ? count - begin : kNormBlock, buffer);
        // Vectors of double are left to the compiler, which sees a loop of known length over memory.
        for (std::size_t i = 0; i < kNormBlock; i += kSums)
            for (std::size_t j = 0; j < kSums; ++j) sums[j] += static_cast<double>(values[i + j]) * static_cast<double>(values[i + j]);
    }
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

template <class S, class D>
std::int32_t scale(const void* untyped, void* untyped_out, std::size_t count, float factor) {
    const S* source = static_cast<const S*>(untyped);
    D* out = static_cast<D*>(untyped_out);
    I32 largest = splat(0);
    each_vector(static_cast<std::int64_t>(count), [&](std::int64_t i, auto lanes) {
        const F32 value = load(source + i, lanes);
        largest = max(largest, bits(abs(value)));
        store(out + i, mul(value, splat(factor)), lanes);
    });
    return max_lane(largest);
}

}  // namespace
}  // namespace fusible::optimizer::FUSIBLE_LEVEL
