// amax, sums of columns, dequantize and the transpose of bytes: one input, one output.
#include <algorithm>

#include "cast/bands.hpp"
#include "cast/cast.hpp"
#include "cast/column_sums.hpp"
#include "cast/kernels.hpp"
#include "cast/maximum.hpp"
#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::cast {

namespace {

constexpr std::int64_t kRun = 16 * 1024;

std::size_t tasks_of(std::int64_t count) { return static_cast<std::size_t>((count + kRun - 1) / kRun); }

void check_one_byte(const TensorView& tensor, const char* name) {
    check_dtype(tensor, name, size_of(tensor.dtype) == 1, "a dtype of one byte");
}

/// A tile at the edge of the matrix, element by element.
void transpose_edge(const std::uint8_t* source, std::int64_t cols, std::uint8_t* out, std::int64_t rows, std::int64_t height, std::int64_t width) {
    for (std::int64_t c = 0; c < width; ++c)
        for (std::int64_t r = 0; r < height; ++r) out[c * rows + r] = source[r * cols + c];
}

}  // namespace

float amax(const TensorView& src, const OptionalView& out, int num_threads) {
    const auto kernel = kernels().amax[table_index(wide_kind(src, "src"))];
    check_threads(num_threads);
    if (out) check_float32(*out, "out", 1);
    const std::int64_t count = src.numel();
    const auto width = static_cast<std::int64_t>(size_of(src.dtype));
    const auto* source = src.as<const std::uint8_t>();
    Maximum maximum;
    parallel_for(tasks_of(count), threads_for(num_threads, static_cast<std::size_t>(count * width)), [&](std::size_t task) {
        const auto begin = static_cast<std::int64_t>(task) * kRun;
        maximum.raise(kernel(source + begin * width, static_cast<std::size_t>(std::min(kRun, count - begin))));
    });
    if (out) *out->as<float>() = maximum.value();
    return maximum.value();
}

void dequantize(const TensorView& src, const TensorView& dst, Scalar scale_inv, DType fp8_dtype, int num_threads) {
    const auto kernel = kernels().dequantize[format_index(code_kind(fp8_dtype))][table_index(wide_kind(dst, "dst"))];
    check_threads(num_threads);
    check_codes(src, "src", fp8_dtype);
    check_numel(dst, "dst", src.numel());
    const std::int64_t count = src.numel();
    const auto width = static_cast<std::int64_t>(size_of(dst.dtype));
    auto* out = dst.as<std::uint8_t>();
    parallel_for(tasks_of(count), threads_for(num_threads, static_cast<std::size_t>(count * width)), [&](std::size_t task) {
        const auto begin = static_cast<std::int64_t>(task) * kRun;
        const auto length = static_cast<std::size_t>(std::min(kRun, count - begin));
        kernel(src.as<const std::uint8_t>() + begin, out + begin * width, length, scale_inv.value);
    });
}

void column_sums(const TensorView& src, const TensorView& dst, int num_threads) {
    const auto kernel = kernels().add_columns[table_index(wide_kind(src, "src"))];
    check_threads(num_threads);
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    check_float32(dst, "dst", cols);
    check_elsewhere(dst, "dst", src, "src");
    ColumnSums sums(rows, cols);
    const std::int64_t chunk = ColumnSums::rows_per_chunk(rows);
    const auto width = static_cast<std::int64_t>(size_of(src.dtype));
    const int threads = threads_for(num_threads, static_cast<std::size_t>(src.numel() * width));
    each_band(chunk, rows, cols, threads, [&](std::int64_t row, std::int64_t col, int height, int count) {
        kernel(src.as<const std::uint8_t>() + (row * cols + col) * width, cols, height, count, sums.chunk(row / chunk) + col);
    });
    sums.total(dst.as<float>());
}

void transpose_bytes(const TensorView& src, const TensorView& dst, int num_threads) {
    check_threads(num_threads);
    check_one_byte(src, "src");
    check_one_byte(dst, "dst");
    check_numel(dst, "dst", src.numel());
    check_elsewhere(dst, "dst", src, "src");
    const auto kernel = kernels().transpose_tile;
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    const auto* source = src.as<const std::uint8_t>();
    auto* out = dst.as<std::uint8_t>();
    const std::int64_t across = (cols + kTile - 1) / kTile;
    const std::int64_t tasks = across * ((rows + kTile - 1) / kTile);
    parallel_for(static_cast<std::size_t>(tasks), threads_for(num_threads, static_cast<std::size_t>(src.numel())), [&](std::size_t task) {
        const std::int64_t r = static_cast<std::int64_t>(task) / across * kTile;
        const std::int64_t c = static_cast<std::int64_t>(task) % across * kTile;
        const std::int64_t height = std::min<std::int64_t>(kTile, rows - r);
        const std::int64_t width = std::min<std::int64_t>(kTile, cols - c);
        const auto* from = source + r * cols + c;
        auto* to = out + c * rows + r;
        if (height == kTile && width == kTile)
            kernel(from, cols, to, rows);
        else
            transpose_edge(from, cols, to, rows, height, width);
    });
}

}  // namespace fusible::cast
