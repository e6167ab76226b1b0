// FP8 with fp32 scales (DeepSeek-AI 2024, arXiv:2412.19437): blocks of 128 along a line, or squares of 128 x 128.
#include <atomic>

#include "cast/bands.hpp"
#include "cast/cast.hpp"
#include "cast/kernels.hpp"

namespace fusible::cast {

namespace {

std::int64_t blocks_in(std::int64_t count) { return (count + kScaledBlock - 1) / kScaledBlock; }

}  // namespace

void quantize_block_fp8(const TensorView& src, DType fp8_dtype, const OptionalView& dst, const OptionalView& scales, const OptionalView& dst_columns,
                        const OptionalView& scales_columns, bool tiled, float epsilon, bool power_of_two, int num_threads) {
    const auto kernel = kernels().quantize_blocks[table_index(wide_kind(src, "src"))][format_index(code_kind(fp8_dtype))];
    check_threads(num_threads);
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    const auto along_rows = read_copy<float>(dst, "dst", scales, "scale_inv", fp8_dtype, src.numel(), tiled ? blocks_in(rows) : blocks_in(cols),
                                             tiled ? blocks_in(cols) : rows);
    const auto along_columns = read_copy<float>(dst_columns, "dst_columns", scales_columns, "scale_inv_columns", fp8_dtype, src.numel(),
                                                tiled ? blocks_in(cols) : blocks_in(rows), tiled ? blocks_in(rows) : cols);
    check_any_copy(dst, dst_columns);
    if (src.numel() == 0) return;
    const auto width = static_cast<std::int64_t>(size_of(src.dtype));
    const int threads = threads_for(num_threads, static_cast<std::size_t>(src.numel() * width));
    each_band(kScaledBlock, rows, cols, threads, [&](std::int64_t row, std::int64_t col, int height, int count) {
        const std::int64_t above = row / kScaledBlock;
        const std::int64_t before = col / kScaledBlock;
        ScaledBand band{};
        band.source = src.as<const std::uint8_t>() + (row * cols + col) * width;
        band.stride = cols;
        band.rows = height;
        band.cols = count;
        band.epsilon = epsilon;
        band.power_of_two = power_of_two;
        band.tiled = tiled;
        if (along_rows.codes != nullptr) {
            band.codes = along_rows.codes + row * cols + col;
            band.scales = along_rows.scales + (tiled ? above * along_rows.stride + before : before * along_rows.stride + row);
            band.scales_step = tiled ? 1 : along_rows.stride;
        }
        if (along_columns.codes != nullptr) {
            band.column_codes = along_columns.codes + col * rows + row;
            band.column_stride = rows;
            band.column_scales = along_columns.scales + (tiled ? before * along_columns.stride + above : above * along_columns.stride + col);
            band.column_scales_step = tiled ? along_columns.stride : kScaledBlock;
        }
        kernel(band);
    });
}

bool dequantize_block_fp8(const TensorView& src, const TensorView& scales, bool tiled, const TensorView& dst, DType fp8_dtype, int num_threads) {
    const auto kernel = kernels().dequantize_blocks[format_index(code_kind(fp8_dtype))][table_index(wide_kind(dst, "dst"))];
    check_threads(num_threads);
    check_codes(src, "src", fp8_dtype);
    check_numel(dst, "dst", src.numel());
    const std::int64_t lines = src.rows();
    const std::int64_t length = src.cols();
    check_scales<float>(scales, "scale_inv", tiled ? blocks_in(lines) : blocks_in(length), tiled ? blocks_in(length) : lines);
    if (src.numel() == 0) return true;
    const auto width = static_cast<std::int64_t>(size_of(dst.dtype));
    const int threads = threads_for(num_threads, static_cast<std::size_t>(src.numel() * width));
    const std::int64_t stride = scales.cols();
    std::atomic<bool> plain{true};
    each_band(kScaledBlock, lines, length, threads, [&](std::int64_t line, std::int64_t begin, int height, int count) {
        const std::int64_t before = begin / kScaledBlock;
        const std::int64_t at = line * length + begin;
        const float* first = scales.as<const float>() + (tiled ? line / kScaledBlock * stride + before : before * stride + line);
        const ScaledCodes band{src.as<const std::uint8_t>() + at, length, height, count, first, tiled ? 0 : 1, tiled ? 1 : stride};
        if (!kernel(band, dst.as<std::uint8_t>() + at * width)) plain.store(false, std::memory_order_relaxed);
    });
    return plain.load();
}

}  // namespace fusible::cast
