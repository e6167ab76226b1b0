#include "optimizer/optimizer.hpp"

#include <atomic>
#include <cmath>

#include "optimizer/kernels.hpp"
#include "optimizer/runs.hpp"

namespace fusible::optimizer {

namespace {

ElementKind kind_of(const TensorList& tensors, const Run& run) { return wide_kind(tensors[run.tensor], "a tensor"); }

}  // namespace

void multi_tensor_adam(const TensorList& gradients, const TensorList& weights, const TensorList& first, const TensorList& second,
                       const TensorList& masters, double lr, double beta1, double beta2, double epsilon, double correction1, double correction2,
                       bool decoupled, double weight_decay, int num_threads) {
    check_threads(num_threads);
    check_list(gradients, "gradients", gradients);
    check_list(weights, "weights", gradients);
    check_list(first, "first", gradients);
    check_list(second, "second", gradients);
    if (!masters.empty()) check_list(masters, "masters", gradients);
    const auto f = [](double value) { return static_cast<float>(value); };
    const AdamStep step{f(lr), f(beta1), f(beta2), f(1 - beta1), f(1 - beta2), f(epsilon), f(1 / correction1), f(1 / correction2), f(weight_decay)};
    const Decay decay = weight_decay == 0 ? Decay::Nothing : decoupled ? Decay::Update : Decay::Gradient;
    const TensorList& read = masters.empty() ? weights : masters;
    const auto kernel = kernels().adam[static_cast<int>(decay)];
    each_run(runs_of(gradients), num_threads, [&](std::size_t, const Run& run) {
        const AdamRun arguments{run.of(gradients), run.of(read), run.of(first), run.of(second), masters.empty() ? nullptr : run.of(weights),
                                kind_of(gradients, run), kind_of(read, run), kind_of(first, run), kind_of(second, run), kind_of(weights, run)};
        kernel(arguments, run.count, step);
    });
}

void multi_tensor_sgd(const TensorList& gradients, const TensorList& weights, const TensorList& momenta, const TensorList& copies, double lr,
                      double momentum, double dampening, double weight_decay, double scale, bool nesterov, bool first_run, bool decay_after,
                      int num_threads) {
    check_threads(num_threads);
    check_list(gradients, "gradients", gradients);
    check_list(weights, "weights", gradients);
    check_list(momenta, "momenta", gradients);
    if (!copies.empty()) check_list(copies, "copies", gradients);
    const auto f = [](double value) { return static_cast<float>(value); };
    const SgdStep step{f(lr), f(momentum), f(1 - dampening), f(weight_decay), f(scale), nesterov, first_run, decay_after};
    const auto kernel = kernels().sgd[momentum != 0];
    each_run(runs_of(gradients), num_threads, [&](std::size_t, const Run& run) {
        const bool copied = !copies.empty();
        const SgdRun arguments{run.of(gradients),       run.of(weights),       run.of(momenta),       copied ? run.of(copies) : nullptr,
                               kind_of(gradients, run), kind_of(weights, run), kind_of(momenta, run), kind_of(copied ? copies : weights, run)};
        kernel(arguments, run.count, step);
    });
}

std::pair<double, std::vector<double>> multi_tensor_l2norm(const TensorList& tensors, int num_threads) {
    check_threads(num_threads);
    check_list(tensors, "tensors", tensors);
    const auto runs = runs_of(tensors);
    std::vector<double> sums(runs.size());
    each_run(runs, num_threads, [&](std::size_t i, const Run& run) {
        sums[i] = kernels().sum_of_squares[table_index(kind_of(tensors, run))](run.of(tensors), run.count);
    });
    // Added up in the order of the runs: a norm does not depend on the threads.
    double total = 0;
    std::vector<double> norms(tensors.size());
    for (std::size_t i = 0; i < runs.size(); ++i) {
        norms[runs[i].tensor] += sums[i];
        total += sums[i];
    }
    for (double& norm : norms) norm = std::sqrt(norm);
    return {std::sqrt(total), norms};
}

bool multi_tensor_scale(const TensorList& inputs, const TensorList& outputs, double scale, const std::optional<TensorView>& flag, int num_threads) {
    constexpr std::int32_t kInfinity = 0x7f800000;
    check_threads(num_threads);
    check_list(inputs, "inputs", inputs);
    check_list(outputs, "outputs", inputs);
    if (flag) {
        check_dtype(*flag, "flag", flag->dtype == DType::Int32, "int32");
        check_numel(*flag, "flag", 1);
    }
    std::atomic<bool> finite{true};
    each_run(runs_of(inputs), num_threads, [&](std::size_t, const Run& run) {
        const auto kernel = kernels().scale[table_index(kind_of(inputs, run))][table_index(kind_of(outputs, run))];
        const std::int32_t largest = kernel(run.of(inputs), run.of(outputs), run.count, static_cast<float>(scale));
        if (largest >= kInfinity) finite.store(false, std::memory_order_relaxed);
    });
    if (flag && !finite.load()) *flag->as<std::int32_t>() = 1;
    return finite.load();
}

}  // namespace fusible::optimizer
