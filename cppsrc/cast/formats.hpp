// E4M3 (FN) and E5M2: their constants, and the exact casts to and from float32, vectors and single elements.
#pragma once

#include "simd/simd.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

struct E4M3 {
    static constexpr int kMantissa = 3;
    static constexpr int kBias = 7;
    static constexpr std::int32_t kMaxBits = 0x43e00000;  // 448
    static constexpr std::int32_t kNanCode = 0x7f;
    static constexpr std::int32_t kLastFinite = 0x7e;
    static constexpr std::int32_t kBeyondBits = 0x7fc00000;  // what a code above the last finite one becomes
};

struct E5M2 {
    static constexpr int kMantissa = 2;
    static constexpr int kBias = 15;
    static constexpr std::int32_t kMaxBits = 0x47600000;  // 57344
    static constexpr std::int32_t kNanCode = 0x7e;
    static constexpr std::int32_t kLastFinite = 0x7b;
    static constexpr std::int32_t kBeyondBits = 0x7f800000;
};

/// Constants of the cast to a format F, which rounds in one float addition.
///
/// For y in [2^e, 2^(e+1)) the sum y + 2^(e + kShift) has an ulp of 2^(e - kMantissa): the adder rounds y to the format's mantissa, to
/// nearest even, and leaves it as an integer k in the low bits. The code is k + ((e + bias - 1) << kMantissa). Below the smallest normal
/// number e stays at 1 - bias, so subnormals need no case of their own. kOffset makes the constants of that formula vanish modulo 256; it
/// is even, so it does not disturb ties.
template <class F>
struct Rounding {
    static constexpr int kShift = 23 - F::kMantissa;
    static constexpr std::int32_t kMinNormalBits = (127 + 1 - F::kBias) << 23;
    static constexpr std::int32_t kOffset = (256 - (((127 + 1 - F::kBias) << F::kMantissa) & 255)) & 255;
    static constexpr std::int32_t kMagic = (kShift << 23) + kOffset;
    static_assert(kOffset % 2 == 0, "an odd offset would turn round-to-even into round-to-odd");
};

/// One element, any float: saturates (infinities too); a NaN becomes the format's NaN with its sign.
template <class F>
inline std::uint8_t encode_one(float value) {
    using R = Rounding<F>;
    const std::int32_t raw = bits_of(value);
    const std::int32_t magnitude = raw & 0x7fffffff;
    const std::int32_t sign = static_cast<std::int32_t>(static_cast<std::uint32_t>(raw) >> 24) & 0x80;
    if (magnitude > 0x7f800000) return static_cast<std::uint8_t>(F::kNanCode | sign);
    const std::int32_t clamped = magnitude < F::kMaxBits ? magnitude : F::kMaxBits;
    const std::int32_t exponent = clamped & 0x7f800000;
    const std::int32_t base = exponent > R::kMinNormalBits ? exponent : R::kMinNormalBits;
    const std::int32_t rounded = bits_of(float_of(clamped) + float_of(base + R::kMagic)) + (base >> R::kShift);
    return static_cast<std::uint8_t>((rounded & 0x7f) | sign);
}

/// The low seven bits of the codes of magnitude * scale, for 0 < scale < inf and bits of magnitudes that are not NaN. Other bits are anything.
template <class F>
inline I32 encode_magnitude(I32 magnitude, F32 scale) {
    using R = Rounding<F>;
    const I32 clamped = min(bits(mul(floats(magnitude), scale)), splat(F::kMaxBits));
    const I32 base = max(both(clamped, splat(std::int32_t{0x7f800000})), splat(R::kMinNormalBits));
    const F32 magic = floats(add(base, splat(R::kMagic)));
    return add(bits(add(floats(clamped), magic)), shift_right<R::kShift>(base));
}

/// |x| as bits: integers in the order of the floats, with NaN above infinity.
inline I32 magnitude_of(F32 x) { return both(bits(x), splat(std::int32_t{0x7fffffff})); }

/// Codes of x * scale in the low bytes, for 0 < scale < inf and x not NaN (the caller looks at `amax`, the running max of |x| as bits).
template <class F>
inline I32 encode(F32 x, F32 scale, I32& amax) {
    const I32 magnitude = magnitude_of(x);
    amax = max(amax, magnitude);
    return join_sign(encode_magnitude<F>(magnitude, scale), shift_right<24>(bits(x)));
}

/// The same of four vectors with a scale for each, joined. Its callers are flat: arrays that a call is given the addresses of lie in memory.
template <class F>
inline Bytes encode(const F32 (&x)[4], const F32 (&scale)[4], I32 (&amax)[4]) {
    I32 codes[4];
    for (int v = 0; v < 4; ++v) {
        const I32 magnitude = magnitude_of(x[v]);
        amax[v] = max(amax[v], magnitude);
        codes[v] = encode_magnitude<F>(magnitude, scale[v]);
    }
    return join_signs(codes, x);
}

/// Values of codes. With v the float that has the code's fields, rebiased, a normal code means v and a subnormal one 2v - 2^(1-bias);
/// each is the smaller of the two where it applies.
template <class F>
inline F32 decode(I32 codes) {
    const I32 magnitude = both(codes, splat(std::int32_t{0x7f}));
    const I32 rebiased = add(shift_left<23 - F::kMantissa>(magnitude), splat(std::int32_t{(127 - F::kBias) << 23}));
    const F32 normal = floats(rebiased);
    const F32 subnormal = sub(add(normal, normal), floats(splat(Rounding<F>::kMinNormalBits)));
    const I32 finite = bits(min(normal, subnormal));
    const I32 value = either(finite, where_above(magnitude, F::kLastFinite, F::kBeyondBits));
    const I32 sign = shift_left<24>(both(codes, splat(std::int32_t{0x80})));
    return floats(either(value, sign));
}

}  // namespace
}  // namespace fusible::cast::FUSIBLE_LEVEL
