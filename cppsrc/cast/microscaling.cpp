// MXFP8 (OCP Microscaling Formats specification 1.0, 2023): FP8 in blocks of 32 with an exponent each.
#include <atomic>

#include "cast/bands.hpp"
#include "cast/cast.hpp"
#include "cast/kernels.hpp"

namespace fusible::cast {

namespace {

void check_whole_blocks(std::int64_t rows, std::int64_t cols, const char* name) {
    if (rows % kMxBlock == 0 && cols % kMxBlock == 0) return;
    throw ShapeError(expected("rows and columns in multiples of 32", name, std::to_string(rows) + " x " + std::to_string(cols), "pad it with zeros"));
}

}  // namespace

void quantize_mxfp8(const TensorView& src, DType fp8_dtype, const OptionalView& dst, const OptionalView& exponents, const OptionalView& dst_columns,
                    const OptionalView& exponents_columns, bool tiled, int num_threads) {
    const auto kernel = kernels().quantize_mx[table_index(wide_kind(src, "src"))][format_index(code_kind(fp8_dtype))];
    check_threads(num_threads);
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    check_whole_blocks(rows, cols, "src");
    const auto along_rows = read_copy<std::uint8_t>(dst, "dst", exponents, "exponents", fp8_dtype, src.numel(), rows, cols / kMxBlock);
    const auto along_columns =
        read_copy<std::uint8_t>(dst_columns, "dst_columns", exponents_columns, "exponents_columns", fp8_dtype, src.numel(), rows / kMxBlock, cols);
    check_any_copy(dst, dst_columns);
    if (src.numel() == 0) return;
    const auto width = static_cast<std::int64_t>(size_of(src.dtype));
    const int threads = threads_for(num_threads, static_cast<std::size_t>(src.numel() * width));
    each_band<kMxBandCols>(kMxBlock, rows, cols, threads, [&](std::int64_t row, std::int64_t col, int, int count) {
        const std::int64_t at = row * cols + col;
        MxBand band{};
        band.source = src.as<const std::uint8_t>() + at * width;
        band.stride = cols;
        band.cols = count;
        band.tiled = tiled;
        if (along_rows.codes != nullptr) {
            band.codes = along_rows.codes + at;
            band.exponents = along_rows.scales + row * along_rows.stride + col / kMxBlock;
            band.exponents_stride = along_rows.stride;
        }
        if (along_columns.codes != nullptr) {
            band.column_codes = along_columns.codes + at;
            band.column_exponents = along_columns.scales + row / kMxBlock * along_columns.stride + col;
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
    check_scales<std::uint8_t>(exponents, "exponents", along_rows ? rows : rows / kMxBlock, along_rows ? cols / kMxBlock : cols);
    if (src.numel() == 0) return true;
    const auto width = static_cast<std::int64_t>(size_of(dst.dtype));
    const std::int64_t stride = exponents.cols();
    std::atomic<bool> plain{true};
    const int threads = threads_for(num_threads, static_cast<std::size_t>(src.numel() * width));
    each_band(kMxBlock, rows, cols, threads, [&](std::int64_t row, std::int64_t col, int, int count) {
        const std::int64_t at = row * cols + col;
        const std::int64_t exponent = along_rows ? row * stride + col / kMxBlock : row / kMxBlock * stride + col;
        const MxCodes band{src.as<const std::uint8_t>() + at, cols, kMxBlock, count, exponents.as<const std::uint8_t>() + exponent, stride, along_rows};
        if (!kernel(band, dst.as<std::uint8_t>() + at * width)) plain.store(false, std::memory_order_relaxed);
    });
    return plain.load();
}

}  // namespace fusible::cast
