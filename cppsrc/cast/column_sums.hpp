// Sums over the rows of a matrix, made by tasks of several rows each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cast/kernels.hpp"

namespace fusible::cast {

/// One partial sum a chunk of rows, added up in the order of the chunks: a total does not depend on the threads.
///
/// Chunks are whole tiles, and few enough that the partial sums of each fit in memory.
class ColumnSums {
  public:
    ColumnSums(std::int64_t rows, std::int64_t cols) : ColumnSums(rows, cols, rows_per_chunk(rows)) {}

    /// With chunks of `chunk_rows` rows, which must not depend on the threads.
    ColumnSums(std::int64_t rows, std::int64_t cols, std::int64_t chunk_rows)
        : chunks_((rows + chunk_rows - 1) / chunk_rows), cols_(cols), partials_(static_cast<std::size_t>(chunks_ * cols), 0.0f) {}

    static std::int64_t rows_per_chunk(std::int64_t rows) {
        constexpr std::int64_t kMaxPartials = 64;
        const std::int64_t tiles = (rows + kTile - 1) / kTile;
        return kTile * std::max<std::int64_t>(1, (tiles + kMaxPartials - 1) / kMaxPartials);
    }

    std::int64_t chunks() const { return chunks_; }

    float* chunk(std::int64_t index) { return partials_.data() + index * cols_; }

    void total(float* out) const {
        std::fill(out, out + cols_, 0.0f);
        for (std::int64_t p = 0; p < chunks(); ++p)
            for (std::int64_t c = 0; c < cols_; ++c) out[c] += partials_[static_cast<std::size_t>(p * cols_ + c)];
    }

  private:
    std::int64_t chunks_;
    std::int64_t cols_;
    std::vector<float> partials_;
};

}  // namespace fusible::cast
