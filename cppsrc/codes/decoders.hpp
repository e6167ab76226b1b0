// Codes of weights that a product reads as they lie: a chunk of them becomes vectors of floats by few instructions, in the order that these give. The
// other operand is brought into that order once (`reorder`).
//
// A decoder has: kElements and kBytes of a chunk; kGroups of kVectors vectors, whose products are summed before they are scaled; element(place), the
// element of a chunk at a place of its vectors; values(i), the i-th vector; kExponent, where values are 2^-kExponent times those of the codes; and Seen,
// what is remembered of codes whose NaN it does not decode as such (`has_nan`): one makes the sums of its column NaN.
#pragma once

#include "gemm/units.hpp"

namespace fusible::codes::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

/// Of decoders that give NaN its value.
struct NothingSeen {};
[[maybe_unused]] inline bool has_nan(NothingSeen) { return false; }

/// Whether there is a NaN among codes of E4M3.
[[maybe_unused]] inline bool has_nan_code(const std::uint8_t* codes, std::int64_t count) {
    bool found = false;
    for (std::int64_t i = 0; i < count; ++i) found = found || (codes[i] & 0x7f) == E4M3::kNanCode;
    return found;
}

/// The values of E2M1 by their codes, and their bits as bfloat16.
constexpr float kE2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
constexpr std::uint16_t kE2M1Halves[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                           0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// Where no table has all codes, those of FP8 become float16, which the CPU converts: E5M2 is its upper byte, and E4M3 has its fields a place lower, so
// that the value is 2^-8 of the code's, subnormal ones too. (AVX2 shifts those of E4M3 to bfloat16's places instead.) Only the NaN of E4M3 becomes a
// number.
template <class F>
constexpr bool kIsUpperByte = F::kMantissa == 2;

#if defined(FUSIBLE_SIMD_AVX512)

#if defined(__AVX512BF16__)

/// 64 codes as bfloat16.
template <class F>
struct Halves {
    __m512i pairs[2];

    explicit Halves(const std::uint8_t* source) { gemm::FUSIBLE_LEVEL::decode_joined<F>(_mm512_loadu_si512(source), pairs); }
};

/// Of a pair of bfloat16, each is a float where the other is zero.
template <class F>
class Decoder8 {
  public:
    static constexpr int kElements = 64;
    static constexpr int kBytes = 64;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 4;
    static constexpr int kExponent = 0;
    using Element = float;
    using Seen = NothingSeen;
    static constexpr int element(int place) { return place % 16 / 4 * 16 + place / 32 * 8 + place % 4 * 2 + place / 16 % 2; }

    Decoder8(const std::uint8_t* source, Seen&) : halves_(source) {}

    F32 values(int i) const {
        const __m512i pairs = halves_.pairs[i / 2];
        return {_mm512_castsi512_ps(i % 2 == 0 ? _mm512_slli_epi32(pairs, 16) : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)))};
    }

  private:
    Halves<F> halves_;
};

#if !defined(__AMX_BF16__)  // tiles are faster

#define FUSIBLE_CODES_AS_HALVES 1

using gemm::FUSIBLE_LEVEL::dot;
using gemm::FUSIBLE_LEVEL::Units;

/// Decoders to pairs of bfloat16, for dot products: half(place) is the element at a place of the vectors, pairs(i) the i-th of these, and element(place)
/// that of the sum of a pair.
template <class F>
class PairsDecoder8 {
  public:
    static constexpr int kElements = 64;
    static constexpr int kBytes = 64;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 2;
    using Element = std::uint16_t;
    using Seen = NothingSeen;
    static constexpr int half(int place) { return place % 32 / 8 * 16 + place / 32 * 8 + place % 8; }
    static constexpr int element(int place) { return half(2 * place); }

    explicit PairsDecoder8(const std::uint8_t* source) : halves_(source) {}

    Units pairs(int i) const { return {halves_.pairs[i]}; }

  private:
    Halves<F> halves_;
};

/// kE2M1Halves, once more for an index of five bits.
struct HalvesTwice {
    alignas(64) std::uint16_t at[32] = {};

    constexpr HalvesTwice() {
        for (int i = 0; i < 32; ++i) at[i] = kE2M1Halves[i % 16];
    }
};

/// Each 16 bits have four codes, of which the lowest is looked up, whatever the bit above it.
class PairsDecoder4 {
  public:
    static constexpr int kElements = 128;
    static constexpr int kBytes = 64;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 4;
    using Element = std::uint16_t;
    using Seen = NothingSeen;
    static constexpr int half(int place) { return place % 32 * 4 + place / 32; }
    static constexpr int element(int place) { return half(2 * place); }

