#include "optimizer/optimizer.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>

#include "optimizer/kernels.hpp"
#include "optimizer/runs.hpp"

namespace fusible::optimizer {

namespace {

constexpr float kE4M3Range = 448.0f;
constexpr float kFp16Range = 65504.0f / 2;
constexpr float kLeastScale = 0x1p-126f;  // the smallest normal number, whose inverse is finite

ElementKind kind_of(DType dtype) {
    switch (dtype) {
        case DType::Float16:
            return ElementKind::Float16;
        case DType::BFloat16:
        case DType::Int16:  // the remainder of one
            return ElementKind::BFloat16;
        case DType::Byte:
            return ElementKind::E4M3;
        default:
            return ElementKind::Float32;
    }
}

Elements elements(const TensorList& tensors, const Run& run, float decode = 1.0f, float encode = 1.0f) {
    return {run.of(tensors), kind_of(tensors[run.tensor].dtype), decode, encode};
}

Elements nothing() { return {nullptr, ElementKind::Float32, 1.0f, 1.0f}; }

/// A list of tensors of which some have a scale; none does where `scales` is empty.
struct State {
    const TensorList& tensors;
    const TensorList& scales;

    bool scaled(std::size_t i) const { return !scales.empty() && scales[i].numel() == 1; }
    bool scaled() const {
        for (std::size_t i = 0; i < scales.size(); ++i)
            if (scaled(i)) return true;
        return false;
    }
    float decode(std::size_t i) const { return scaled(i) ? *scales[i].as<float>() : 1.0f; }
};

/// What tensors are encoded by, and the scales that they will have: of first moments, second ones and masters.
struct Next {
    std::array<float, 3> encode{1.0f, 1.0f, 1.0f};
    std::array<float, 3> scale{1.0f, 1.0f, 1.0f};

    /// Of the bits of the largest magnitude of all; NaN and infinity stay what they are.
    void choose(std::size_t place, std::int32_t amax, DType dtype) {
        const bool coded = dtype == DType::Byte;
        float largest;
        std::memcpy(&largest, &amax, sizeof largest);
        float own = largest / (coded ? kE4M3Range : kFp16Range);
        if (own < kLeastScale) own = kLeastScale;
        encode[place] = 1.0f / own;
        scale[place] = coded ? 1.0f / encode[place] : own;
    }
};

/// Raises unless the tensors pair up with `like` and are wide floats, E4M3 in bytes or, where that is allowed, remainders, and unless just those have a
/// scale that are float16 or E4M3.
void check_state(const State& state, const char* name, const char* scales, const TensorList& like, const TensorList* remainders_of = nullptr) {
    for (const TensorList* each : {&state.tensors, &state.scales})
        if (each->size() != like.size())
            throw ShapeError(expected(std::to_string(like.size()) + " tensors", each == &state.tensors ? name : scales, std::to_string(each->size()),
                                      "pass one per parameter"));
    for (std::size_t i = 0; i < like.size(); ++i) {
        const DType dtype = state.tensors[i].dtype;
        const bool remainder = remainders_of != nullptr && dtype == DType::Int16 && (*remainders_of)[i].dtype == DType::BFloat16;
        check_dtype(state.tensors[i], name, is_wide_float(dtype) || dtype == DType::Byte || remainder,
                    "float32, bfloat16, float16, uint8 or, for a bfloat16 weight, int16");
        check_numel(state.tensors[i], name, like[i].numel());
        check_float32(state.scales[i], scales, dtype == DType::Float16 || dtype == DType::Byte ? 1 : 0);
    }
}

struct AdamLists {
    const TensorList& gradients;
    const TensorList& weights;
    std::array<State, 3> states;  // first moments, second ones, and masters, which may be none

