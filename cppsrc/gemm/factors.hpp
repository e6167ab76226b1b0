// Factors of sums: where a scale is not part of packed values, the sum of the products of its block is multiplied by it, in float.
#pragma once

#include "gemm/kernels.hpp"
#include "gemm/tile.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

/// Those of the columns of a micro-panel for the block that its u-th unit begins; null where there are none.
[[maybe_unused]] inline const float* factors_at(const Block& block, const std::int32_t* panel, std::int64_t u) {
    if (block.factor_units == 0) return nullptr;
    return reinterpret_cast<const float*>(panel + (block.kc + u / block.factor_units) * kNR);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