    explicit PairsDecoder4(const std::uint8_t* source) : codes_(_mm512_loadu_si512(source)) {}

    Units pairs(int i) const {
        static constexpr HalvesTwice kTable;
        const __m512i codes = i == 0 ? codes_ : _mm512_srli_epi16(codes_, static_cast<unsigned>(4 * i));
        return {_mm512_permutexvar_epi16(codes, _mm512_load_si512(kTable.at))};
    }

  private:
    __m512i codes_;
};

#endif

#else

struct CodesSeen {
    __m512i largest = _mm512_setzero_si512();  // of the codes without their signs
};

inline bool has_nan(const CodesSeen& seen) { return _mm512_cmpeq_epi8_mask(seen.largest, _mm512_set1_epi8(-1)) != 0; }

template <class F>
class Decoder8 {
  public:
    static constexpr int kElements = 64;
    static constexpr int kBytes = 64;
    static constexpr int kGroups = 2;
    static constexpr int kVectors = 2;
    static constexpr int kExponent = kIsUpperByte<F> ? 0 : 8;
    using Element = float;
    using Seen = CodesSeen;
    static constexpr int element(int place) { return place / 32 * 32 + place % 16 / 8 * 16 + place / 16 % 2 * 8 + place % 8; }

    Decoder8(const std::uint8_t* source, Seen& seen) {
        const __m512i codes = _mm512_loadu_si512(source);
        halves_[0] = _mm512_unpacklo_epi8(_mm512_setzero_si512(), codes);
        halves_[1] = _mm512_unpackhi_epi8(_mm512_setzero_si512(), codes);
        if constexpr (!kIsUpperByte<F>) {
            seen.largest = _mm512_max_epu8(seen.largest, _mm512_or_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80))));
            for (__m512i& half : halves_)
                half = _mm512_and_si512(_mm512_srai_epi16(half, 1), _mm512_set1_epi16(static_cast<short>(0xbfff)));
        }
    }

    F32 values(int i) const {
        const __m512i halves = halves_[i % 2];
        return {_mm512_cvtph_ps(i < 2 ? _mm512_castsi512_si256(halves) : _mm512_extracti64x4_epi64(halves, 1))};
    }

  private:
    __m512i halves_[2];
};

#endif

/// Each lane has eight codes, of which the lowest is looked up.
class Decoder4 {
  public:
    static constexpr int kElements = 128;
    static constexpr int kBytes = 64;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 8;
    static constexpr int kExponent = 0;
    using Element = float;
    using Seen = NothingSeen;
    static constexpr int element(int place) { return place % 16 * 8 + place / 16; }

    Decoder4(const std::uint8_t* source, Seen&) : codes_(_mm512_loadu_si512(source)) {}

    F32 values(int i) const {
        const __m512i codes = i == 0 ? codes_ : _mm512_srl_epi32(codes_, _mm_cvtsi32_si128(4 * i));
        return {_mm512_permutexvar_ps(codes, _mm512_loadu_ps(kE2M1))};
    }

  private:
    __m512i codes_;
};

#elif defined(FUSIBLE_SIMD_AVX2)

/// Of a pair of bfloat16, each is a float where the other is zero.
inline F32 half_of_pairs(__m256i pairs, int i) {
    return {_mm256_castsi256_ps(i == 0 ? _mm256_slli_epi32(pairs, 16) : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)))};
}

template <class F>
class Decoder8;

template <>
class Decoder8<E5M2> {
  public:
    static constexpr int kElements = 32;
    static constexpr int kBytes = 32;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 4;
    static constexpr int kExponent = 0;
    using Element = float;
    using Seen = NothingSeen;
    static constexpr int element(int place) { return place; }

    Decoder8(const std::uint8_t* source, Seen&) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        halves_[0] = _mm256_unpacklo_epi8(_mm256_setzero_si256(), codes);
        halves_[1] = _mm256_unpackhi_epi8(_mm256_setzero_si256(), codes);
    }

    F32 values(int i) const {
        const __m256i halves = halves_[i % 2];
        return {_mm256_cvtph_ps(i < 2 ? _mm256_castsi256_si128(halves) : _mm256_extracti128_si256(halves, 1))};
    }

  private:
    __m256i halves_[2];
};

struct CodesSeen {
    __m256i largest = _mm256_setzero_si256();  // of the codes without their signs
};

inline bool has_nan(const CodesSeen& seen) { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen.largest, _mm256_set1_epi8(-1))) != 0; }

