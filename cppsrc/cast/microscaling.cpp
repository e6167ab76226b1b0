// MXFP8 (OCP Microscaling Formats specification 1.0, 2023): FP8 in blocks of 32 with an exponent each.
#include <algorithm>
#include <atomic>

#include "cast/cast.hpp"
#include "cast/kernels.hpp"
#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::cast {

namespace {

constexpr std::int64_t kBandCols = 1024;  // of a task

void check_whole_blocks(std::int64_t rows, std::int64_t cols, const char* name) {
    if (rows % kMxBlock == 0 && cols % kMxBlock == 0) return;
    throw ShapeError(expected("rows and columns in multiples of 32", name, std::to_string(rows) + " x " + std::to_string(cols), "pad it with zeros"));
}

/// One exponent for each block, in a matrix that may have more lines and columns.
void check_exponents(const TensorView& view, const char* name, std::int64_t lines, std::int64_t blocks) {
    check_dtype(view, name, size_of(view.dtype) == 1, "uint8 or float8_e8m0fnu");
    if (view.ndim == 2 && view.shape[0] >= lines && view.shape[1] >= blocks) return;
    throw ShapeError(expected("a matrix of at least " + std::to_string(lines) + " x " + std::to_string(blocks), name, view.shape_text(),
                              "pass one exponent for each block"));
}

struct Copy {
    std::uint8_t* codes = nullptr;
    std::uint8_t* exponents = nullptr;
    std::int64_t stride = 0;
};

Copy read_copy(const OptionalView& codes, const char* name, const OptionalView& exponents, const char* exponents_name, DType fp8_dtype,
               std::int64_t count, std::int64_t lines, std::int64_t blocks) {
    if (!codes && !exponents) return {};
    if (!codes || !exponents)
        throw ArgumentError(expected("codes and their exponents", codes ? exponents_name : name, "None", "pass both, or neither"));
    check_codes(*codes, name, fp8_dtype);
    check_numel(*codes, name, count);
    check_exponents(*exponents, exponents_name, lines, blocks);
    return {codes->as<std::uint8_t>(), exponents->as<std::uint8_t>(), exponents->cols()};
}

/// Calls body(first row, first column, columns) for bands of kMxBlock rows.
template <class Body>
void each_band(std::int64_t rows, std::int64_t cols, int threads, const Body& body) {
    const std::int64_t across = (cols + kBandCols - 1) / kBandCols;
    const std::int64_t tasks = across * (rows / kMxBlock);
    parallel_for(static_cast<std::size_t>(tasks), threads, [&](std::size_t task) {
        const std::int64_t col = static_cast<std::int64_t>(task) % across * kBandCols;
        body(static_cast<std::int64_t>(task) / across * kMxBlock, col, static_cast<int>(std::min(kBandCols, cols - col)));
    });
}

}  // namespace

void quantize_mxfp8(const TensorView& src, DType fp8_dtype, const OptionalView& dst, const OptionalView& exponents, const OptionalView& dst_columns,
                    const OptionalView& exponents_columns, bool tiled, int num_threads) {
    const auto kernel = kernels().quantize_mx[table_index(wide_kind(src, "src"))][format_index(code_kind(fp8_dtype))];
    check_threads(num_threads);
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    check_whole_blocks(rows, cols, "src");
    const Copy along_rows = read_copy(dst, "dst", exponents, "exponents", fp8_dtype, src.numel(), rows, cols / kMxBlock);
    const Copy along_columns =
        read_copy(dst_columns, "dst_columns", exponents_columns, "exponents_columns", fp8_dtype, src.numel(), rows / kMxBlock, cols);
    if (along_rows.codes == nullptr && along_columns.codes == nullptr && !dst && !dst_columns)
        throw ArgumentError(expected("a tensor", "dst or dst_columns", "None for both", "pass at least one of them"));
    if (src.numel() == 0) return;
    const auto width = static_cast<std::int64_t>(size_of(src.dtype));
    each_band(rows, cols, threads_for(num_threads, static_cast<std::size_t>(src.numel() * width)), [&](std::int64_t row, std::int64_t col, int count) {
        const std::int64_t at = row * cols + col;
        MxBand band{};
        band.source = src.as<const std::uint8_t>() + at * width;
        band.stride = cols;
        band.cols = count;
        band.tiled = tiled;
        if (along_rows.codes != nullptr) {
            band.codes = along_rows.codes + at;
            band.exponents = along_rows.exponents + row * along_rows.stride + col / kMxBlock;
            band.exponents_stride = along_rows.stride;
        }
        if (along_columns.codes != nullptr) {
            band.column_codes = along_columns.codes + at;
            band.column_exponents = along_columns.exponents + row / kMxBlock * along_columns.stride + col;
        }
        kernel(band);
    });
}

bool dequantize_mxfp8(const TensorView& src, const TensorView& exponents, bool along_rows, const TensorView& dst, DType fp8_dtype, int num_threads) {
    const auto kernel = kernels().dequantize_mx[format_index(code_kind(fp8_dtype))][table_index(wide_kind(dst, "dst"))];
    check_threads(num_threads);
    check_codes(src, "src", fp8_dtype);
    check_numel(dst, "dst", src.numel());
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    check_whole_blocks(rows, cols, "src");
    check_exponents(exponents, "exponents", along_rows ? rows : rows / kMxBlock, along_rows ? cols / kMxBlock : cols);
    if (src.numel() == 0) return true;
    const auto width = static_cast<std::int64_t>(size_of(dst.dtype));
    const std::int64_t stride = exponents.cols();
    std::atomic<bool> plain{true};
    each_band(rows, cols, threads_for(num_threads, static_cast<std::size_t>(src.numel() * width)), [&](std::int64_t row, std::int64_t col, int count) {
        const std::int64_t at = row * cols + col;
        const std::int64_t exponent = along_rows ? row * stride + col / kMxBlock : row / kMxBlock * stride + col;
        const MxCodes band{src.as<const std::uint8_t>() + at, cols, kMxBlock, count, exponents.as<const std::uint8_t>() + exponent, stride, along_rows};
        if (!kernel(band, dst.as<std::uint8_t>() + at * width)) plain.store(false, std::memory_order_relaxed);
    });
    return plain.load();
}

}  // namespace fusible::cast
