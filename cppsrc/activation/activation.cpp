#include "activation/activation.hpp"

#include <algorithm>

#include "activation/kernels.hpp"
#include "cast/column_sums.hpp"
#include "cast/destination.hpp"
#include "runtime/select.hpp"
#include "runtime/threads.hpp"

namespace fusible::activation {

namespace {

const Kernels& kernels() { return FUSIBLE_SELECT(kernels); }

template <int Count>
int index_of(const std::string& name, const char* const (&names)[Count], const char* what) {
    const auto* const found = std::find(names, names + Count, name);
    if (found != names + Count) return static_cast<int>(found - names);
    std::string known = names[0];
    for (int i = 1; i < Count; ++i) known += std::string(", ") + names[i];
    throw ArgumentError(expected("one of " + known, what, "'" + name + "'", "choose one of them"));
}

/// What is read, and by what formula.
struct Input {
    Formula formula;
    const TensorView* grad;
    const TensorView& src;
    int halves_in;
    int halves_out;
    GateParameters parameters;
};

/// Where results go, as the caller gave it.
struct Destination {
    const OptionalView& dst;
    DType dtype;
    const OptionalView& dst_transposed;
    Scalar scale;
    const OptionalView& amax;
    bool accumulate_amax;
    const TensorView* bias_grad;
    int num_threads;
};

/// How a job is cut: into blocks, and those into tasks.
struct Cut {
    Emitter emitter;
    std::int64_t rows;
    std::int64_t cols;
    std::int64_t task_rows;
    std::int64_t task_cols;
};

/// Tiles where there is a transposed copy, else runs: pieces of a row, or whole rows. Column sums are added up a chunk of rows at a time, over as
/// much of a row as leaves work for every thread.
Cut cut_of(const ActivationJob& job, bool with_sums, int threads) {
    const std::int64_t chunk = cast::ColumnSums::rows_per_chunk(job.out.rows);
    if (job.out.transposed != nullptr) return {kernels().tile, cast::kTile, cast::kTile, chunk, 4 * cast::kTile};
    const std::int64_t width = std::max<std::int64_t>(1, std::min<std::int64_t>(job.width, kRun));
    if (!with_sums) return {kernels().run, kRun / width, width, kRun / width, width};
    const std::int64_t parts = job.out.rows >= 2 * threads * chunk ? 1 : threads;
    const std::int64_t runs = (job.width + parts * kRun - 1) / (parts * kRun);
    return {kernels().run, kRun / width, width, chunk, std::max<std::int64_t>(1, runs) * kRun};
}

void run_blocks(const ActivationJob& job, const Cut& cut, cast::ColumnSums* sums, cast::Maximum& maximum, int threads) {
    const std::int64_t rows = job.out.rows;
    const std::int64_t across = (job.width + cut.task_cols - 1) / cut.task_cols;
    const std::int64_t tasks = across * ((rows + cut.task_rows - 1) / cut.task_rows);
    parallel_for(static_cast<std::size_t>(tasks), threads, [&](std::size_t task) {
        const std::int64_t down = static_cast<std::int64_t>(task) / across;
        const std::int64_t first_col = static_cast<std::int64_t>(task) % across * cut.task_cols;
        const std::int64_t last_row = std::min(rows, (down + 1) * cut.task_rows);
        const std::int64_t last_col = std::min(job.width, first_col + cut.task_cols);
        float* const row_sums = sums != nullptr ? sums->chunk(down) : nullptr;
        for (std::int64_t row = down * cut.task_rows; row < last_row; row += cut.rows) {
            for (std::int64_t col = first_col; col < last_col; col += cut.cols) {
                const auto height = static_cast<int>(std::min(cut.rows, last_row - row));
                const auto width = static_cast<int>(std::min(cut.cols, last_col - col));
                maximum.raise(cut.emitter(job, Block{row, col, height, width}, row_sums));
            }
        }
    });
}

/// A matrix without halves, read and written row by row, is one long row.
void flatten(ActivationJob& job) {
    const std::int64_t count = job.out.rows * job.out.cols;
    job.out.rows = 1;
    job.out.cols = job.width = job.grad.stride = job.x.stride = count;
}

ActivationJob checked(const Input& input, const Destination& to) {
    const TensorView& src = input.src;
    if (src.cols() % input.halves_in != 0)
        throw ShapeError(expected("an even last dimension", "src", src.shape_text(), "pass both halves side by side"));
    check_threads(to.num_threads);
    const std::int64_t rows = src.rows();
    const std::int64_t width = src.cols() / input.halves_in;
    ActivationJob job{};
    job.formula = input.formula;
    job.x = {src.data, wide_kind(src, "src"), src.cols()};
    if (input.grad != nullptr) {
        job.grad = {input.grad->data, wide_kind(*input.grad, "grad"), width};
        check_numel(*input.grad, "grad", rows * width);
    }
    job.width = width;
    job.halves_in = input.halves_in;
    job.halves_out = input.halves_out;
    job.parameters = input.parameters;
    if (to.amax) check_float32(*to.amax, "amax", 1);
    if (to.amax && !is_float8(to.dtype)) throw ArgumentError(expected("None", "amax", "a tensor", "ask for FP8 to get one"));
    if (to.bias_grad != nullptr) check_float32(*to.bias_grad, "bias_grad", width);
    job.out = cast::read_output(to.dst, to.dtype, to.dst_transposed, to.scale, rows, width * input.halves_out);
    return job;
}

void apply(const Input& input, const Destination& to) {
    ActivationJob job = checked(input, to);
    const int threads = threads_for(to.num_threads, static_cast<std::size_t>(job.out.rows * job.width) * sizeof(float));
    cast::Maximum maximum;
    if (to.bias_grad != nullptr) {
        cast::ColumnSums sums(job.out.rows, job.width);
        run_blocks(job, cut_of(job, true, threads), &sums, maximum, threads);
        sums.total(to.bias_grad->as<float>());
    } else {
        if (job.out.transposed == nullptr && job.halves_in == 1) flatten(job);
        run_blocks(job, cut_of(job, false, threads), nullptr, maximum, threads);
    }
    if (to.amax) maximum.write(*to.amax->as<float>(), to.accumulate_amax);
}

Formula pointwise(const Formula (&formulae)[kPointwise], const std::string& name) {
    return formulae[index_of(name, kPointwiseNames, "a pointwise activation")];
}

Formula gated(const Formula (&formulae)[kGated], const std::string& name) { return formulae[index_of(name, kGatedNames, "a gated activation")]; }

}  // namespace

void activation(const std::string& name, const TensorView& src, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed,
                Scalar scale, const OptionalView& amax, bool accumulate_amax, int num_threads) {
    apply({pointwise(kernels().value, name), nullptr, src, 1, 1, {}},
          {dst, dtype, dst_transposed, scale, amax, accumulate_amax, nullptr, num_threads});
}

void activation_backward(const std::string& name, const TensorView& grad, const TensorView& src, const OptionalView& dst, DType dtype,
                         const OptionalView& dst_transposed, Scalar scale, const OptionalView& amax, bool accumulate_amax,
                         const OptionalView& bias_grad, int num_threads) {
    apply({pointwise(kernels().gradient, name), &grad, src, 1, 1, {}},
          {dst, dtype, dst_transposed, scale, amax, accumulate_amax, bias_grad ? &*bias_grad : nullptr, num_threads});
}

void gated_activation(const std::string& name, const TensorView& src, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed,
                      Scalar scale, const OptionalView& amax, bool accumulate_amax, float beta1, float beta2, float limit, float alpha,
                      float offset, int num_threads) {
    apply({gated(kernels().gated_value, name), nullptr, src, 2, 1, {beta1, beta2, limit, alpha, offset}},
          {dst, dtype, dst_transposed, scale, amax, accumulate_amax, nullptr, num_threads});
}

void gated_activation_backward(const std::string& name, const TensorView& grad, const TensorView& src, const OptionalView& dst, DType dtype,
                               const OptionalView& dst_transposed, Scalar scale, const OptionalView& amax, bool accumulate_amax, float beta1,
                               float beta2, float limit, float alpha, float offset, int num_threads) {
    apply({gated(kernels().gated_gradient, name), &grad, src, 2, 2, {beta1, beta2, limit, alpha, offset}},
          {dst, dtype, dst_transposed, scale, amax, accumulate_amax, nullptr, num_threads});
}

}  // namespace fusible::activation
