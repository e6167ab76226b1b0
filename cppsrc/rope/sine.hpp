// Sine and cosine of fp32 angles, in double and rounded once, which give the same bits at every level. The rotation by them does so only at the
// levels with vectors: generic code rounds both products, where they fuse one of them with the sum.
#pragma once

#include <cstddef>

#include "simd/scalar.hpp"

namespace fusible::rope::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Beyond it the multiples of pi / 2 below are no longer exact, and libm answers.
constexpr float kLargestAngle = 0x1p19f;

/// sin and cos on |r| <= pi / 4: Taylor polynomials whose remainders are 7e-12 and 1e-10.
inline double sine_near_zero(double r, double z) {
    const double sum = -1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 + z * (-1.0 / 39916800))));
    return r + r * (z * sum);
}

inline double cosine_near_zero(double z) {
    return 1 + z * (-0.5 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800)))));
}

/// In double throughout and without a comparison, which compilers turn into vectors.
inline void sine_and_cosine_one(float angle, float& sine, float& cosine) {
    constexpr double kMagic = 0x1.8p52;       // added and subtracted, it leaves the nearest integer
    constexpr double kHigh = 0x1.921fb544p0;  // the first 33 bits of pi / 2, exact times n < 2^20
    constexpr double kLow = 0x1.0b4611a626331p-34;
    const double x = angle;
    const double n = (x * 0x1.45f306dc9c883p-1 + kMagic) - kMagic;
    const double r = (x - n * kHigh) - n * kLow;
    const double z = r * r;
    const double s = sine_near_zero(r, z);
    const double c = cosine_near_zero(z);
    const double quadrant = n - 4 * ((n * 0.25 - 0.375 + kMagic) - kMagic);  // 0, 1, 2 or 3
    const double sign = __builtin_copysign(1.0, 1.5 - quadrant);
    const double odd = quadrant - 1 + sign;
    const double even = 1 - odd;
    sine = static_cast<float>(sign * (even * s + odd * c));
    cosine = static_cast<float>(sign * (even - odd) * (even * c + odd * s));
}

[[maybe_unused]] void sine_and_cosine(const float* angles, float* sines, float* cosines, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) sine_and_cosine_one(angles[i], sines[i], cosines[i]);
    for (std::size_t i = 0; i < count; ++i) {
        if (__builtin_fabsf(angles[i]) <= kLargestAngle) continue;
        sines[i] = __builtin_sinf(angles[i]);
        cosines[i] = __builtin_cosf(angles[i]);
    }
}

}  // namespace
}  // namespace fusible::rope::FUSIBLE_LEVEL
