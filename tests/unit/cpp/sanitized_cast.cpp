// Every cast, at the edges of its tiles and vectors.
#include "cast/cast.hpp"
#include "sanitized.hpp"

namespace fusible::cast {

namespace {

void exercise(std::int64_t rows, std::int64_t cols, DType wide, DType fp8, int threads) {
    const Buffer x(wide, rows, cols), codes(DType::Byte, rows, cols), turned(DType::Byte, cols, rows), sums(DType::Float32, 1, cols);
    const Buffer largest(DType::Float32, 1, 1), back(wide, rows, cols);
    for (const float scale : {1.5f, 0.0f}) {
        quantize(x.view, codes.view, Scalar{scale}, fp8, {}, largest.view, false, {}, {}, threads);
        quantize(x.view, codes.view, Scalar{scale}, fp8, turned.view, {}, false, sums.view, {}, threads);
        quantize(x.view, {}, Scalar{scale}, fp8, turned.view, largest.view, true, {}, {}, threads);
    }
    for (const bool tiled : {false, true}) {
        const std::int64_t row_blocks = (rows + 127) / 128, column_blocks = (cols + 127) / 128;
        const Buffer scales(DType::Float32, tiled ? row_blocks : column_blocks, tiled ? column_blocks : rows);
        const Buffer of_columns(DType::Float32, tiled ? column_blocks : row_blocks, tiled ? row_blocks : cols);
        quantize_block_fp8(x.view, fp8, codes.view, scales.view, turned.view, of_columns.view, tiled, 0.5f, tiled, threads);
        quantize_block_fp8(x.view, fp8, codes.view, scales.view, {}, {}, tiled, 0.0f, !tiled, threads);
        quantize_block_fp8(x.view, fp8, {}, {}, turned.view, of_columns.view, tiled, 0.0f, true, threads);
        dequantize_block_fp8(codes.view, scales.view, tiled, back.view, fp8, threads);
    }
    amax(x.view, largest.view, threads);
    column_sums(x.view, sums.view, threads);
    transpose_bytes(codes.view, turned.view, threads);
    dequantize(codes.view, back.view, Scalar{0.5f}, fp8, threads);
}

const Drive driver([] {
    for (const std::int64_t rows : {0, 1, 16, 63, 64, 65, 130})
        for (const std::int64_t cols : {0, 1, 15, 33, 64, 127, 256, 321})
            for (const DType wide : {DType::Float32, DType::Float16, DType::BFloat16})
                for (const DType fp8 : {DType::Float8E4M3, DType::Float8E5M2}) exercise(rows, cols, wide, fp8, 2);
});

}  // namespace

}  // namespace fusible::cast
