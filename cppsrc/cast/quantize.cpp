#include <algorithm>

#include "cast/cast.hpp"
#include "cast/column_sums.hpp"
#include "cast/kernels.hpp"
#include "cast/maximum.hpp"
#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::cast {

namespace {

constexpr std::int64_t kRun = 16 * 1024;   // elements of a task without strips
constexpr std::int64_t kTaskCols = 256;    // columns of a task with strips

struct Job {
    const TensorView& src;
    std::uint8_t* codes;
    std::uint8_t* transposed;
    float scale;
    ElementKind source;
    ElementKind format;
    int num_threads;

    std::size_t bytes() const { return static_cast<std::size_t>(src.numel()) * size_of(src.dtype); }
};

std::uint8_t* bytes_of(const OptionalView& view) { return view ? view->as<std::uint8_t>() : nullptr; }

void check(const TensorView& src, const OptionalView& dst, DType fp8_dtype, const OptionalView& dst_transposed, const OptionalView& amax,
           const OptionalView& bias_grad, const OptionalView& noop, int num_threads) {
    check_threads(num_threads);
    if (!dst && !dst_transposed)
        throw ArgumentError(expected("a tensor", "dst or dst_transposed", "None for both", "pass at least one of them"));
    for (const auto& [view, name] : {std::pair(&dst, "dst"), std::pair(&dst_transposed, "dst_transposed")}) {
        if (!*view) continue;
        check_codes(**view, name, fp8_dtype);
        check_numel(**view, name, src.numel());
    }
    if (amax) check_float32(*amax, "amax", 1);
    if (noop) check_float32(*noop, "noop", 1);
    if (!bias_grad) return;
    check_dtype(*bias_grad, "bias_grad", bias_grad->dtype == DType::Float32, "float32");
    check_numel(*bias_grad, "bias_grad", src.cols());
}

void quantize_runs(const Job& job, Maximum& maximum) {
    const auto kernel = kernels().quantize[table_index(job.source)][format_index(job.format)];
    const std::int64_t count = job.src.numel();
    const auto* source = job.src.as<const std::uint8_t>();
    const auto width = static_cast<std::int64_t>(size_of(job.src.dtype));
    const auto tasks = static_cast<std::size_t>((count + kRun - 1) / kRun);
    parallel_for(tasks, threads_for(job.num_threads, job.bytes()), [&](std::size_t task) {
        const auto begin = static_cast<std::int64_t>(task) * kRun;
        const auto length = static_cast<std::size_t>(std::min(kRun, count - begin));
        maximum.raise(kernel(source + begin * width, job.codes + begin, length, job.scale));
    });
}

StripArguments strip_at(const Job& job, std::int64_t row, std::int64_t col, float* sums) {
    const std::int64_t rows = job.src.rows();
    const std::int64_t cols = job.src.cols();
    StripArguments strip{};
    strip.source = job.src.as<const std::uint8_t>() + (row * cols + col) * static_cast<std::int64_t>(size_of(job.src.dtype));
    strip.source_stride = cols;
    strip.rows = static_cast<int>(std::min<std::int64_t>(kTile, rows - row));
    strip.cols = static_cast<int>(std::min<std::int64_t>(kStripCols, cols - col));
    strip.scale = job.scale;
    strip.codes = job.codes != nullptr ? job.codes + row * cols + col : nullptr;
    strip.codes_stride = cols;
    strip.transposed = job.transposed != nullptr ? job.transposed + col * rows + row : nullptr;
    strip.transposed_stride = rows;
    strip.column_sums = sums != nullptr ? sums + col : nullptr;
    return strip;
}

/// Quantizes by strips; adds to `sums`, where given.
void quantize_strips(const Job& job, ColumnSums* sums, Maximum& maximum) {
    const auto kernel = kernels().quantize_strip[table_index(job.source)][format_index(job.format)];
    const std::int64_t rows = job.src.rows();
    const std::int64_t cols = job.src.cols();
    const std::int64_t chunk = ColumnSums::rows_per_chunk(rows);
    const std::int64_t across = (cols + kTaskCols - 1) / kTaskCols;
    const std::int64_t tasks = across * ((rows + chunk - 1) / chunk);
    parallel_for(static_cast<std::size_t>(tasks), threads_for(job.num_threads, job.bytes()), [&](std::size_t task) {
        const std::int64_t row_chunk = static_cast<std::int64_t>(task) / across;
        const std::int64_t first_col = static_cast<std::int64_t>(task) % across * kTaskCols;
        const std::int64_t last_row = std::min(rows, (row_chunk + 1) * chunk);
        const std::int64_t last_col = std::min(cols, first_col + kTaskCols);
        float* const row_sums = sums != nullptr ? sums->chunk(row_chunk) : nullptr;
        for (std::int64_t row = row_chunk * chunk; row < last_row; row += kTile)
            for (std::int64_t col = first_col; col < last_col; col += kStripCols) maximum.raise(kernel(strip_at(job, row, col, row_sums)));
    });
}

void quantize_with_sums(const Job& job, float* bias_grad, Maximum& maximum) {
    ColumnSums sums(job.src.rows(), job.src.cols());
    quantize_strips(job, &sums, maximum);
    sums.total(bias_grad);
}

}  // namespace

void quantize(const TensorView& src, const OptionalView& dst, Scalar scale, DType fp8_dtype, const OptionalView& dst_transposed,
              const OptionalView& amax, bool accumulate_amax, const OptionalView& bias_grad, const OptionalView& noop, int num_threads) {
    const ElementKind source = wide_kind(src, "src");
    const ElementKind format = code_kind(fp8_dtype);
    check(src, dst, fp8_dtype, dst_transposed, amax, bias_grad, noop, num_threads);
    if (noop && *noop->as<const float>() == 1.0f) return;
    const Job job{src, bytes_of(dst), bytes_of(dst_transposed), scale.value, source, format, num_threads};
    Maximum maximum;
    if (bias_grad)
        quantize_with_sums(job, bias_grad->as<float>(), maximum);
    else if (dst_transposed)
        quantize_strips(job, nullptr, maximum);
    else
        quantize_runs(job, maximum);
    if (amax) maximum.write(*amax->as<float>(), accumulate_amax);
}

}  // namespace fusible::cast
