// Plain C++: eight lanes as arrays, which compilers turn into whatever vectors the target has.
#pragma once

#include "simd/scalar.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

constexpr int kLanes = 8;

struct F32 {
    float lane[kLanes];
};

struct I32 {
    std::int32_t lane[kLanes];
};

/// Twice as many lanes: what bf16 is computed with as it lies.
struct U16 {
    std::uint16_t lane[2 * kLanes];
};

template <class Out, class In, class Function>
inline Out map(const In& a, Function function) {
    Out result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = function(a.lane[i]);
    return result;
}

template <class V, class Function>
inline V map2(const V& a, const V& b, Function function) {
    V result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = function(a.lane[i], b.lane[i]);
    return result;
}

template <class T>
inline F32 load(const T* source) {
    F32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = to_float(source[i]);
    return result;
}

template <class T>
inline void store(T* out, const F32& value) {
    for (int i = 0; i < kLanes; ++i) from_float(value.lane[i], out[i]);
}

inline F32 splat(float value) { return map<F32>(F32{}, [value](float) { return value; }); }
inline I32 splat(std::int32_t value) { return map<I32>(I32{}, [value](std::int32_t) { return value; }); }

inline I32 bits(const F32& a) { return map<I32>(a, [](float x) { return bits_of(x); }); }
inline F32 floats(const I32& a) { return map<F32>(a, [](std::int32_t x) { return float_of(x); }); }

inline F32 add(const F32& a, const F32& b) { return map2(a, b, [](float x, float y) { return x + y; }); }
/// a + b rounded up, for 0 <= a <= b whose sum is normal and finite: what rounding to nearest takes off is a float (Dekker 1971, doi:10.1007/BF01397083).
inline F32 add_up(const F32& a, const F32& b) {
    return map2(a, b, [](float x, float y) {
        const float sum = x + y;
        return float_of(bits_of(sum) + (sum - y < x ? 1 : 0));
    });
}

inline F32 sub(const F32& a, const F32& b) { return map2(a, b, [](float x, float y) { return x - y; }); }
inline F32 mul(const F32& a, const F32& b) { return map2(a, b, [](float x, float y) { return x * y; }); }
inline F32 div(const F32& a, const F32& b) { return map2(a, b, [](float x, float y) { return x / y; }); }
inline F32 sqrt(const F32& a) { return map<F32>(a, [](float x) { return __builtin_sqrtf(x); }); }

/// a * b + c, rounded once where the level has the instruction, twice here.
inline F32 fma(const F32& a, const F32& b, const F32& c) { return add(mul(a, b), c); }

/// The second operand where one is NaN.
inline F32 min(const F32& a, const F32& b) { return map2(a, b, [](float x, float y) { return x < y ? x : y; }); }
inline F32 max(const F32& a, const F32& b) { return map2(a, b, [](float x, float y) { return x > y ? x : y; }); }

/// The nearest integer, ties to even, for |a| < 2^22; -2^31 for NaN, as vector instructions give it.
inline I32 round_to_int(const F32& a) {
    return map<I32>(a, [](float x) {
        const float magic = 0x1.8p23f;
        return x == x ? bits_of(x + magic) - bits_of(magic) : static_cast<std::int32_t>(0x80000000u);
    });
}

inline F32 from_int(const I32& a) { return map<F32>(a, [](std::int32_t x) { return static_cast<float>(x); }); }

/// a < b ? yes : no, lane by lane; `no` where either is NaN.
inline F32 select_less(const F32& a, const F32& b, const F32& yes, const F32& no) {
    F32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = a.lane[i] < b.lane[i] ? yes.lane[i] : no.lane[i];
    return result;
}

/// a <= b ? yes : no, lane by lane; `no` where either is NaN.
inline F32 select_at_most(const F32& a, const F32& b, const F32& yes, const F32& no) {
    F32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = a.lane[i] <= b.lane[i] ? yes.lane[i] : no.lane[i];
    return result;
}

/// The sum of the lanes, in the order that halves make.
inline float sum_lanes(const F32& a) {
    F32 sums = a;
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) sums.lane[i] += sums.lane[i + half];
    return sums.lane[0];
}

