#include "gemm/gemm.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "cast/column_sums.hpp"
#include "cast/destination.hpp"
#include "cast/kernels.hpp"
#include "gemm/kernels.hpp"
#include "gemm/operand.hpp"
#include "runtime/checks.hpp"
#include "runtime/round_up.hpp"
#include "runtime/select.hpp"
#include "runtime/threads.hpp"
#include "runtime/workspace.hpp"

namespace fusible::gemm {

namespace {

constexpr std::int64_t kMaxBlockRows = 192;      // of a task
constexpr std::int64_t kRowStep = 12;            // a multiple of every level's tile
constexpr std::int64_t kMaxFewRows = 24;         // for which the right operand is not packed
constexpr std::int64_t kTaskCols = 64;           // of a task of such a product
constexpr std::int64_t kTurnedRows = 512;        // of the left operand that are packed at once where the right one is read as it lies
constexpr std::int64_t kTurnedUnits = 1 << 19;   // of these rows: 2 MiB
constexpr std::int64_t kTurnedCols = 48;         // of a task of such a product, a multiple of every level's tile; at most cast::kTile
constexpr std::int64_t kTurnedMinCols = 1024;    // for which packing these rows is little beside the products
constexpr std::int64_t kTurnedBytes = 2 << 20;   // of a right operand that no second cache holds
constexpr std::int64_t kFewBlocksRows = 512;     // for which each task packs its own part of the right operand, and uses it while it is hot
constexpr std::int64_t kTaskUnits = 128 * 1024;  // of that part: 512 KiB
constexpr std::int64_t kSumsCols = 256;          // of the sums that a task has in cache
constexpr std::int64_t kMaxDepth = 4096;         // elements packed at once
constexpr std::int64_t kLeftUnits = 192 * 1024;  // of the packed left block, which stays in the second cache: 768 KiB
constexpr std::int64_t kRightUnits = 1 << 19;    // of the packed right operand: 2 MiB

thread_local Workspace right_workspace;
thread_local Workspace left_workspace;
thread_local Workspace sums_workspace;
thread_local Workspace rounds_workspace;

struct Product {
    const Kernels& kernels;
    Operand left;
    Operand right;
    std::int64_t rows;
    std::int64_t cols;
    std::int64_t depth;
    std::int64_t block_rows;
    Epilogue epilogue;
    cast::ColumnSums* column_sums;  // a chunk a row block, of which a band of several uses the first; or null
    int threads;
    cast::Maximum maximum;

