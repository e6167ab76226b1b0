// The products within a tile of attention, of some rows of a packed left operand and a packed panel: by the micro-kernel of the level, or by AMX.
#pragma once

#include "attention/probabilities.hpp"
#include "gemm/amx_tiles.hpp"
#include "gemm/tile.hpp"

namespace fusible::attention::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace gemm::FUSIBLE_LEVEL;

/// Units [begin, end) of the contracted dimension.
struct UnitSpan {
    std::int64_t begin;
    std::int64_t end;
};

/// The units that hold elements.
inline UnitSpan units_of(Span elements) { return {elements.begin / kDepth, (elements.end + kDepth - 1) / kDepth}; }

#if defined(__AMX_BF16__)

static_assert(kOperandRows == kTileRows);
constexpr int kGroupRows = 2 * kTileRows;           // rows that go through a product together
constexpr int kWholeRun = static_cast<int>(kTileUnits) * kDepth;  // elements of the contracted dimension of which the left operand has all, or zeros

constexpr int kVectorRows = 4;  // of so few, products are made faster by vectors

/// Products are made between these two. (No object does it: the way out of an exception would be code that levels share.)
inline void begin_products() { configure_tiles(); }
inline void end_products() { _tile_release(); }

/// A panel of `units` units, which others follow that are not its own.
class Panel {
  public:
    Panel(const std::int32_t* at, std::int64_t units) : at_(at), units_(units) {
        if (units % kTileUnits != 0) padded_.fill(at, units, 2);
    }

    /// sums[r][c] (+)= the product over the units of a span, widened to whole tiles. The left operand has memory for whole tiles of rows.
    void multiply(int height, const PackedRows& left, UnitSpan span, float* sums, std::ptrdiff_t stride, bool add_to) const {
        if (height <= kVectorRows) {
            const PackedRows part{left.units + span.begin, left.row_stride, 1};
            return multiply_last<kVectorRows>(height, part, at_ + span.begin * kNR, span.end - span.begin, sums, stride, add_to);
        }
        const std::int64_t begin = span.begin / kTileUnits * kTileUnits;
        const std::int64_t end = (span.end + kTileUnits - 1) / kTileUnits * kTileUnits;
        const std::int64_t units = (end < units_ ? end : units_) - begin;
        const auto rows = TileRows::as_rows(left.units + begin, left.row_stride);
        const std::int32_t* const b = at_ + begin * kNR;
        if (height == 2 * kTileRows) return multiply_tiles<2, 2>(rows, b, units, padded_.at, sums, stride, add_to);
        if (height == kTileRows) return multiply_tiles<1, 2>(rows, b, units, padded_.at, sums, stride, add_to);
        alignas(64) float own[kGroupRows * kNR];
        if (height > kTileRows)
            multiply_tiles<2, 2>(rows, b, units, padded_.at, own, kNR, false);
        else
            multiply_tiles<1, 2>(rows, b, units, padded_.at, own, kNR, false);
        for (int r = 0; r < height; ++r)
            for (int v = 0; v < kNR; v += kLanes) {
                float* const at = sums + r * stride + v;
                store(at, joined(load(own + r * kNR + v), at, add_to));
            }
    }

  private:
    const std::int32_t* at_;
    std::int64_t units_;
    PaddedUnits padded_;
};

/// The left operand whose `rows` rows are the columns of `across`, [units, stride]: their transpose, in `room`, [rows, kTurnedStride].
constexpr std::ptrdiff_t kTurnedStride = kGradKeys / kDepth + kTileUnits;
static_assert(kGradRows * kTurnedStride <= kGradKeys * kGradStride);

inline PackedRows as_left(const std::int32_t* across, std::ptrdiff_t stride, std::int64_t units, int rows, float* room) {
    auto* const turned = reinterpret_cast<std::int32_t*>(room);
    for (int r = 0; r < rows; r += kLanes)
        for (std::int64_t u = 0; u < units; u += kLanes) {
            Units square[kLanes];
            for (int i = 0; i < kLanes; ++i) square[i] = u + i < units ? load_units(across + (u + i) * stride + r) : zero_units();
            transpose_units(square);
            for (int i = 0; i < kLanes; ++i) store_units(turned + (r + i) * kTurnedStride + u, square[i]);
        }
    return {turned, kTurnedStride, 1};
}

#else

constexpr int kGroupRows = kMR;
constexpr int kWholeRun = kLanes;

inline void begin_products() {}
inline void end_products() {}

class Panel {
  public:
    Panel(const std::int32_t* at, std::int64_t) : at_(at) {}

    void multiply(int height, const PackedRows& left, UnitSpan span, float* sums, std::ptrdiff_t stride, bool add_to) const {
        const PackedRows part{left.units + span.begin * left.unit_stride, left.row_stride, left.unit_stride};
        multiply_last(height, part, at_ + span.begin * kNR, span.end - span.begin, sums, stride, add_to);
    }

  private:
    const std::int32_t* at_;
};

inline PackedRows as_left(const std::int32_t* across, std::ptrdiff_t stride, std::int64_t, int, float*) { return {across, 1, stride}; }

#endif

}  // namespace
}  // namespace fusible::attention::FUSIBLE_LEVEL
