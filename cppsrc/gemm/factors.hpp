// Factors of sums: where a scale is not part of packed values, the sum of the products of its block is multiplied by it, in float.
#pragma once

#include "gemm/kernels.hpp"
#include "simd/math.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Those of a block's columns, and, kOfRows, of its rows: a sum is multiplied by the product of both.
template <bool kOfRows>
struct SumFactors {
    const float* columns;
    const float* rows;

    /// The i-th block's, of the micro-panel of `nr` columns that begins at `panel`: of its columns, and of the rows from the r-th on.
    static SumFactors at(const Block& block, const std::int32_t* panel, int nr, std::int64_t i, int r) {
        return {reinterpret_cast<const float*>(panel + (block.kc + i) * nr), kOfRows ? block.row_factors + i * block.rows + r : nullptr};
    }

    /// `to`, and a sum of the r-th of the rows and of a vector of columns from the c-th on, in one rounding; and one before of the product of factors.
    F32 added(F32 to, F32 sum, int r, int c) const {
        const F32 factor = load(columns + c);
        return fma(sum, kOfRows ? mul(factor, splat(rows[r])) : factor, to);
    }
};

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