    const State& masters() const { return states[2]; }
    bool has_masters() const { return !masters().tensors.empty(); }
    bool splits(std::size_t i) const { return has_masters() && masters().tensors[i].dtype == DType::Int16; }
};

AdamRun run_of(const AdamLists& of, const Run& run, const Next& next) {
    const std::size_t i = run.tensor;
    const auto state = [&](std::size_t place) {
        return elements(of.states[place].tensors, run, of.states[place].decode(i), next.encode[place]);
    };
    const Elements weight = elements(of.weights, run);
    const bool split = of.splits(i);
    const bool copied = of.has_masters() && !split;
    return {elements(of.gradients, run), copied ? state(2) : weight, state(0), state(1), copied ? weight : nothing(),
            split ? static_cast<std::int16_t*>(run.of(of.masters().tensors)) : nullptr};
}

/// The scales that belong to what a step will make, of each tensor.
std::vector<Next> look_ahead(const AdamLists& of, const std::vector<Run>& runs, const AdamStep& step, Decay decay, int num_threads) {
    std::vector<AdamAmaxes> found(runs.size());
    const auto amaxes = kernels().adam_amaxes[static_cast<int>(decay)];
    each_run(runs, num_threads, [&](std::size_t at, const Run& run) {
        found[at] = amaxes(run_of(of, run, {}), run.count, step, of.masters().scaled());
    });
    std::vector<std::array<std::int32_t, 3>> largest(of.gradients.size());
    for (std::size_t at = 0; at < runs.size(); ++at) {
        const std::int32_t each[] = {found[at].first, found[at].second, found[at].weight};
        for (std::size_t place = 0; place < 3; ++place) {
            std::int32_t& amax = largest[runs[at].tensor][place];
            amax = std::max(amax, each[place]);
        }
    }
    std::vector<Next> next(of.gradients.size());
    for (std::size_t i = 0; i < next.size(); ++i)
        for (std::size_t place = 0; place < 3; ++place)
            if (of.states[place].scaled(i)) next[i].choose(place, largest[i][place], of.states[place].tensors[i].dtype);
    return next;
}

/// One step; where something has a scale, two passes: the first one looks how large the new numbers are.
void step_adam(const AdamLists& of, double lr, double beta1, double beta2, double epsilon, double correction1, double correction2, bool decoupled,
               double weight_decay, int num_threads) {
    const auto f = [](double value) { return static_cast<float>(value); };
    const AdamStep step{f(lr), f(beta1), f(beta2), f(1 - beta1), f(1 - beta2), f(epsilon), f(1 / correction1), f(1 / correction2), f(weight_decay)};
    const Decay decay = weight_decay == 0 ? Decay::Nothing : decoupled ? Decay::Update : Decay::Gradient;
    const std::vector<Run> runs = runs_of(of.gradients);
    std::vector<Next> next(of.gradients.size());
    if (std::any_of(of.states.begin(), of.states.end(), [](const State& state) { return state.scaled(); }))
        next = look_ahead(of, runs, step, decay, num_threads);
    const auto kernel = kernels().adam[static_cast<int>(decay)];
    each_run(runs, num_threads, [&](std::size_t, const Run& run) { kernel(run_of(of, run, next[run.tensor]), run.count, step); });
    for (std::size_t i = 0; i < next.size(); ++i)
        for (std::size_t place = 0; place < 3; ++place)
            if (of.states[place].scaled(i)) *of.states[place].scales[i].as<float>() = next[i].scale[place];
}

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
    const TensorList none;
    step_adam({gradients, weights, {State{first, none}, State{second, none}, State{masters, none}}}, lr, beta1, beta2, epsilon, correction1, correction2,
              decoupled, weight_decay, num_threads);
}

void multi_tensor_adam_scaled(const TensorList& gradients, const TensorList& weights, const TensorList& first, const TensorList& second,
                              const TensorList& first_scales, const TensorList& second_scales, const TensorList& masters,
                              const TensorList& master_scales, double lr, double beta1, double beta2, double epsilon, double correction1,
                              double correction2, bool decoupled, double weight_decay, int num_threads) {
    check_threads(num_threads);
    check_list(gradients, "gradients", gradients);
    check_list(weights, "weights", gradients);
    check_state({first, first_scales}, "first", "first_scales", gradients);
    check_state({second, second_scales}, "second", "second_scales", gradients);
    if (!masters.empty() || !master_scales.empty()) check_state({masters, master_scales}, "masters", "master_scales", gradients, &weights);
    const std::array<State, 3> states{State{first, first_scales}, State{second, second_scales}, State{masters, master_scales}};
    step_adam({gradients, weights, states}, lr, beta1, beta2, epsilon, correction1, correction2, decoupled, weight_decay, num_threads);
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
        const SgdRun arguments{elements(gradients, run), elements(weights, run), elements(momenta, run), copied ? elements(copies, run) : nothing()};
        kernel(arguments, run.count, step);
    });
}

std::pair<double, std::vector<double>> multi_tensor_l2norm(const TensorList& tensors, int num_threads) {
    check_threads(num_threads);
    check_list(tensors, "tensors", tensors);
    const auto runs = runs_of(tensors);
    std::vector<double> sums(runs.size());
    each_run(runs, num_threads, [&](std::size_t i, const Run& run) {
        sums[i] = kernels().sum_of_squares[table_index(kind_of(tensors[run.tensor].dtype))](run.of(tensors), run.count);
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
        const auto kernel = kernels().scale[table_index(kind_of(inputs[run.tensor].dtype))][table_index(kind_of(outputs[run.tensor].dtype))];
        const std::int32_t largest = kernel(run.of(inputs), run.of(outputs), run.count, static_cast<float>(scale));
        if (largest >= kInfinity) finite.store(false, std::memory_order_relaxed);
    });
    if (flag && !finite.load()) *flag->as<std::int32_t>() = 1;
    return finite.load();
}

}  // namespace fusible::optimizer
