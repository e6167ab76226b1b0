// The kernels of LayerNorm and RMSNorm as a table of functions, one table a level. Plain data.
#pragma once

#include "cast/kernels.hpp"
#include "cast/output.hpp"
#include "runtime/tables.hpp"

namespace fusible::norm {

/// Index of a norm: LayerNorm, RMSNorm.
constexpr int kNorms = 2;

/// y = (x - mu) rsigma gamma + beta, for matrices [rows, cols]; RMSNorm has neither mu nor beta.
struct NormForward {
    const void* x;
    const float* gamma;  // [cols], the 1 of zero-centred parameters added already
    const float* beta;
    double eps;
    float* mu;      // [rows], written
    float* rsigma;  // [rows], written
    cast::Output out;
};

/// dx = rsigma (dy - mean(dy) - xh mean(dy xh)) + add, with xh = (x - mu) rsigma and dy = dz gamma; RMSNorm lacks mu and mean(dy).
struct NormBackward {
    const void* dz;
    const void* x;
    const void* add;  // or null
    ElementKind add_kind;
    const float* mu;
    const float* rsigma;
    const float* gamma;
    void* dx;  // of the type of x
    std::int64_t cols;
};

/// Rows are those in [begin, end). `forward` returns the bits of max |y| where codes are written.
struct Kernels {
    std::int32_t (*forward[kNorms][kWideKinds])(const NormForward& job, std::int64_t begin, std::int64_t end);
    /// The same with a transposed copy, for at most cast::kTile rows.
    std::int32_t (*forward_transposed[kNorms][kWideKinds])(const NormForward& job, std::int64_t begin, std::int64_t end);
    /// By the types of x and of dz. Adds sum dz xh into sums[0, cols) and, of LayerNorm, sum dz into sums[cols, 2 cols).
    void (*backward[kNorms][kWideKinds][kWideKinds])(const NormBackward& job, std::int64_t begin, std::int64_t end, float* sums);
    /// out[i] = source[offset + i] + plus.
    void (*widen)(ElementKind kind, const void* source, std::int64_t offset, std::int64_t count, float plus, float* out);
    std::int32_t (*emit)(const cast::Output& out, const float* values, std::int64_t offset, std::int64_t count);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::norm
