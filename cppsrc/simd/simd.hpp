// The vector vocabulary of the kernels, for the level that this translation unit is compiled for.
//
// Everything is in an unnamed namespace inside the level's own, which a family's kernels open by a using-directive: two units compiled with
// different flags share no symbol, so the linker cannot give a generic kernel an AVX-512 function. For the same reason kernels include no C++
// library header with code.
#pragma once

#if defined(FUSIBLE_SIMD_AVX512)
#include "simd/avx512.hpp"
#elif defined(FUSIBLE_SIMD_AVX2)
#include "simd/avx2.hpp"
#else
#include "simd/generic.hpp"
#endif

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

/// totals[i] = sum_lanes(a[i]), to the bit, by a third of the instructions. Always inlined: sums that a call is given the address of lie in memory.
template <int kCount>
[[gnu::always_inline]] inline void sums_of_lanes(const F32* a, float (&totals)[kCount]) {
    constexpr int kWorthwhile = kLanes / 4;
    for (int i = 0; i < kCount; i += kLanes) {
        const int count = kCount - i < kLanes ? kCount - i : kLanes;
        if (count <= kWorthwhile) {
            for (int j = 0; j < count; ++j) totals[i + j] = sum_lanes(a[i + j]);
            continue;
        }
        F32 group[kLanes];
        float sums[kLanes];
        for (int j = 0; j < kLanes; ++j) group[j] = a[j < count ? i + j : i];
        store(sums, sums_of_lanes(group));
        for (int j = 0; j < count; ++j) totals[i + j] = sums[j];
    }
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