/// The fields of a code where bfloat16 has its own: shifts are fewer instructions than the conversion of float16, of which a CPU makes two. The exponent
/// is too small by the difference of the biases, and subnormal codes are subnormal floats.
template <>
class Decoder8<E4M3> {
  public:
    static constexpr int kElements = 32;
    static constexpr int kBytes = 32;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 4;
    static constexpr int kExponent = 127 - E4M3::kBias;
    using Element = float;
    using Seen = CodesSeen;

    /// Of each four bytes: first, third, second, fourth.
    static constexpr int element(int place) { return place % 8 * 4 + place / 8 % 2 * 2 + place / 16; }

    Decoder8(const std::uint8_t* source, Seen& seen) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const __m256i fields = _mm256_set1_epi16(static_cast<short>(0x87f0));
        seen.largest = _mm256_max_epu8(seen.largest, _mm256_or_si256(codes, _mm256_set1_epi8(static_cast<char>(0x80))));
        pairs_[0] = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 4), fields);
        pairs_[1] = _mm256_and_si256(_mm256_srai_epi16(codes, 4), fields);
    }

    F32 values(int i) const { return half_of_pairs(pairs_[i / 2], i % 2); }

  private:
    __m256i pairs_[2];
};

/// The low and the high bytes of kE2M1Halves.
struct HalvesTables {
    alignas(16) std::uint8_t low[16] = {};
    alignas(16) std::uint8_t high[16] = {};

    constexpr HalvesTables() {
        for (int code = 0; code < 16; ++code) {
            low[code] = static_cast<std::uint8_t>(kE2M1Halves[code] & 0xff);
            high[code] = static_cast<std::uint8_t>(kE2M1Halves[code] >> 8);
        }
    }
};

/// The two bytes of bfloat16 are looked up apart.
class Decoder4 {
  public:
    static constexpr int kElements = 64;
    static constexpr int kBytes = 32;
    static constexpr int kGroups = 2;
    static constexpr int kVectors = 4;
    static constexpr int kExponent = 0;
    using Element = float;
    using Seen = NothingSeen;

    /// Vectors are those of the lower and of the upper bytes of each 128 bits, of these the lower and the upper codes, of these the bytes in turn.
    static constexpr int element(int place) {
        const int lane = place % 8;
        const int vector = place / 8;
        return 2 * (lane / 4 * 16 + vector / 4 * 8 + lane % 4 * 2 + vector % 2) + vector % 4 / 2;
    }

    Decoder4(const std::uint8_t* source, Seen&) {
        static constexpr HalvesTables kTables;
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const __m256i mask = _mm256_set1_epi8(0x0f);
        const __m256i low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTables.low)));
        const __m256i high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTables.high)));
        for (int odd = 0; odd < 2; ++odd) {
            const __m256i own = _mm256_and_si256(odd == 0 ? codes : _mm256_srli_epi16(codes, 4), mask);
            const __m256i lows = _mm256_shuffle_epi8(low, own);
            const __m256i highs = _mm256_shuffle_epi8(high, own);
            pairs_[odd] = _mm256_unpacklo_epi8(lows, highs);
            pairs_[2 + odd] = _mm256_unpackhi_epi8(lows, highs);
        }
    }

    F32 values(int i) const { return half_of_pairs(pairs_[i / 2], i % 2); }

  private:
    __m256i pairs_[4];
};

#else

template <class F>
class Decoder8 {
  public:
    static constexpr int kElements = 32;
    static constexpr int kBytes = 32;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = kElements / kLanes;
    static constexpr int kExponent = 0;
    using Element = float;
    using Seen = NothingSeen;
    static constexpr int element(int place) { return place; }

    Decoder8(const std::uint8_t* source, Seen&) : source_(source) {}

    F32 values(int i) const { return decode<F>(load_bytes(source_ + i * kLanes)); }

  private:
    const std::uint8_t* source_;
};

class Decoder4 {
  public:
    static constexpr int kElements = 8 * kLanes;
    static constexpr int kBytes = 4 * kLanes;
    static constexpr int kGroups = 1;
    static constexpr int kVectors = 8;
    static constexpr int kExponent = 0;
    using Element = float;
    using Seen = NothingSeen;
    static constexpr int element(int place) { return place % kLanes * 8 + place / kLanes; }

    Decoder4(const std::uint8_t* source, Seen&) : codes_(load_words(source)) {}

    F32 values(int i) const {
        return map<F32>(codes_, [i](std::int32_t word) { return kE2M1[(static_cast<std::uint32_t>(word) >> (4 * i)) & 15]; });
    }

  private:
    I32 codes_;
};

#endif

}  // namespace
}  // namespace fusible::codes::FUSIBLE_LEVEL
