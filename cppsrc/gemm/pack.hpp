// Packing: an operand is decoded to units while it is laid out as the product reads it. What an operand lacks to whole units and vectors is zero.
#pragma once

#include "gemm/tile.hpp"
#include "gemm/units.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// Elements of the contracted dimension in a vector of units.
constexpr int kRun = kDepth * kLanes;

/// Rows that are fetched ahead of the ones being packed.
constexpr int kAhead = 16;

/// Zeros that stand for elements beyond an operand.
template <class S>
struct Padded {
    S at[kRun] = {};

    Padded() = default;
    Padded(const S* source, std::int64_t count) { std::memcpy(static_cast<void*>(at), source, static_cast<std::size_t>(count) * sizeof(S)); }
};

template <class S>
inline Units units_along(const S* source, std::int64_t count) {
    if (count >= kRun) return units_along(source);
    const Padded<S> padded(source, count);
    return units_along(padded.at);
}

/// Rows that are contiguous in the contracted dimension. Readers of others (coded_rows.hpp) have the same `at`.
template <class S>
struct Rows {
    const S* source;
    std::int64_t stride;

    /// The units of row r from element k, which begins a run, on: of `count` elements, if these are fewer than a run.
    Units at(std::int64_t r, std::int64_t k, std::int64_t count) const { return units_along(source + r * stride + k, count); }
};

/// Rows as they are: out[r][u], `out_stride` (whole vectors) units apart.
template <class Reader>
inline void pack_all_rows(const Reader& source, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t k = 0; k < depth; k += kRun) store_units(out + r * out_stride + k / kDepth, source.at(r, k, depth - k));
}

template <class S>
void pack_rows(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    pack_all_rows(Rows<S>{static_cast<const S*>(source), stride}, rows, depth, out, out_stride);
}

/// A matrix [depth, width] that is contiguous in its width: out[u][j], `out_stride` units apart, in whole vectors.
template <class S>
void pack_across(const void* untyped, std::int64_t stride, std::int64_t depth, std::int64_t width, std::int32_t* out, std::int64_t out_stride) {
    static const Padded<S> zeros;
    const S* source = static_cast<const S*>(untyped);
    for (std::int64_t u = 0; u * kDepth < depth; ++u) {
        const S* first = source + u * kDepth * stride;
        const bool whole = (u + 1) * kDepth <= depth;
        std::int32_t* to = out + u * out_stride;
        std::int64_t j = 0;
        for (; j + kLanes <= width; j += kLanes) {
            // Short pieces of rows far apart: a CPU does not see by itself which comes next.
            for (int d = 0; d < kDepth; ++d) __builtin_prefetch(first + (kAhead + d) * stride + j);
            const S* rows[kDepth];
            for (int d = 0; d < kDepth; ++d) rows[d] = d == 0 || whole ? first + d * stride + j : zeros.at;
            store_units(to + j, units_across(rows));
        }
        if (j == width) continue;
        Padded<S> last[kDepth];
        const S* rows[kDepth];
        for (int d = 0; d < kDepth; ++d) {
            if (d == 0 || whole) last[d] = Padded<S>(first + d * stride + j, width - j);
            rows[d] = last[d].at;
        }
        store_units(to + j, units_across(rows));
    }
}

/// Where the kLanes units from u on of row r lie in an operand that is cut into squares of kLanes rows and units, one square after another along a row.
/// `stride`: units of a row, whole vectors.
inline std::int32_t* in_squares(std::int32_t* out, std::int64_t stride, std::int64_t r, std::int64_t u) {
    return out + r / kLanes * kLanes * stride + u * kLanes + r % kLanes * kLanes;
}

/// The rows that the last squares have more than the operand.
inline void clear_rows_beyond(std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    for (std::int64_t r = rows; r % kLanes != 0; ++r)
        for (std::int64_t k = 0; k < depth; k += kRun) store_units(in_squares(out, out_stride, r, k / kDepth), zero_units());
}

/// Rows in squares.
template <class Reader>
inline void tile_rows(const Reader& source, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t k = 0; k < depth; k += kRun) store_units(in_squares(out, out_stride, r, k / kDepth), source.at(r, k, depth - k));
    clear_rows_beyond(rows, depth, out, out_stride);
}

template <class S>
void pack_tiles(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out, std::int64_t out_stride) {
    tile_rows(Rows<S>{static_cast<const S*>(source), stride}, rows, depth, out, out_stride);
}

/// Columns in squares, of a matrix [depth, width] that is contiguous in its width: across(k, elements, j, some, square) is what it has of `elements` rows
/// from the k-th on and `some` columns from the j-th on, units of depth in rows of kLanes.
template <class Across>
inline void tile_columns(const Across& across, std::int64_t depth, std::int64_t width, std::int32_t* out, std::int64_t out_stride) {
    alignas(64) std::int32_t units[kLanes * kLanes];
    for (std::int64_t k = 0; k < depth; k += kRun) {  // along rows first, whose lines and pages are near
        const std::int64_t elements = depth - k < kRun ? depth - k : kRun;
        for (std::int64_t j = 0; j < width; j += kLanes) {
            const std::int64_t some = width - j < kLanes ? width - j : kLanes;
            across(k, elements, j, some, units);
            Units square[kLanes];
            for (std::int64_t i = 0; i < kLanes; ++i) square[i] = i * kDepth < elements ? load_units(units + i * kLanes) : zero_units();
            transpose_units(square);
            for (std::int64_t i = 0; i < some; ++i) store_units(in_squares(out, out_stride, j + i, k / kDepth), square[i]);
        }
    }
    clear_rows_beyond(width, depth, out, out_stride);
}

/// A matrix [depth, width] that is contiguous in its width, in squares of its columns.
template <class S>
void pack_tiles_down(const void* untyped, std::int64_t stride, std::int64_t depth, std::int64_t width, std::int32_t* out, std::int64_t out_stride) {
    const S* const source = static_cast<const S*>(untyped);
    const auto across = [&](std::int64_t k, std::int64_t elements, std::int64_t j, std::int64_t some, std::int32_t* square) {
        pack_across<S>(source + k * stride + j, stride, elements, some, square, kLanes);
    };
    tile_columns(across, depth, width, out, out_stride);
}

/// A micro-panel of up to kWidth vectors of rows, turned: out[u][r], with zeros for the rows that it lacks.
template <int kWidth = kVectors, class Reader>
inline void turn_rows(const Reader& source, std::int64_t rows, std::int64_t depth, std::int32_t* out) {
    for (std::int64_t k = 0; k < depth; k += kRun) {
        const std::int64_t units = depth - k < kRun ? (depth - k + kDepth - 1) / kDepth : kLanes;
        for (int v = 0; v < kWidth; ++v) {
            Units square[kLanes];
            for (int r = 0; r < kLanes; ++r) {
                const std::int64_t row = v * kLanes + r;
                square[r] = row < rows ? source.at(row, k, depth - k) : zero_units();
            }
            transpose_units(square);
            for (std::int64_t u = 0; u < units; ++u) store_units(out + ((k / kDepth + u) * kWidth + v) * kLanes, square[u]);
        }
    }
}

template <class S>
void pack_turned(const void* source, std::int64_t stride, std::int64_t rows, std::int64_t depth, std::int32_t* out) {
    turn_rows(Rows<S>{static_cast<const S*>(source), stride}, rows, depth, out);
}

}  // namespace
}  // namespace fusible::gemm::FUSIBLE_LEVEL
