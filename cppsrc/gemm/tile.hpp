// The micro-kernel: MR x NR sums of C that stay in registers.
#pragma once

#include "gemm/units.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

#if defined(__AMX_BF16__)
constexpr int kVectors = 2;  // two tiles (amx.hpp)
constexpr int kMR = 12;
#elif defined(FUSIBLE_SIMD_AVX512)
constexpr int kVectors = 4;
constexpr int kMR = 6;  // 24 sums, 4 vectors and 1 broadcast of 32 registers
#elif defined(FUSIBLE_SIMD_AVX2)
constexpr int kVectors = 2;
constexpr int kMR = 6;  // 12 sums, 2 vectors and 1 broadcast of 16 registers
#else
constexpr int kVectors = 1;
constexpr int kMR = 4;
#endif

/// NR: columns of a tile, and of a packed micro-panel of B.
constexpr int kNR = kVectors * kLanes;

/// Rows of a tile that is narrower: as many sums, or twice the rows where that is fewer.
constexpr int mr_of(int vectors) { return kVectors / vectors >= 2 ? 2 * kMR : kVectors * kMR / vectors; }

/// Packed rows of A: unit u of row r lies at units[r * row_stride + u * unit_stride].
struct PackedRows {
    const std::int32_t* units;
    std::ptrdiff_t row_stride;
    std::ptrdiff_t unit_stride;
};

/// Units after which a tile fetches what is wanted after it.
constexpr std::int64_t kFetchUnits = 16;

struct FetchNothing {
    void operator()() {}
};

/// What lies at `at`, if anything is to be added to it, and a sum.
inline F32 joined(F32 sum, const float* at, bool add_to) { return add_to ? add(load(at), sum) : sum; }

/// Each sum joined with what lies at its place. Unrolled, or the sums would go through memory on their way.
template <bool kAddTo, int kHeight, int kWidth>
inline void store_sums(const F32 (&sum)[kHeight][kWidth], float* at, std::ptrdiff_t stride) {
#pragma GCC unroll 16
    for (int r = 0; r < kHeight; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kWidth; ++v) {
            float* const place = at + r * stride + v * kLanes;
            store(place, joined(sum[r][v], place, kAddTo));
        }
}

/// sums[r][c] (+)= the product of kHeight rows of A and the first kWidth vectors of a micro-panel of B, over `depth` units. `fetch()` is called every
/// kFetchUnits of them.
template <int kHeight, int kWidth = kVectors, class Fetch = FetchNothing>
inline void multiply_tile(const PackedRows& a, const std::int32_t* b, std::int64_t depth, float* sums, std::ptrdiff_t stride, bool add_to,
                          Fetch fetch = {}) {
    F32 sum[kHeight][kWidth];
    for (int r = 0; r < kHeight; ++r)
        for (int v = 0; v < kWidth; ++v) sum[r][v] = splat(0.0f);
    const std::int32_t* unit = a.units;
    while (depth > 0) {
        fetch();
        const std::int64_t some = depth < kFetchUnits ? depth : kFetchUnits;
        for (std::int64_t u = 0; u < some; ++u) {
            Units vectors[kWidth];
            for (int v = 0; v < kWidth; ++v) vectors[v] = load_units(b + v * kLanes);
            for (int r = 0; r < kHeight; ++r) {
                const Units factor = splat_unit(unit + r * a.row_stride);
                for (int v = 0; v < kWidth; ++v) sum[r][v] = dot(sum[r][v], factor, vectors[v]);
            }
            unit += a.unit_stride;
            b += kNR;
        }
        depth -= some;
    }
    add_to ? store_sums<true>(sum, sums, stride) : store_sums<false>(sum, sums, stride);  // one question a tile, not one a vector
}

/// `height` rows, at most kHeight, as multiply_tile.
template <int kHeight = kMR, int kWidth = kVectors, class Fetch = FetchNothing>
inline void multiply_last(int height, const PackedRows& a, const std::int32_t* b, std::int64_t depth, float* sums, std::ptrdiff_t stride,
                          bool add_to, Fetch fetch = {}) {
    if (height == kHeight) return multiply_tile<kHeight, kWidth>(a, b, depth, sums, stride, add_to, fetch);
    if constexpr (kHeight > 1) multiply_last<kHeight - 1, kWidth>(height, a, b, depth, sums, stride, add_to, fetch);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
