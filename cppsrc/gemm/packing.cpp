#include "gemm/packing.hpp"

#include <algorithm>
#include <cstring>

#include "gemm/schedules.hpp"
#include "runtime/round_up.hpp"

namespace fusible::gemm {

namespace {

/// The factors of lines [line, line + lines) of an operand, [blocks of KC, width] floats: ones where its sums are not scaled, and zeros for lines that
/// there are not.
void write_factors(const Product& p, const Operand& x, Scaling scaling, const Round& round, std::int64_t line, std::int64_t lines, std::int64_t width,
                   std::int32_t* out) {
    static_assert(sizeof(float) == sizeof(*out), "a factor takes the place of a unit");
    constexpr float kNone = 0.0f;
    constexpr float kOne = 1.0f;
    const bool scaled = scaling == Scaling::OfSums;
    const std::int64_t step = scaled ? x.scales.block_step * x.scales.width : 0;
    const std::int64_t blocks = p.factors(round.kc);
    for (std::int64_t j = 0; j < width; ++j) {
        const void* const first = j >= lines ? &kNone : scaled ? x.scales.at(line + j, round.k0) : &kOne;
        const auto* factor = static_cast<const std::uint8_t*>(first);
        for (std::int64_t i = 0; i < blocks; ++i, factor += j < lines ? step : 0) std::memcpy(out + i * width + j, factor, sizeof(float));
    }
}

}  // namespace

void pack_b_panel(const Product& p, const Round& round, std::int64_t panel, std::int32_t* out) {
    const std::int64_t nr = p.kernels.nr;
    const std::int64_t col = round.n0 + panel * nr;
    const std::int64_t cols = std::min(nr, p.n - col);
    const int kind = table_index(p.b.kind);
    const int coding = static_cast<int>(p.b.coding);
    const bool with_factors = p.b.has_fours() && p.scaling_b == Scaling::OfSums;  // integers
    if (p.scales_sums() && !with_factors) write_factors(p, p.b, p.scaling_b, round, col, cols, nr, out + p.units(round.kc) * nr);
    if (p.b.transposed && p.packs_coded_b()) return p.kernels.pack_coded_turned[coding](p.b.coded(col, round.k0), cols, round.kc, out);
    if (p.b.transposed) return p.kernels.pack_turned[kind](p.b.at(col, round.k0), p.b.cols, cols, round.kc, out);
    if (cols < nr) std::fill(out, out + p.units(round.kc) * nr, 0);
    if (p.packs_coded_b()) return p.kernels.pack_coded_across[coding](p.b.coded(round.k0, col), round.kc, cols, out, nr);
    p.kernels.pack_across[kind](p.b.at(round.k0, col), p.b.cols, round.kc, cols, out, nr);
}

void pack_a_rows(const Product& p, std::int64_t row, std::int64_t rows, std::int64_t k0, std::int64_t depth, std::int32_t* out, std::int64_t stride) {
    if (p.packs_coded_a()) return p.kernels.pack_coded_rows[static_cast<int>(p.a.coding)](p.a.coded(row, k0), rows, depth, out, stride);
    p.kernels.pack_rows[table_index(p.a.kind)](p.a.at(row, k0), p.a.cols, rows, depth, out, stride);
}

void pack_a_panel(const Product& p, std::int64_t row, std::int64_t end, std::int64_t panel, std::int32_t* packed) {
    const std::int64_t nr = p.kernels.nr;
    const std::int64_t first = row + panel * nr;
    std::int32_t* const out = packed + panel * nr * p.units(p.k);
    const std::int64_t rows = std::min(nr, end - first);
    if (p.packs_coded_a()) return p.kernels.pack_coded_turned[static_cast<int>(p.a.coding)](p.a.coded(first, 0), rows, p.k, out);
    p.kernels.pack_turned[table_index(p.a.kind)](p.a.at(first, 0), p.a.cols, rows, p.k, out);
}

namespace {

/// Whether a packed block of A lies as a transposed A does.
bool in_columns(const Product& p) { return p.a.transposed && !p.kernels.reads_tiles; }

void pack_a_tiles(const Product& p, std::int64_t row, std::int64_t rows, const Round& round, std::int32_t* out, std::int64_t stride) {
    if (p.packs_coded_a()) return p.kernels.pack_coded_tiles[static_cast<int>(p.a.coding)](p.a.coded(row, round.k0), rows, round.kc, out, stride);
    p.kernels.pack_tiles[table_index(p.a.kind)](p.a.at(row, round.k0), p.a.cols, rows, round.kc, out, stride);
}

/// Rows of a transposed A: in squares or as columns.
void pack_a_columns(const Product& p, std::int64_t row, std::int64_t rows, const Round& round, std::int32_t* out, std::int64_t stride) {
    if (p.packs_coded_a()) {
        const auto& pack = p.kernels.reads_tiles ? p.kernels.pack_coded_tiles_down : p.kernels.pack_coded_across;
        return pack[static_cast<int>(p.a.coding)](p.a.coded(round.k0, row), round.kc, rows, out, stride);
    }
    const auto& pack = p.kernels.reads_tiles ? p.kernels.pack_tiles_down : p.kernels.pack_across;
    pack[table_index(p.a.kind)](p.a.at(round.k0, row), p.a.cols, round.kc, rows, out, stride);
}

}  // namespace

std::int64_t a_block_units(const Product& p, const Round& round) {
    const std::int64_t lanes = p.kernels.lanes;
    const std::int64_t units = p.units(round.kc);
    if (in_columns(p)) return units * round_up(p.chunk_rows, lanes);
    const std::int64_t factors = p.scaling_a == Scaling::OfSums ? round_up(p.factors(round.kc) * p.chunk_rows, lanes) : 0;
    return p.rows_held(p.chunk_rows) * round_up(units, lanes) + factors;
}

Block pack_a_block(const Product& p, const Round& round, std::int64_t i, std::int32_t* out) {
    const std::int64_t lanes = p.kernels.lanes;
    const std::int64_t row = i * p.chunk_rows;
    const std::int64_t rows = std::min(p.chunk_rows, p.m - row);
    Block block{};
    block.a = out;
    block.rows = static_cast<int>(rows);
    block.kc = p.units(round.kc);
    block.panel_stride = p.panel_units(round.kc);
    block.factor_units = p.scales_sums() ? p.factor_length() / p.kernels.depth : 0;
    block.unit_stride = in_columns(p) ? round_up(rows, lanes) : 1;
    block.row_stride = in_columns(p) ? 1 : round_up(block.kc, lanes);
    if (p.scaling_a == Scaling::OfSums) {
        std::int32_t* const factors = out + p.rows_held(rows) * block.row_stride;
        if (!p.a.has_fours()) write_factors(p, p.a, p.scaling_a, round, row, rows, rows, factors);
        block.row_factors = reinterpret_cast<const float*>(factors);
    }
    if (p.a.transposed)
        pack_a_columns(p, row, rows, round, out, in_columns(p) ? block.unit_stride : block.row_stride);
    else if (p.kernels.reads_tiles)
        pack_a_tiles(p, row, rows, round, out, block.row_stride);
    else
        pack_a_rows(p, row, rows, round.k0, round.kc, out, block.row_stride);
    return block;
}

namespace {

/// Rows [col, col + cols) of a transposed B, decoded with their scales: piece by piece, where a square of these ends among them.
void pack_coded_rows(const Product& p, std::int64_t col, std::int64_t cols, std::int32_t* out, std::int64_t stride) {
    const std::int64_t lines = p.b.scales.lines;
    for (std::int64_t row = col, end; row < col + cols; row = end) {
        end = lines == 1 ? col + cols : std::min(col + cols, (row / lines + 1) * lines);
        p.kernels.pack_coded_rows[static_cast<int>(p.b.coding)](p.b.coded(row, 0), end - row, p.k, out + (row - col) * stride, stride);
    }
}

}  // namespace

void read_b_rows(const Product& p, std::int64_t col, std::int64_t cols, Block& block) {
    const std::int64_t depth = p.kernels.depth;
    const auto* const units = static_cast<const std::int32_t*>(static_cast<const void*>(p.b.data + col * p.b.row_bytes()));
    block.rows = static_cast<int>(cols);
    block.unit_stride = 1;
    if (p.b.kind == p.kernels.units_kind && p.k % depth == 0 && reinterpret_cast<std::uintptr_t>(units) % alignof(std::int32_t) == 0) {
        block.a = units;
        block.row_stride = p.k / depth;
        return;
    }
    block.row_stride = round_up(p.units(p.k), p.kernels.lanes);
    auto* const decoded = scratch().packed_a.of<std::int32_t>(static_cast<std::size_t>(cols * block.row_stride));
    if (p.packs_coded_b())
        pack_coded_rows(p, col, cols, decoded, block.row_stride);
    else
        p.kernels.pack_rows[table_index(p.b.kind)](units, p.b.cols, cols, p.k, decoded, block.row_stride);
    block.a = decoded;
}

void multiply_block(Product& p, const Round& round, std::int64_t i, Block block, std::int64_t first, std::int64_t last) {
    const std::int64_t nr = p.kernels.nr;
    const std::int64_t row = i * p.chunk_rows;
    const std::int64_t step = p.sums_cols() / nr;
    const std::int64_t own_stride = p.sums_cols() + p.kernels.lanes;  // not a power of two: rows would have one place in the nearest cache
    block.sums_stride = round.sums != nullptr ? round_up(round.nc, nr) : own_stride;
    block.add_to = round.sums != nullptr && round.k0 > 0;
    float* const own = round.sums == nullptr ? scratch().sums.of<float>(static_cast<std::size_t>(p.rows_held(p.chunk_rows) * own_stride)) : nullptr;
    for (std::int64_t panel = first; panel < last; panel += step) {
        block.b = round.b + (panel - round.first_panel) * block.panel_stride;
        const std::int64_t col = round.n0 + panel * nr;
        block.cols = static_cast<int>(std::min(std::min(step, last - panel) * nr, p.n - col));
        block.sums = own != nullptr ? own : round.sums + row * block.sums_stride + panel * nr;
        p.kernels.multiply(block);
        if (!round.last) continue;
        float* const sums = p.column_sums != nullptr ? p.column_sums->chunk(i) : nullptr;
        p.maximum.raise(p.kernels.finish(p.epilogue, {block.sums, block.sums_stride, row, col, block.rows, block.cols, sums}));
    }
}

}  // namespace fusible::gemm
