#include <algorithm>

#include "cast/column_sums.hpp"
#include "norm/norm.hpp"
#include "norm/parameters.hpp"
#include "runtime/threads.hpp"

namespace fusible::norm {

namespace {

void check(const TensorView& dz, const TensorView& x, const OptionalView& mu, const TensorView& rsigma, const TensorView& weight,
           const TensorView& dx, const TensorView& dgamma, const OptionalView& dbeta, const OptionalView& add, int num_threads) {
    check_threads(num_threads);
    check_numel(dz, "dz", x.numel());
    check_parameter(weight, "weight", x.cols());
    check_dtype(dx, "dx", dx.dtype == x.dtype, name_of(x.dtype));
    check_numel(dx, "dx", x.numel());
    check_parameter(dgamma, "dgamma", x.cols());
    if (mu.has_value() != dbeta.has_value())
        throw ArgumentError(expected("mu and dbeta, or neither", "a norm", "one of them", "pass both for LayerNorm, neither for RMSNorm"));
    if (dbeta) check_parameter(*dbeta, "dbeta", x.cols());
    if (mu) check_float32(*mu, "mu", x.rows());
    check_float32(rsigma, "rsigma", x.rows());
    if (!add) return;
    wide_kind(*add, "add");
    check_numel(*add, "add", x.numel());
}

/// Sums over rows made in three levels: tiles, chunks, all. So the error of many rows stays that of few.
class RowSums {
  public:
    RowSums(std::int64_t rows, std::int64_t width) : width_(width), chunks_(rows, width), tiles_(one_tile(rows) ? 0 : rows, width) {}

    const cast::ColumnSums& chunks() const { return chunks_; }

    /// Calls fill(sums) for a tile of a chunk, which adds to sums[width].
    template <class Fill>
    void add_tile(std::int64_t chunk, const Fill& fill) {
        float* const sums = chunks_.chunk(chunk);
        if (tiles_.chunks() == 0) return fill(sums);
        float* const tile = tiles_.chunk(chunk);
        std::fill(tile, tile + width_, 0.0f);
        fill(tile);
        for (std::int64_t c = 0; c < width_; ++c) sums[c] += tile[c];
    }

  private:
    static bool one_tile(std::int64_t rows) { return cast::ColumnSums::rows_per_chunk(rows) == cast::kTile; }

    std::int64_t width_;
    cast::ColumnSums chunks_;
    cast::ColumnSums tiles_;
};

void write_total(const TensorView& out, const char* name, const float* values) {
    const std::int64_t cols = out.numel();
    kernels().emit(cast::Output{wide_kind(out, name), out.data, nullptr, 1, cols, 1.0f}, values, 0, cols);
}

}  // namespace

void norm_bwd(const TensorView& dz, const TensorView& x, const OptionalView& mu, const TensorView& rsigma, const TensorView& weight,
              bool zero_centered_gamma, const TensorView& dx, const TensorView& dgamma, const OptionalView& dbeta, const OptionalView& add,
              int num_threads) {
    const auto kernel = kernels().backward[norm_index(mu.has_value())][table_index(wide_kind(x, "x"))][table_index(wide_kind(dz, "dz"))];
    check(dz, x, mu, rsigma, weight, dx, dgamma, dbeta, add, num_threads);
    const std::int64_t rows = x.rows();
    const std::int64_t cols = x.cols();
    const std::vector<float> gamma = widened(weight, zero_centered_gamma ? 1.0f : 0.0f);
    const NormBackward job{dz.data,
                           x.data,
                           add ? add->data : nullptr,
                           add ? wide_kind(*add, "add") : ElementKind::Float32,
                           mu ? mu->as<const float>() : nullptr,
                           rsigma.as<const float>(),
                           gamma.data(),
                           dx.data,
                           cols};
    const std::int64_t width = mu ? 2 * cols : cols;
    RowSums sums(rows, width);
    const std::int64_t chunk = cast::ColumnSums::rows_per_chunk(rows);
    const auto bytes = 2 * static_cast<std::size_t>(x.numel()) * size_of(x.dtype);
    parallel_for(static_cast<std::size_t>(sums.chunks().chunks()), threads_for(num_threads, bytes), [&](std::size_t task) {
        const auto index = static_cast<std::int64_t>(task);
        const std::int64_t end = std::min(rows, (index + 1) * chunk);
        for (std::int64_t row = index * chunk; row < end; row += cast::kTile)
            sums.add_tile(index, [&](float* into) { kernel(job, row, std::min(end, row + cast::kTile), into); });
    });
    std::vector<float> totals(static_cast<std::size_t>(width));
    sums.chunks().total(totals.data());
    write_total(dgamma, "dgamma", totals.data());
    if (dbeta) write_total(*dbeta, "dbeta", totals.data() + cols);
}

}  // namespace fusible::norm