    std::int64_t units(std::int64_t elements) const { return (elements + kernels.depth - 1) / kernels.depth; }
    std::int64_t row_blocks() const { return (rows + block_rows - 1) / block_rows; }
};

/// Blocks of one size and even in number, for two threads or four. It follows from the sizes alone, so that a sum of columns has one order.
std::int64_t block_rows_for(std::int64_t rows, std::int64_t depth, bool transposes) {
    const std::int64_t most = std::min(kMaxBlockRows, kLeftUnits / std::clamp<std::int64_t>(depth / 2, 1, kMaxDepth / 2));
    const std::int64_t blocks = rows <= most / 2 ? 1 : 2 * ((rows + 2 * most - 1) / (2 * most));
    return round_up(std::max<std::int64_t>(1, (rows + blocks - 1) / blocks), transposes ? cast::kTile : kRowStep);
}

/// A round: columns [col, col + cols) and elements [first, first + depth) of the contracted dimension.
struct Round {
    std::int64_t col;
    std::int64_t cols;
    std::int64_t first;
    std::int64_t depth;
    const std::int32_t* right;  // from panel `first_panel` on
    std::int64_t first_panel;
    float* sums;  // of all rows and this round's columns, where there are several rounds a column; else null
    bool last;
};

void pack_panel(const Product& p, const Round& round, std::int64_t panel, std::int32_t* out) {
    const std::int64_t width = p.kernels.panel;
    const std::int64_t col = round.col + panel * width;
    const std::int64_t cols = std::min(width, p.cols - col);
    const int kind = table_index(p.right.kind);
    if (p.right.transposed) return p.kernels.pack_turned[kind](p.right.at(col, round.first), p.right.cols, cols, round.depth, out);
    if (cols < width) std::fill(out, out + p.units(round.depth) * width, 0);
    p.kernels.pack_across[kind](p.right.at(round.first, col), p.right.cols, round.depth, cols, out, width);
}

/// Units of a packed block of the left operand.
std::int64_t left_units(const Product& p, const Round& round) {
    const std::int64_t lanes = p.kernels.lanes;
    const std::int64_t units = p.units(round.depth);
    return p.left.transposed ? units * round_up(p.block_rows, lanes) : p.block_rows * round_up(units, lanes);
}

/// A block of rows, of which the left operand is packed to `out`.
Block pack_left(const Product& p, const Round& round, std::int64_t row_block, std::int32_t* out) {
    const std::int64_t lanes = p.kernels.lanes;
    const std::int64_t row = row_block * p.block_rows;
    const std::int64_t rows = std::min(p.block_rows, p.rows - row);
    Block block{};
    block.left = out;
    block.rows = static_cast<int>(rows);
    block.depth = p.units(round.depth);
    block.panel_stride = block.depth * p.kernels.panel;
    block.unit_stride = p.left.transposed ? round_up(rows, lanes) : 1;
    block.row_stride = p.left.transposed ? 1 : round_up(block.depth, lanes);
    if (p.left.transposed)
        p.kernels.pack_across[table_index(p.left.kind)](p.left.at(round.first, row), p.left.cols, round.depth, rows, out, block.unit_stride);
    else
        p.kernels.pack_rows[table_index(p.left.kind)](p.left.at(row, round.first), p.left.cols, rows, round.depth, out, block.row_stride);
    return block;
}

/// The product of a packed block of rows and the panels [first, last) of a round; finished, where the round is the last of its columns.
void multiply_rows(Product& p, const Round& round, std::int64_t row_block, Block block, std::int64_t first, std::int64_t last) {
    const std::int64_t width = p.kernels.panel;
    const std::int64_t row = row_block * p.block_rows;
    const std::int64_t step = kSumsCols / width;
    block.sums_stride = round.sums != nullptr ? round_up(round.cols, width) : kSumsCols;
    block.add_to = round.sums != nullptr && round.first > 0;
    float* const own = round.sums == nullptr ? sums_workspace.of<float>(static_cast<std::size_t>(p.block_rows * kSumsCols)) : nullptr;
    for (std::int64_t panel = first; panel < last; panel += step) {
        block.right = round.right + (panel - round.first_panel) * block.panel_stride;
        const std::int64_t col = round.col + panel * width;
        block.cols = static_cast<int>(std::min(std::min(step, last - panel) * width, p.cols - col));
        block.sums = own != nullptr ? own : round.sums + row * block.sums_stride + panel * width;
        p.kernels.multiply(block);
        if (!round.last) continue;
        float* const sums = p.column_sums != nullptr ? p.column_sums->chunk(row_block) : nullptr;
        p.maximum.raise(p.kernels.finish(p.epilogue, {block.sums, block.sums_stride, row, col, block.rows, block.cols, sums}));
    }
}

void run_round(Product& p, Round& round) {
    const std::int64_t panels = (round.cols + p.kernels.panel - 1) / p.kernels.panel;
    const std::int64_t panel_units = p.units(round.depth) * p.kernels.panel;
    auto* packed = right_workspace.of<std::int32_t>(static_cast<std::size_t>(panels * panel_units));
    parallel_for(static_cast<std::size_t>(panels), p.threads, [&](std::size_t panel) {
        pack_panel(p, round, static_cast<std::int64_t>(panel), packed + static_cast<std::int64_t>(panel) * panel_units);
    });
    round.right = packed;
    // Fewer row blocks than threads: the columns are divided too.
    const std::int64_t blocks = p.row_blocks();
    const std::int64_t parts = std::clamp<std::int64_t>((p.threads + blocks - 1) / blocks, 1, panels);
    parallel_for(static_cast<std::size_t>(blocks * parts), p.threads, [&](std::size_t task) {
        const auto part = static_cast<std::int64_t>(task) % parts;
        const std::int64_t row_block = static_cast<std::int64_t>(task) / parts;
        const Block block = pack_left(p, round, row_block, left_workspace.of<std::int32_t>(static_cast<std::size_t>(left_units(p, round))));
        multiply_rows(p, round, row_block, block, panels * part / parts, panels * (part + 1) / parts);
    });
}

/// A product of a few blocks of rows: these are packed first, for all, and each task packs a part of the right operand.
void run_few_blocks(Product& p) {
    const std::int64_t width = p.kernels.panel;
    const std::int64_t panels = (p.cols + width - 1) / width;
    const std::int64_t panel_units = p.units(p.depth) * width;
    const std::int64_t fit = std::min(kTaskUnits / std::max<std::int64_t>(1, panel_units), panels / (4 * p.threads));
    const std::int64_t step = std::clamp<std::int64_t>(fit, 1, kSumsCols / width);
    const Round whole{0, p.cols, 0, p.depth, nullptr, 0, nullptr, true};
    const std::int64_t block_units = left_units(p, whole);
    auto* left = rounds_workspace.of<std::int32_t>(static_cast<std::size_t>(p.row_blocks() * block_units));
    std::vector<Block> blocks(static_cast<std::size_t>(p.row_blocks()));
    parallel_for(blocks.size(), p.threads, [&](std::size_t i) {
        blocks[i] = pack_left(p, whole, static_cast<std::int64_t>(i), left + static_cast<std::int64_t>(i) * block_units);
    });
    parallel_for_uneven(static_cast<std::size_t>((panels + step - 1) / step), p.threads, [&](std::size_t task) {
        auto* packed = right_workspace.of<std::int32_t>(static_cast<std::size_t>(step * panel_units));
        const std::int64_t first = static_cast<std::int64_t>(task) * step;
        const std::int64_t last = std::min(first + step, panels);
        for (std::int64_t panel = first; panel < last; ++panel) pack_panel(p, whole, panel, packed + (panel - first) * panel_units);
        Round round = whole;
        round.right = packed;
        round.first_panel = first;
        for (std::size_t i = 0; i < blocks.size(); ++i) multiply_rows(p, round, static_cast<std::int64_t>(i), blocks[i], first, last);
    });
}

/// The panel-th of the panels of the left operand that begin with `row`, up to `end`.
void pack_left_panel(const Product& p, std::int64_t row, std::int64_t end, std::int64_t panel, std::int32_t* packed) {
    const std::int64_t width = p.kernels.panel;
    const std::int64_t first = row + panel * width;
    std::int32_t* const out = packed + panel * width * p.units(p.depth);
    p.kernels.pack_turned[table_index(p.left.kind)](p.left.at(first, 0), p.left.cols, std::min(width, end - first), p.depth, out);
}

/// The rows [col, col + cols) of the right operand, as the left one of a block: where they lie, or decoded.
void read_right(const Product& p, std::int64_t col, std::int64_t cols, Block& block) {
    const std::int64_t depth = p.kernels.depth;
    const auto* const units = static_cast<const std::int32_t*>(p.right.at(col, 0));
    block.rows = static_cast<int>(cols);
    block.unit_stride = 1;
    if (p.right.kind == p.kernels.units_kind && p.depth % depth == 0 && reinterpret_cast<std::uintptr_t>(units) % alignof(std::int32_t) == 0) {
        block.left = units;
        block.row_stride = p.depth / depth;
        return;
    }
    block.row_stride = round_up(p.units(p.depth), p.kernels.lanes);
    auto* const decoded = left_workspace.of<std::int32_t>(static_cast<std::size_t>(cols * block.row_stride));
    p.kernels.pack_rows[table_index(p.right.kind)](p.right.at(col, 0), p.right.cols, cols, p.depth, decoded, block.row_stride);
    block.left = decoded;
}

/// Whether turning the sums and packing the left operand cost less than packing the right one, or reading that one before its products.
bool turns(const Product& p) {
    const bool few = 2 * p.rows <= p.depth;
    const bool large = p.cols * p.depth * p.right.width > kTurnedBytes;
    return (few || large) && p.cols >= std::min(p.rows, kTurnedMinCols);
}

/// Columns of a task: for wide results such that each thread has as many tasks as the others.
std::int64_t turned_step(const Product& p) {
    if (!is_wide(p.epilogue.out.kind)) return cast::kTile;
    const std::int64_t most = p.depth <= kMaxDepth ? kTurnedCols : kTurnedCols / 2;
    const std::int64_t tasks = p.threads * ((p.cols + most * p.threads - 1) / (most * p.threads));
    return round_up((p.cols + tasks - 1) / tasks, 4);
}

/// The rows [row, row + rows) of the result: these rows of the left operand are packed, the right one is read once, and the sums are turned at the
/// end.
void run_turned(Product& p, std::int64_t row, std::int64_t rows) {
    const std::int64_t units = p.units(p.depth);
    const std::int64_t panels = (rows + p.kernels.panel - 1) / p.kernels.panel;
    const std::int64_t step = turned_step(p);
    const std::int64_t tasks = (p.cols + step - 1) / step;
    const auto left_size = static_cast<std::size_t>(panels * p.kernels.panel * units);
    // A few panels are packed by each thread for itself, sooner than all threads could wait for one another.
    std::int32_t* shared = nullptr;
    if (panels >= 2 * p.threads) {
        shared = right_workspace.of<std::int32_t>(left_size);
        parallel_for(static_cast<std::size_t>(panels), p.threads,
                     [&](std::size_t i) { pack_left_panel(p, row, row + rows, static_cast<std::int64_t>(i), shared); });
    }
    std::atomic<std::int64_t> taken{0};
    parallel_for(static_cast<std::size_t>(std::min<std::int64_t>(p.threads, tasks)), p.threads, [&](std::size_t) {
        std::int32_t* packed = shared;
        if (packed == nullptr) {
            packed = right_workspace.of<std::int32_t>(left_size);
            for (std::int64_t i = 0; i < panels; ++i) pack_left_panel(p, row, row + rows, i, packed);
        }
        Block block{};
        block.right = packed;
        block.panel_stride = units * p.kernels.panel;
        block.cols = static_cast<int>(rows);
        block.depth = units;
        block.sums_stride = panels * p.kernels.panel;
        block.sums = sums_workspace.of<float>(static_cast<std::size_t>(2 * cast::kTile * block.sums_stride));
        float* const turned = block.sums + cast::kTile * block.sums_stride;
        // A thread takes its next task before it begins one, and fetches that one's rows meanwhile.
        for (std::int64_t task = taken++, next = taken++; task < tasks; task = next, next = taken++) {
            const std::int64_t col = task * step;
            const std::int64_t cols = std::min(step, p.cols - col);
            read_right(p, col, cols, block);
            const std::int64_t after = next < tasks ? next * step : 0;
            block.ahead = p.right.at(after, 0);
            block.ahead_bytes = next < tasks ? std::min(step, p.cols - after) * p.right.cols * p.right.width : 0;
            p.kernels.multiply(block);
            p.kernels.turn(block.sums, block.sums_stride, block.rows, block.cols, turned, cast::kTile);
            float* const column_sums = p.column_sums != nullptr ? p.column_sums->chunk(row / p.block_rows) : nullptr;
            p.maximum.raise(p.kernels.finish(p.epilogue, {turned, cast::kTile, row, col, block.cols, block.rows, column_sums}));
        }
    });
}

/// A product whose right operand's rows are contiguous, in bands of rows for which the left operand's share stays in cache.
void run_turned(Product& p) {
    const std::int64_t fit = kTurnedUnits / std::max<std::int64_t>(1, p.units(p.depth)) / cast::kTile * cast::kTile;
    const std::int64_t most = std::clamp<std::int64_t>(fit, cast::kTile, kTurnedRows);
    const std::int64_t bands = (p.rows + most - 1) / most;
    const std::int64_t band = round_up((p.rows + bands - 1) / bands, cast::kTile);
    for (std::int64_t row = 0; row < p.rows; row += band) run_turned(p, row, std::min(band, p.rows - row));
}

/// A product of few rows, by which the right operand is read once.
void run_few_rows(Product& p) {
    const std::int64_t stride = round_up(p.units(p.depth), p.kernels.lanes);
    auto* left = left_workspace.of<std::int32_t>(static_cast<std::size_t>(p.rows * stride));
    p.kernels.pack_rows[table_index(p.left.kind)](p.left.data, p.left.cols, p.rows, p.depth, left, stride);
    const std::int64_t tasks = (p.cols + kTaskCols - 1) / kTaskCols;
    parallel_for(static_cast<std::size_t>(tasks), p.threads, [&](std::size_t task) {
        const std::int64_t col = static_cast<std::int64_t>(task) * kTaskCols;
        const std::int64_t cols = std::min(kTaskCols, p.cols - col);
        alignas(64) float sums[kMaxFewRows * kTaskCols];
        for (std::int64_t row = 0; row < p.rows; row += kFewRows) {  // the task's columns come from the second cache from the second time on
            const auto rows = static_cast<int>(std::min<std::int64_t>(kFewRows, p.rows - row));
            p.kernels.multiply_few_rows[table_index(p.right.kind)](
                {left + row * stride, stride, rows, p.right.at(col, 0), p.right.cols, p.depth, cols, sums + row * kTaskCols, kTaskCols});
        }
        float* const column_sums = p.column_sums != nullptr ? p.column_sums->chunk(0) : nullptr;
        p.maximum.raise(p.kernels.finish(p.epilogue, {sums, kTaskCols, 0, col, static_cast<int>(p.rows), static_cast<int>(cols), column_sums}));
    });
}

void run(Product& p) {
    if (p.right.transposed && !p.left.transposed) {
        if (p.rows <= kMaxFewRows) return run_few_rows(p);
        if (turns(p)) return run_turned(p);
    }
    const std::int64_t width = p.kernels.panel;
    if (p.rows <= kFewBlocksRows && p.depth <= kMaxDepth && p.cols >= 2 * p.threads * width) return run_few_blocks(p);
    const std::int64_t depth = std::min(p.depth, kMaxDepth);
    const std::int64_t cols = std::max(width, kRightUnits / std::max<std::int64_t>(1, p.units(depth)) / width * width);
    for (std::int64_t col = 0; col < p.cols; col += cols) {
        Round round{col, std::min(cols, p.cols - col), 0, depth, nullptr, 0, nullptr, false};
        if (p.depth > depth) round.sums = rounds_workspace.of<float>(static_cast<std::size_t>(p.rows * round_up(round.cols, width)));
        do {
            round.depth = std::min(depth, p.depth - round.first);
            round.last = round.first + round.depth == p.depth;
            run_round(p, round);
            round.first += depth;
        } while (!round.last);
    }
}

const Kernels& kernels_for(ElementKind left, ElementKind right) {
#if defined(FUSIBLE_X86_KERNELS)
    const auto& halves = avx512bf16::kernels;
    if (current_level() == Level::Avx512Bf16 && halves.takes[table_index(left)] && halves.takes[table_index(right)]) return halves;
#endif
    return FUSIBLE_SELECT(kernels);
}

void check_wide(const OptionalView& view, const char* name, std::int64_t count) {
    if (!view) return;
    check_dtype(*view, name, is_wide_float(view->dtype), "float32, float16 or bfloat16");
    check_numel(*view, name, count);
}

GeluStep read_gelu(int gelu, const OptionalView& pre_gelu) {
    if (gelu < 0 || gelu > 2) throw ArgumentError(expected("0, 1 or 2", "gelu", std::to_string(gelu), "pass one of the three"));
    if (gelu == 2 && !pre_gelu) throw ArgumentError(expected("a tensor", "pre_gelu with gelu 2", "None", "pass the input of the GELU"));
    return static_cast<GeluStep>(gelu);
}

}  // namespace

void gemm(const TensorView& left, bool left_transposed, DType left_dtype, Scalar left_scale, const TensorView& right, bool right_transposed,
          DType right_dtype, Scalar right_scale, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed, Scalar scale,
          const OptionalView& amax, bool accumulate_amax, const OptionalView& bias, const OptionalView& addend, float alpha, float beta, int gelu,
          const OptionalView& pre_gelu, const OptionalView& column_sums, int num_threads) {
    check_threads(num_threads);
    for (const auto& [view, name] : {std::pair(&dst, "dst"), std::pair(&dst_transposed, "dst_transposed"), std::pair(&pre_gelu, "pre_gelu"),
                                     std::pair(&column_sums, "column_sums")}) {
        if (!*view) continue;
        check_elsewhere(**view, name, left, "left");
        check_elsewhere(**view, name, right, "right");
    }
    const Operand a = read_operand(left, left_transposed, left_dtype, left_scale, "left");
    const Operand b = read_operand(right, right_transposed, right_dtype, right_scale, "right");
    const std::int64_t rows = a.transposed ? a.cols : a.rows;
    const std::int64_t depth = a.transposed ? a.rows : a.cols;
    const std::int64_t cols = b.transposed ? b.rows : b.cols;
    const std::int64_t other = b.transposed ? b.cols : b.rows;
    if (depth != other)
        throw ShapeError(expected(std::to_string(depth) + " in the contracted dimension", "right", std::to_string(other), "check the transposes"));
    product(rows, cols, "the result");
    const cast::Output out = cast::read_output(dst, dtype, dst_transposed, scale, rows, cols);
    const GeluStep step = read_gelu(gelu, pre_gelu);
    check_wide(bias, "bias", cols);
    check_wide(addend, "addend", rows * cols);
    check_wide(pre_gelu, "pre_gelu", rows * cols);
    if (beta != 0.0f && !addend) throw ArgumentError(expected("a tensor", "addend with beta", "None", "pass one, or beta 0"));
    if (amax) check_float32(*amax, "amax", 1);
    if (column_sums) check_float32(*column_sums, "column_sums", cols);

    const Epilogue epilogue{alpha * (a.scale * b.scale),
                            beta,
                            addend ? addend->data : nullptr,
                            addend ? wide_kind(*addend, "addend") : ElementKind::Float32,
                            bias ? bias->data : nullptr,
                            bias ? wide_kind(*bias, "bias") : ElementKind::Float32,
                            step,
                            pre_gelu ? pre_gelu->data : nullptr,
                            pre_gelu ? wide_kind(*pre_gelu, "pre_gelu") : ElementKind::Float32,
                            out};
    const auto work = static_cast<std::size_t>(rows * cols) * static_cast<std::size_t>(depth) / 16;
    const std::int64_t block_rows = block_rows_for(rows, depth, dst_transposed.has_value());
    Product product{kernels_for(a.kind, b.kind), a, b, rows, cols, depth, block_rows, epilogue, nullptr, threads_for(num_threads, work), {}};
    std::optional<cast::ColumnSums> sums;
    if (column_sums) product.column_sums = &sums.emplace(rows, cols, block_rows);
    if (rows * cols > 0) run(product);
    if (amax) product.maximum.write(*amax->as<float>(), accumulate_amax);
    if (sums) sums->total(column_sums->as<float>());
}

}  // namespace fusible::gemm
