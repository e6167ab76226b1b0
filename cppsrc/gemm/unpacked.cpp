// The schedules in which B is read as it lies.
#include <algorithm>
#include <atomic>

#include "gemm/packing.hpp"
#include "gemm/schedules.hpp"
#include "runtime/round_up.hpp"
#include "runtime/threads.hpp"

namespace fusible::gemm {

namespace {

/// The rows [row, row + rows) of C: these rows of A are packed, B is read once, and the sums are turned at the end.
void run_band(Product& p, const Plan& plan, std::int64_t row, std::int64_t rows) {
    const std::int64_t nr = p.kernels.nr;
    const std::int64_t units = p.units(p.k);
    const std::int64_t panels = p.micro_panels(rows);
    const std::int64_t tasks = (p.n + plan.nc - 1) / plan.nc;
    const auto a_units = static_cast<std::size_t>(panels * nr * units);
    // A few panels are packed by each thread for itself, sooner than all threads could wait for one another.
    std::int32_t* shared = nullptr;
    if (panels >= 2 * p.threads) {
        shared = scratch().packed_b.of<std::int32_t>(a_units);
        parallel_for(static_cast<std::size_t>(panels), p.threads,
                     [&](std::size_t i) { pack_a_panel(p, row, row + rows, static_cast<std::int64_t>(i), shared); });
    }
    std::atomic<std::int64_t> taken{0};
    parallel_for(static_cast<std::size_t>(std::min<std::int64_t>(p.threads, tasks)), p.threads, [&](std::size_t) {
        std::int32_t* packed = shared;
        if (packed == nullptr) {
            packed = scratch().packed_b.of<std::int32_t>(a_units);
            for (std::int64_t i = 0; i < panels; ++i) pack_a_panel(p, row, row + rows, i, packed);
        }
        Block block{};
        block.b = packed;
        block.panel_stride = units * nr;
        block.cols = static_cast<int>(rows);
        block.kc = units;
        block.sums_stride = panels * nr;
        block.sums = scratch().sums.of<float>(static_cast<std::size_t>(2 * cast::kTile * block.sums_stride));
        float* const turned = block.sums + cast::kTile * block.sums_stride;
        // A thread takes its next task before it begins one, and fetches that one's rows meanwhile.
        for (std::int64_t task = taken++, next = taken++; task < tasks; task = next, next = taken++) {
            const std::int64_t col = task * plan.nc;
            const std::int64_t cols = std::min(plan.nc, p.n - col);
            read_b_rows(p, col, cols, block);
            const std::int64_t after = next < tasks ? next * plan.nc : 0;
            block.ahead = p.b.data + after * p.b.row_bytes();
            block.ahead_bytes = next < tasks ? std::min(plan.nc, p.n - after) * p.b.row_bytes() : 0;
            p.kernels.multiply(block);
            p.kernels.turn(block.sums, block.sums_stride, block.rows, block.cols, turned, cast::kTile);
            float* const column_sums = p.column_sums != nullptr ? p.column_sums->chunk(row / p.chunk_rows) : nullptr;
            p.maximum.raise(p.kernels.finish(p.epilogue, {turned, cast::kTile, row, col, block.cols, block.rows, column_sums}));
        }
    });
}

/// Of the sums of a task of few rows.
constexpr std::int64_t kSumsStride = std::max(kFewRowsCols, kFewCodesCols);

/// Bytes by which rows of A are farther apart than they are long: rows of a power of two would have one place in the nearest cache.
constexpr std::int64_t kLineApart = 64;

/// Calls multiply(row, column, columns, sums) for the columns of each task and every `step`-th row, and finishes what it gives.
template <class Multiply>
void each_few_columns(Product& p, const Plan& plan, std::int64_t step, const Multiply& multiply) {
    const std::int64_t tasks = (p.n + plan.nc - 1) / plan.nc;
    parallel_for(static_cast<std::size_t>(tasks), p.threads, [&](std::size_t task) {
        const std::int64_t col = static_cast<std::int64_t>(task) * plan.nc;
        const std::int64_t cols = std::min(plan.nc, p.n - col);
        alignas(64) float sums[kMaxFewCodedRows * kSumsStride];
        for (std::int64_t row = 0; row < p.m; row += step)  // the task's columns come from the second cache from the second time on
            multiply(row, col, cols, sums + row * kSumsStride);
        float* const column_sums = p.column_sums != nullptr ? p.column_sums->chunk(0) : nullptr;
        p.maximum.raise(p.kernels.finish(p.epilogue, {sums, kSumsStride, 0, col, static_cast<int>(p.m), static_cast<int>(cols), column_sums}));
    });
}

}  // namespace

void run_turned(Product& p, const Plan& plan) {
    for (std::int64_t row = 0; row < p.m; row += plan.mc) run_band(p, plan, row, std::min(plan.mc, p.m - row));
}

void run_few_rows(Product& p, const Plan& plan) {
    const std::int64_t stride = round_up(p.units(p.k), p.kernels.lanes) + kLineApart / static_cast<std::int64_t>(sizeof(std::int32_t));
    auto* packed_a = scratch().packed_a.of<std::int32_t>(static_cast<std::size_t>(p.m * stride));
    pack_a_rows(p, 0, p.m, 0, p.k, packed_a, stride);
    each_few_columns(p, plan, kFewRows, [&](std::int64_t row, std::int64_t col, std::int64_t cols, float* sums) {
        const auto rows = static_cast<int>(std::min<std::int64_t>(kFewRows, p.m - row));
        p.kernels.multiply_few_rows[table_index(p.b.kind)](
            {packed_a + row * stride, stride, rows, p.b.at(col, 0), p.b.cols, p.k, cols, sums, kSumsStride});
    });
}

namespace {

/// The columns of B from col on as they lie, and where the products of a task go.
codes::FewRows codes_at(const Product& p, int rows, std::int64_t col, std::int64_t cols, float* sums) {
    static_assert(cast::kScaledBlock % kFewCodesCols == 0, "a task's columns lie in one square");
    codes::FewRows few{};
    few.rows = rows;
    few.b = p.b.data + col * p.b.row_bytes();
    few.b_stride = p.b.row_bytes();
    few.k = p.k;
    few.cols = cols;
    few.sums = sums;
    few.sums_stride = kSumsStride;
    few.scales = p.b.scales.at(col);
    few.scale_line_step = p.b.scales.row_step();
    few.scale_block_step = p.b.scales.block_step;
    return few;
}

/// A as floats, each row filled up with zeros to `stride`.
float* unpacked_floats(const Product& p, std::int64_t stride) {
    auto* const units = scratch().packed_a.of<std::int32_t>(static_cast<std::size_t>(p.m * stride));
    auto* const a = reinterpret_cast<float*>(units);
    pack_a_rows(p, 0, p.m, 0, p.k, units, stride);
    for (std::int64_t row = 0; row < p.m; ++row) std::fill(a + row * stride + p.k, a + (row + 1) * stride, 0.0f);
    return a;
}

/// Whether bfloat16 is faster, and holds A.
bool takes_halves(const Product& p) {
    return p.m >= p.codes->rows_of_halves && p.codes->multiply_by_halves[static_cast<int>(p.b.coding)] != nullptr && p.halves_hold_a;
}

void run_few_halves(Product& p, const Plan& plan, const float* a, std::int64_t stride) {
    const auto coding = static_cast<int>(p.b.coding);
    const std::int64_t packed_stride = stride + kLineApart / static_cast<std::int64_t>(sizeof(std::uint16_t));
    auto* const packed = scratch().packed_b.of<std::uint16_t>(static_cast<std::size_t>(p.m * packed_stride));
    const auto rows_at = [&](std::int64_t row) { return static_cast<int>(std::min<std::int64_t>(codes::kRowsOfHalves, p.m - row)); };
    for (std::int64_t row = 0; row < p.m; row += codes::kRowsOfHalves)
        p.codes->pack_halves[coding](a + row * stride, stride, rows_at(row), stride, packed + row * packed_stride, packed_stride);
    each_few_columns(p, plan, codes::kRowsOfHalves, [&](std::int64_t row, std::int64_t col, std::int64_t cols, float* sums) {
        codes::FewHalves few{codes_at(p, rows_at(row), col, cols, sums), packed + row * packed_stride};
        few.codes.a_stride = packed_stride;
        p.codes->multiply_by_halves[coding](few);
    });
}

}  // namespace

void run_few_codes(Product& p, const Plan& plan) {
    const auto coding = static_cast<int>(p.b.coding);
    const std::int64_t stride = round_up(p.k, codes::kMostElements);
    float* const a = unpacked_floats(p, stride);
    if (takes_halves(p)) return run_few_halves(p, plan, a, stride);
    float factors[kMaxFewCodedRows];
    for (std::int64_t row = 0; row < p.m; ++row) factors[row] = p.codes->reorder[coding](a + row * stride, stride);
    each_few_columns(p, plan, kFewRows, [&](std::int64_t row, std::int64_t col, std::int64_t cols, float* sums) {
        codes::FewRows few = codes_at(p, static_cast<int>(std::min<std::int64_t>(kFewRows, p.m - row)), col, cols, sums);
        few.a = a + row * stride;
        few.a_stride = stride;
        few.row_factors = factors + row;
        p.codes->multiply[coding](few);
    });
}

}  // namespace fusible::gemm
