#include "gemm/operand.hpp"

#include <string>

#include "cast/bands.hpp"
#include "cast/kernels.hpp"

namespace fusible::gemm {

namespace {

void check_matrix(const TensorView& view, const char* name) {
    if (view.ndim < 1) throw ShapeError(expected("at least one dimension", name, "a scalar", "pass a matrix"));
}

codes::Coding coding_of(ElementKind kind, codes::Coding e4m3, codes::Coding e5m2) { return kind == ElementKind::E5M2 ? e5m2 : e4m3; }

/// One float for each 128 codes of a row, the first of all rows first; or for each square.
BlockScales read_floats(const TensorView& scales, std::int64_t rows, std::int64_t cols, bool tiled) {
    constexpr std::int64_t kSide = cast::kScaledBlock;
    const std::int64_t blocks = (cols + kSide - 1) / kSide;
    cast::check_scales<float>(scales, "right_scales", tiled ? (rows + kSide - 1) / kSide : blocks, tiled ? blocks : rows);
    const auto* const data = scales.as<const std::uint8_t>();
    return tiled ? BlockScales{data, 4, kSide, scales.cols(), 1, kSide} : BlockScales{data, 4, 1, 1, scales.cols(), kSide};
}

void check_whole_blocks(const char* what, std::int64_t count, std::int64_t block) {
    if (count % block == 0) return;
    const std::string multiples = std::string(what) + " in multiples of " + std::to_string(block);
    throw ShapeError(expected(multiples.c_str(), "right", std::to_string(count), "pad it with zeros"));
}

/// One byte for each `block` codes of a row.
BlockScales read_bytes(const TensorView& scales, std::int64_t rows, std::int64_t cols, std::int64_t block, bool tiled) {
    check_whole_blocks("columns", cols, block);
    cast::check_scales<std::uint8_t>(scales, "right_scales", rows, cols / block);
    if (tiled) throw ArgumentError(expected("float32 scales", "right_scales of squares", name_of(scales.dtype), "repeat those of a square for its rows"));
    return {scales.as<const std::uint8_t>(), 1, 1, scales.cols(), 1, block};
}

/// One byte for each 32 codes of a column.
BlockScales read_bytes_of_columns(const TensorView& scales, std::int64_t rows, std::int64_t cols) {
    check_whole_blocks("rows", rows, cast::kMxBlock);
    cast::check_scales<std::uint8_t>(scales, "right_scales", rows / cast::kMxBlock, cols);
    return {scales.as<const std::uint8_t>(), 1, cast::kMxBlock, scales.cols(), 1, 1};
}

}  // namespace

Operand read_operand(const TensorView& view, bool transposed, DType dtype, Scalar scale, const char* name) {
    check_matrix(view, name);
    ElementKind kind;
    auto coding = codes::Coding::None;
    if (is_float8(dtype)) {
        check_codes(view, name, dtype);
        kind = code_kind(dtype);
        coding = coding_of(kind, codes::Coding::E4M3, codes::Coding::E5M2);
    } else {
        check_dtype(view, name, view.dtype == dtype, name_of(dtype));
        kind = wide_kind(view, name);
    }
    const auto width = static_cast<std::int64_t>(size_of(view.dtype));
    return {view.as<const std::uint8_t>(), view.rows(), view.cols(), kind, width, transposed, scale.value, coding, {}};
}

Operand read_blocks(const TensorView& view, bool transposed, DType dtype, Scalar scale, const TensorView& scales, bool tiled) {
    check_matrix(view, "right");
    if (!transposed && (tiled || dtype == DType::Float4E2M1 || scales.dtype == DType::Float32))
        throw ArgumentError(expected("a transposed right operand", "gemm with right_scales that are no E8M0 bytes", "another", "change the flags"));
    const auto* const data = view.as<const std::uint8_t>();
    const std::int64_t rows = view.rows();
    if (dtype == DType::Float4E2M1) {
        check_dtype(view, "right", size_of(view.dtype) == 1, "uint8");
        const std::int64_t cols = 2 * view.cols();
        return {data, rows, cols, ElementKind::E4M3, 1, true, scale.value, codes::Coding::Fp4, read_bytes(scales, rows, cols, cast::kFp4Block, tiled)};
    }
    const ElementKind kind = code_kind(dtype);
    check_codes(view, "right", dtype);
    const std::int64_t cols = view.cols();
    if (scales.dtype == DType::Float32) {
        const auto coding = coding_of(kind, codes::Coding::BlocksE4M3, codes::Coding::BlocksE5M2);
        return {data, rows, cols, kind, 1, true, scale.value, coding, read_floats(scales, rows, cols, tiled)};
    }
    const auto coding = coding_of(kind, codes::Coding::MxE4M3, codes::Coding::MxE5M2);
    if (!transposed) return {data, rows, cols, kind, 1, false, scale.value, coding, read_bytes_of_columns(scales, rows, cols)};
    return {data, rows, cols, kind, 1, true, scale.value, coding, read_bytes(scales, rows, cols, cast::kMxBlock, tiled)};
}

}  // namespace fusible::gemm
