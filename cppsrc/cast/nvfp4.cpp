// NVFP4 (NVIDIA 2025, arXiv:2509.25149): E2M1 in blocks of 16 with an E4M3 scale each, and one amax for all.
#include <algorithm>
#include <cmath>

#include "cast/bands.hpp"
#include "cast/cast.hpp"
#include "cast/kernels.hpp"
#include "cast/maximum.hpp"
#include "runtime/checks.hpp"
#include "runtime/random_words.hpp"
#include "runtime/threads.hpp"

namespace fusible::cast {

namespace {

constexpr float kLargestOfAll = 448.0f * 6.0f;
constexpr float kLargest = 3.40282347e+38f;

void check_whole_blocks(std::int64_t rows, std::int64_t cols, const char* name) {
    if (rows % kFp4Block == 0 && cols % kFp4Block == 0) return;
    throw ShapeError(expected("rows and columns in multiples of 16", name, std::to_string(rows) + " x " + std::to_string(cols), "pad it with zeros"));
}

void check_packed(const TensorView& view, const char* name, std::int64_t count) {
    check_dtype(view, name, size_of(view.dtype) == 1, "uint8");
    check_numel(view, name, count / 2);
}

/// One E4M3 byte for each block of a line.
void check_scales_of_lines(const TensorView& view, std::int64_t lines, std::int64_t length) {
    check_scales<std::uint8_t>(view, "scale_bytes", lines, length / kFp4Block, "uint8 or float8_e4m3fn");
}

/// What takes the amax to the largest number of both formats together; 1 where it is 0 or infinite.
float scale_of(float amax) {
    const float scale = kLargestOfAll / amax;
    if (amax == 0.0f || scale == 0.0f) return 1.0f;
    return scale > kLargest ? kLargest : scale;
}

/// Calls body(row, column, rows, columns) for the parts of a matrix.
template <class Body>
void each_part(const TensorView& src, int num_threads, const Body& body) {
    const std::size_t bytes = static_cast<std::size_t>(src.numel()) * size_of(src.dtype);
    each_band<kFp4PartCols>(kFp4PartRows, src.rows(), src.cols(), threads_for(num_threads, bytes), body);
}

Fp4Part part_at(const TensorView& src, std::int64_t row, std::int64_t col, int rows, int cols) {
    Fp4Part part{};
    part.source = src.as<const std::uint8_t>() + (row * src.cols() + col) * static_cast<std::int64_t>(size_of(src.dtype));
    part.stride = src.cols();
    part.rows = rows;
    part.cols = cols;
    return part;
}

bool is_odd(std::int64_t bits) {
    bool odd = false;
    for (; bits != 0; bits &= bits - 1) odd = !odd;
    return odd;
}

/// The transform by a matrix, which is copied: what is written may lie where it does.
Fp4Transform transform_by(const float* matrix) {
    Fp4Transform transform{};
    transform.by_pairs = true;
    for (std::int64_t j = 0; j < kFp4Block; ++j) {
        const float first = matrix[j * kFp4Block];
        for (std::int64_t i = 0; i < kFp4Block; ++i) {
            const float entry = matrix[j * kFp4Block + i];
            transform.entries[j][i] = entry;
            transform.by_pairs = transform.by_pairs && std::fabs(first) == 0.25f && entry == (is_odd(i & j) ? -first : first);
        }
    }
    return transform;
}

std::uint64_t read_key(const OptionalView& seed) {
    if (!seed) return 0;
    check_dtype(*seed, "seed", seed->dtype == DType::Int64, "int64");
    check_numel(*seed, "seed", 1);
    return key_of_seed(*seed->as<const std::uint64_t>());
}

}  // namespace

void quantize_nvfp4(const TensorView& src, Scalar amax, const TensorView& dst, const TensorView& scales, bool columns, bool tiled,
                    const OptionalView& seed, int num_threads) {
    const auto kernel = kernels().quantize_fp4[columns ? 1 : 0][table_index(wide_kind(src, "src"))];
    check_threads(num_threads);
    const std::int64_t rows = src.rows();
    const std::int64_t cols = src.cols();
    check_whole_blocks(rows, cols, "src");
    check_packed(dst, "dst", src.numel());
    const std::int64_t lines = columns ? cols : rows;
    const std::int64_t length = columns ? rows : cols;
    check_scales_of_lines(scales, lines, length);
    const std::uint64_t key = read_key(seed);
    if (src.numel() == 0) return;
    const float scale = scale_of(amax.value);
    const std::int64_t scales_stride = scales.cols();
    each_part(src, num_threads, [&](std::int64_t row, std::int64_t col, int count, int width) {
        const std::int64_t line = columns ? col : row;
        const std::int64_t at = columns ? row : col;
        Fp4Part part = part_at(src, row, col, count, width);
        part.codes = dst.as<std::uint8_t>() + (line * length + at) / 2;
        part.codes_stride = length / 2;
        part.scales = scales.as<std::uint8_t>() + line * scales_stride + at / kFp4Block;
        part.scales_stride = scales_stride;
        part.from_amax = scale * static_cast<float>(1.0 / 6.0);
        part.from_scale = 1.0f / scale;
        part.tiled = tiled;
        part.key = key;
        part.counter = static_cast<std::uint64_t>(line * length + at);
        part.line_counters = static_cast<std::uint64_t>(length);
        kernel(part);
    });
}

float transform_columns(const TensorView& src, const TensorView& transform, const TensorView& dst, const OptionalView& out,
                        const OptionalView& source_amax, int num_threads) {
    const auto kernel = kernels().transform_columns[table_index(wide_kind(src, "src"))];
    check_threads(num_threads);
    check_whole_blocks(src.rows(), src.cols(), "src");
    check_float32(transform, "transform", kFp4Block * kFp4Block);
    check_dtype(dst, "dst", dst.dtype == DType::BFloat16, "bfloat16");
    check_numel(dst, "dst", src.numel());
    if (out) check_float32(*out, "out", 1);
    if (source_amax) check_float32(*source_amax, "source_amax", 1);
    const Fp4Transform matrix = transform_by(transform.as<const float>());
    Maximum maximum;
    Maximum of_source;
    if (src.numel() != 0) {
        each_part(src, num_threads, [&](std::int64_t row, std::int64_t col, int count, int width) {
            const Fp4Part part = part_at(src, row, col, count, width);
            std::int32_t found = 0;
            maximum.raise(kernel(part, matrix, dst.as<std::uint16_t>() + row * src.cols() + col, found));
            of_source.raise(found);
        });
    }
    if (out) *out->as<float>() = maximum.value();
    if (source_amax) *source_amax->as<float>() = of_source.value();
    return maximum.value();
}

void dequantize_nvfp4(const TensorView& src, const TensorView& scales, const TensorView& dst, int num_threads) {
    const auto kernel = kernels().dequantize_fp4[table_index(wide_kind(dst, "dst"))];
    check_threads(num_threads);
    const std::int64_t lines = dst.rows();
    const std::int64_t length = dst.cols();
    if (length % kFp4Block != 0)
        throw ShapeError(expected("columns in multiples of 16", "dst", dst.shape_text(), "pass as many as there are codes"));
    check_packed(src, "src", dst.numel());
    check_scales_of_lines(scales, lines, length);
    if (dst.numel() == 0) return;
    const auto width = static_cast<std::int64_t>(size_of(dst.dtype));
    const std::int64_t stride = scales.cols();
    constexpr std::int64_t kLines = 16;  // of a task
    const auto tasks = static_cast<std::size_t>((lines + kLines - 1) / kLines);
    parallel_for(tasks, threads_for(num_threads, static_cast<std::size_t>(dst.numel() * width)), [&](std::size_t task) {
        const std::int64_t first = static_cast<std::int64_t>(task) * kLines;
        for (std::int64_t line = first; line < std::min(lines, first + kLines); ++line)
            kernel(src.as<const std::uint8_t>() + line * length / 2, scales.as<const std::uint8_t>() + line * stride,
                   dst.as<std::uint8_t>() + line * length * width, static_cast<int>(length));
    });
}

}  // namespace fusible::cast
