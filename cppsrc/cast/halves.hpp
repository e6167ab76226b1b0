// bf16 times powers of two to FP8, in words of 16 bits as they lie: twice as many lanes as floats have, and one rounding for all scales.
//
// A power of two leaves the mantissa alone. With |x| as bits, of whose mantissa m stay and d go, the code of |x| * 2^k is
// round(|x| / 2^d) - distance * 2^m wherever it is that of a normal number: rounding to nearest even is an addition before a shift, a carry goes
// into the exponent as it should, and zeros come to zero. Subnormal codes have no such form: where one may be, that is told, and the floats are cast.
#pragma once

#include "cast/runs.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

constexpr int kStepHalves = kStep / (2 * kLanes);

/// Magnitudes of bf16 in vectors, as the bits of floats; returns the largest.
template <int kVectors>
inline std::int32_t store_magnitudes(const U16 (&magnitudes)[kVectors], std::int32_t* out) {
    alignas(64) std::uint16_t found[kVectors * 2 * kLanes];
    U16 largest = splat(std::uint16_t{0});
    for (int v = 0; v < kVectors; ++v) {
        store_halves(found + v * 2 * kLanes, magnitudes[v]);
        largest = max(largest, magnitudes[v]);
    }
    for (int i = 0; i < kVectors * 2 * kLanes; ++i) out[i] = std::int32_t{found[i]} << 16;
    return max_lane(larger_of_pairs(largest));
}

/// How the elements of lines are cast, a word of each for every line.
template <int kCount>
struct HalfScales {
    alignas(64) std::uint16_t offset[kCount];  // what is subtracted from the bits of |x| before the shift
    alignas(64) std::uint16_t limit[kCount];   // one less than the bits of the least |x| whose code is normal
};

/// Of lines `first` to `first + kLanes - 1`: their `exponents` are those of the factors, as floats have them. That of 2^-127 is 0, which goes with an
/// infinity in blocks of 32: its code is the last finite one, whatever the factor, so all of its line is cast as floats.
template <class F, int kCount>
inline void set_scales(HalfScales<kCount>& scales, int first, I32 exponents) {
    constexpr std::int32_t kTie = (1 << (6 - F::kMantissa)) - 1;
    const I32 distance = add(splat(std::int32_t{2 * 127 - F::kBias + 1}), exclusive_or(exponents, splat(std::int32_t{-1})));
    const I32 shifted = shift_left<7>(distance);
    const I32 has_codes = both(where_above(distance, 0, -1), where_above(exponents, 0, -1));  // or else every |x| but 0 is below the limit
    const I32 has_none = exclusive_or(has_codes, splat(std::int32_t{-1}));
    store_lower(scales.offset + first, both(has_codes, add(shifted, splat(std::int32_t{-kTie}))));
    store_lower(scales.limit + first, either(has_none, add(shifted, splat(std::int32_t{127}))));
}

/// What the codes of all scales have in common.
struct Halves {
    U16 rounded;  // |x|, and 1 more where a tie goes up
    U16 before;   // |x| - 1: the largest word for 0
    U16 sign;     // as codes have it

    template <class F>
    static Halves of(U16 x) {
        const U16 magnitude = both(x, splat(std::uint16_t{0x7fff}));
        const U16 odd = both(shift_right<7 - F::kMantissa>(magnitude), splat(std::uint16_t{1}));
        return {add(magnitude, odd), add(magnitude, splat(std::uint16_t{0xffff})), both(shift_right<8>(x), splat(std::uint16_t{0x80}))};
    }

    /// Codes; in `missed` a bit is set where one is not right.
    template <class F>
    U16 codes(U16 offset, U16 limit, U16& missed) const {
        missed = either(missed, sub_saturated(limit, before));
        const U16 code = shift_right<7 - F::kMantissa>(sub_saturated(rounded, offset));
        return either(min(code, splat(std::uint16_t{F::kLastFinite})), sign);
    }
};

/// Where most steps of a group have had a code that is not normal, those of the next groups are cast as floats at once, but for one group now and then.
class Trials {
public:
    bool is_due() { return pause_ == 0 || --pause_ == 0; }
    void note(int missed, int of) {
        if (2 * missed > of) pause_ = kPause;
    }

private:
    static constexpr int kPause = 16;
    int pause_ = 0;
};

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