/// sum_lanes of each of as many as there are lanes.
inline F32 sums_of_lanes(const F32 (&a)[kLanes]) {
    F32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = sum_lanes(a[i]);
    return result;
}

/// Each pair of neighbouring lanes exchanged.
inline F32 swap_pairs(const F32& a) {
    F32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = a.lane[i ^ 1];
    return result;
}

/// The largest lane; unspecified where one is NaN.
inline float max_lanes(const F32& a) {
    float result = a.lane[0];
    for (int i = 1; i < kLanes; ++i) result = a.lane[i] > result ? a.lane[i] : result;
    return result;
}

/// Wraps around, as vector instructions do.
inline I32 add(const I32& a, const I32& b) {
    return map2(a, b, [](std::int32_t x, std::int32_t y) {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) + static_cast<std::uint32_t>(y));
    });
}

inline I32 min(const I32& a, const I32& b) { return map2(a, b, [](std::int32_t x, std::int32_t y) { return x < y ? x : y; }); }
inline I32 max(const I32& a, const I32& b) { return map2(a, b, [](std::int32_t x, std::int32_t y) { return x > y ? x : y; }); }
inline I32 both(const I32& a, const I32& b) { return map2(a, b, [](std::int32_t x, std::int32_t y) { return x & y; }); }
inline I32 either(const I32& a, const I32& b) { return map2(a, b, [](std::int32_t x, std::int32_t y) { return x | y; }); }
inline I32 exclusive_or(const I32& a, const I32& b) { return map2(a, b, [](std::int32_t x, std::int32_t y) { return x ^ y; }); }

/// The low 32 bits of the products.
inline I32 mul_low(const I32& a, const I32& b) {
    return map2(a, b, [](std::int32_t x, std::int32_t y) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) * static_cast<std::uint32_t>(y)); });
}

/// Words of 32 bits from any address.
inline I32 load_words(const void* source) {
    I32 result;
    __builtin_memcpy(result.lane, source, sizeof(result.lane));
    return result;
}

inline void store_words(void* out, const I32& words) { __builtin_memcpy(out, words.lane, sizeof(words.lane)); }

template <int N>
inline I32 shift_left(const I32& a) {
    return map<I32>(a, [](std::int32_t x) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) << N); });
}

template <int N>
inline I32 shift_right(const I32& a) {
    return map<I32>(a, [](std::int32_t x) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(x) >> N); });
}

/// `value` in the lanes where a > limit, 0 elsewhere.
inline I32 where_above(const I32& a, std::int32_t limit, std::int32_t value) {
    return map<I32>(a, [limit, value](std::int32_t x) { return x > limit ? value : 0; });
}

/// (a & 0x7f) | (b & 0x80) in the low byte of each lane; the other bytes are unspecified.
inline I32 join_sign(const I32& a, const I32& b) { return map2(a, b, [](std::int32_t x, std::int32_t y) { return (x & 0x7f) | (y & 0x80); }); }

inline I32 load_bytes(const std::uint8_t* source) {
    I32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = source[i];
    return result;
}

/// Stores the low bytes of four vectors of `join_sign`, in order: 4 * kLanes bytes.
inline void store_bytes(std::uint8_t* out, const I32 (&codes)[4]) {
    for (int v = 0; v < 4; ++v)
        for (int i = 0; i < kLanes; ++i) out[v * kLanes + i] = static_cast<std::uint8_t>(codes[v].lane[i]);
}

/// The bytes of four vectors.
struct Bytes {
    std::uint8_t lane[4 * kLanes];
};

/// What `join_sign` makes of each lane of `codes` and the uppermost byte of the lane of `signs`, in order.
inline Bytes join_signs(const I32 (&codes)[4], const F32 (&signs)[4]) {
    I32 joined[4];
    for (int v = 0; v < 4; ++v) joined[v] = join_sign(codes[v], shift_right<24>(bits(signs[v])));
    Bytes result;
    store_bytes(result.lane, joined);
    return result;
}

inline void store_bytes(std::uint8_t* out, const Bytes& bytes) { std::memcpy(out, bytes.lane, sizeof bytes.lane); }

/// Of a byte with a sign in bit 7 and a number below 8: the same in four bits.
inline int nibble(std::uint8_t byte) { return (byte | byte >> 4) & 0xf; }

