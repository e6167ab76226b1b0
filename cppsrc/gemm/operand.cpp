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

/// What the messages say of the scales of an operand.
std::string scales_of(const char* name) { return std::string(name) + "_scales"; }

/// One float for each 128 codes of a row, the first of all rows first; or for each square.
BlockScales read_floats(const TensorView& scales, std::int64_t rows, std::int64_t cols, bool tiled, const char* name) {
    constexpr std::int64_t kSide = cast::kScaledBlock;
    const std::int64_t blocks = (cols + kSide - 1) / kSide;
    cast::check_scales<float>(scales, scales_of(name).c_str(), tiled ? (rows + kSide - 1) / kSide : blocks, tiled ? blocks : rows);
    const auto* const data = scales.as<const std::uint8_t>();
    return tiled ? BlockScales{data, 4, kSide, scales.cols(), 1, kSide} : BlockScales{data, 4, 1, 1, scales.cols(), kSide};
}

void check_whole_blocks(const char* what, std::int64_t count, std::int64_t block, const char* name) {
    if (count % block == 0) return;
    const std::string multiples = std::string(what) + " in multiples of " + std::to_string(block);
    throw ShapeError(expected(multiples.c_str(), name, std::to_string(count), "pad it with zeros"));
}

/// One byte for each `block` codes of a row.
BlockScales read_bytes(const TensorView& scales, std::int64_t rows, std::int64_t cols, std::int64_t block, bool tiled, const char* name) {
    check_whole_blocks("columns", cols, block, name);
    cast::check_scales<std::uint8_t>(scales, scales_of(name).c_str(), rows, cols / block);
    const std::string of_squares = scales_of(name) + " of squares";
    if (tiled) throw ArgumentError(expected("float32 scales", of_squares.c_str(), name_of(scales.dtype), "repeat those of a square for its rows"));
    return {scales.as<const std::uint8_t>(), 1, 1, scales.cols(), 1, block};
}

/// One byte for each 32 codes of a column.
BlockScales read_bytes_of_columns(const TensorView& scales, std::int64_t rows, std::int64_t cols, const char* name) {
    check_whole_blocks("rows", rows, cast::kMxBlock, name);
    cast::check_scales<std::uint8_t>(scales, scales_of(name).c_str(), rows / cast::kMxBlock, cols);
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

Operand read_blocks(const TensorView& view, bool transposed, bool along_rows, DType dtype, Scalar scale, const TensorView& scales, bool tiled,
                    const char* name) {
    check_matrix(view, name);
    if (!along_rows && (tiled || dtype == DType::Float4E2M1 || scales.dtype == DType::Float32)) {
        const std::string wanted = std::string(transposed ? "a" : "a transposed") + " " + name + " operand" + (transposed ? " that is not transposed" : "");
        const std::string of = "gemm with " + scales_of(name) + " that are no E8M0 bytes";
        throw ArgumentError(expected(wanted.c_str(), of.c_str(), "another", "change the flags"));
    }
    const auto* const data = view.as<const std::uint8_t>();
    const std::int64_t rows = view.rows();
    if (dtype == DType::Float4E2M1) {
        check_dtype(view, name, size_of(view.dtype) == 1, "uint8");
        const std::int64_t cols = 2 * view.cols();
        const bool powers = scales.dtype == DType::Float8E8M0;
        const BlockScales bytes = read_bytes(scales, rows, cols, powers ? cast::kMxBlock : cast::kFp4Block, tiled, name);
        const auto coding = powers ? codes::Coding::MxFp4 : codes::Coding::Fp4;
        return {data, rows, cols, ElementKind::E4M3, 1, transposed, scale.value, coding, bytes};
    }
    const ElementKind kind = code_kind(dtype);
    check_codes(view, name, dtype);
    const std::int64_t cols = view.cols();
    if (scales.dtype == DType::Float32) {
        const auto coding = coding_of(kind, codes::Coding::BlocksE4M3, codes::Coding::BlocksE5M2);
        return {data, rows, cols, kind, 1, transposed, scale.value, coding, read_floats(scales, rows, cols, tiled, name)};
    }
    const auto coding = coding_of(kind, codes::Coding::MxE4M3, codes::Coding::MxE5M2);
    const BlockScales bytes = along_rows ? read_bytes(scales, rows, cols, cast::kMxBlock, tiled, name) : read_bytes_of_columns(scales, rows, cols, name);
    return {data, rows, cols, kind, 1, transposed, scale.value, coding, bytes};
}

}  // namespace fusible::gemm
