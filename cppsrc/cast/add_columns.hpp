// Sums over some rows of a matrix.
#pragma once

#include <cstddef>

#include "simd/math.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// sums[c] += the sum of `rows` rows, added up in their order.
template <class S>
void add_columns(const void* untyped, std::ptrdiff_t stride, int rows, int cols, float* sums) {
    constexpr int kVectors = 4;
    const S* const source = static_cast<const S*>(untyped);
    int c = 0;
    for (; c + kVectors * kLanes <= cols; c += kVectors * kLanes) {
        F32 sum[kVectors];
        for (int v = 0; v < kVectors; ++v) sum[v] = splat(0.0f);
        for (int r = 0; r < rows; ++r)
            for (int v = 0; v < kVectors; ++v) sum[v] = add(sum[v], load(source + r * stride + c + v * kLanes));
        for (int v = 0; v < kVectors; ++v) store(sums + c + v * kLanes, add(load(sums + c + v * kLanes), sum[v]));
    }
    for (; c < cols; c += kLanes) {
        const auto some = static_cast<std::size_t>(cols - c < kLanes ? cols - c : kLanes);
        F32 sum = splat(0.0f);
        for (int r = 0; r < rows; ++r) sum = add(sum, load_first(source + r * stride + c, some));
        store_first(sums + c, add(load_first(sums + c, some), sum), some);
    }
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