/// The nibbles of two rows, `lower` in the lower halves of bytes.
inline Bytes join_nibbles(const Bytes& lower, const Bytes& upper) {
    Bytes result;
    for (int i = 0; i < 4 * kLanes; ++i) result.lane[i] = static_cast<std::uint8_t>(nibble(lower.lane[i]) | nibble(upper.lane[i]) << 4);
    return result;
}

/// Stores the nibbles of a row, two neighbours to a byte, the first in its lower half: 2 * kLanes bytes.
inline void store_nibbles(std::uint8_t* out, const Bytes& codes) {
    for (int i = 0; i < 4 * kLanes; i += 2) out[i / 2] = static_cast<std::uint8_t>(nibble(codes.lane[i]) | nibble(codes.lane[i + 1]) << 4);
}

inline std::int32_t max_lane(const I32& a) {
    std::int32_t result = a.lane[0];
    for (int i = 1; i < kLanes; ++i) result = a.lane[i] > result ? a.lane[i] : result;
    return result;
}

/// Lane i of the result is the largest lane of x[i].
inline I32 largest_of_each(const I32 (&x)[kLanes]) {
    I32 result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = max_lane(x[i]);
    return result;
}

template <class Function>
inline U16 map_halves(const U16& a, const U16& b, Function function) {
    U16 result;
    for (int i = 0; i < 2 * kLanes; ++i) result.lane[i] = static_cast<std::uint16_t>(function(int{a.lane[i]}, int{b.lane[i]}));
    return result;
}

inline U16 load_halves(const void* source) {
    U16 result;
    __builtin_memcpy(result.lane, source, sizeof(result.lane));
    return result;
}

inline void store_halves(void* out, const U16& halves) { __builtin_memcpy(out, halves.lane, sizeof(halves.lane)); }

/// The lower halves of words.
inline void store_lower(std::uint16_t* out, const I32& words) {
    for (int i = 0; i < kLanes; ++i) out[i] = static_cast<std::uint16_t>(words.lane[i]);
}

inline U16 splat(std::uint16_t value) {
    return map_halves(U16{}, U16{}, [value](int, int) { return int{value}; });
}

/// Wraps around.
inline U16 add(const U16& a, const U16& b) { return map_halves(a, b, [](int x, int y) { return x + y; }); }
/// 0 where it would be negative.
inline U16 sub_saturated(const U16& a, const U16& b) { return map_halves(a, b, [](int x, int y) { return x > y ? x - y : 0; }); }
/// Of lanes below 2^15.
inline U16 min(const U16& a, const U16& b) { return map_halves(a, b, [](int x, int y) { return x < y ? x : y; }); }
inline U16 max(const U16& a, const U16& b) { return map_halves(a, b, [](int x, int y) { return x > y ? x : y; }); }
inline U16 both(const U16& a, const U16& b) { return map_halves(a, b, [](int x, int y) { return x & y; }); }
inline U16 either(const U16& a, const U16& b) { return map_halves(a, b, [](int x, int y) { return x | y; }); }

template <int N>
inline U16 shift_right(const U16& a) {
    return map_halves(a, a, [](int x, int) { return x >> N; });
}

inline bool any(const U16& a) {
    int seen = 0;
    for (const std::uint16_t lane : a.lane) seen |= lane;
    return seen != 0;
}

/// Lane i is the larger of lanes 2 i and 2 i + 1, which are below 2^15, times 2^16: of magnitudes in bf16 the larger one's as a float.
inline I32 larger_of_pairs(const U16& a) {
    I32 result;
    for (int i = 0; i < kLanes; ++i) {
        const std::uint16_t larger = a.lane[2 * i] > a.lane[2 * i + 1] ? a.lane[2 * i] : a.lane[2 * i + 1];
        result.lane[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(larger) << 16);
    }
    return result;
}

/// Stores two vectors of numbers below 256 as bytes: 4 * kLanes of them.
inline void store_bytes(std::uint8_t* out, const U16 (&codes)[2]) {
    for (int v = 0; v < 2; ++v)
        for (int i = 0; i < 2 * kLanes; ++i) out[2 * v * kLanes + i] = static_cast<std::uint8_t>(codes[v].lane[i]);
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
