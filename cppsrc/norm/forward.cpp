#include <algorithm>

#include "cast/destination.hpp"
#include "norm/norm.hpp"
#include "norm/parameters.hpp"
#include "runtime/threads.hpp"

namespace fusible::norm {

namespace {

constexpr std::int64_t kElements = 16 * 1024;  // of a task without a transposed copy

void check(const TensorView& x, const TensorView& weight, const OptionalView& bias, const OptionalView& mu, const TensorView& rsigma,
           const cast::Output& out, const OptionalView& amax, int num_threads) {
    check_threads(num_threads);
    check_parameter(weight, "weight", x.cols());
    if (bias && !mu) throw ArgumentError(expected("no bias", "RMSNorm", "one", "pass mu for LayerNorm"));
    if (bias) check_parameter(*bias, "bias", x.cols());
    if (mu) check_float32(*mu, "mu", x.rows());
    check_float32(rsigma, "rsigma", x.rows());
    if (amax && is_wide(out.kind)) throw ArgumentError(expected("no amax", "an unquantized output", "one", "ask for FP8 to get it"));
    if (amax) check_float32(*amax, "amax", 1);
}

}  // namespace

void norm_fwd(const TensorView& x, const TensorView& weight, const OptionalView& bias, const OptionalView& mu, const TensorView& rsigma,
              Scalar eps, bool zero_centered_gamma, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed, Scalar scale,
              const OptionalView& amax, bool accumulate_amax, int num_threads) {
    const int source = table_index(wide_kind(x, "x"));
    const int norm = norm_index(mu.has_value());
    const std::int64_t rows = x.rows();
    const std::int64_t cols = x.cols();
    const cast::Output out = cast::read_output(dst, dtype, dst_transposed, scale, rows, cols);
    check(x, weight, bias, mu, rsigma, out, amax, num_threads);
    const std::vector<float> gamma = widened(weight, zero_centered_gamma ? 1.0f : 0.0f);
    const std::vector<float> beta = bias ? widened(*bias, 0.0f) : std::vector<float>(mu ? gamma.size() : 0, 0.0f);  // RMSNorm reads none
    const NormForward job{x.data, gamma.data(), beta.data(), eps.value, mu ? mu->as<float>() : nullptr, rsigma.as<float>(), out};
    const Kernels& table = kernels();
    const auto kernel = out.transposed != nullptr ? table.forward_transposed[norm][source] : table.forward[norm][source];
    const std::int64_t height = out.transposed != nullptr ? cast::kTile : std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, cols));
    const auto bytes = static_cast<std::size_t>(x.numel()) * size_of(x.dtype);
    cast::Maximum maximum;
    parallel_for(static_cast<std::size_t>((rows + height - 1) / height), threads_for(num_threads, bytes), [&](std::size_t task) {
        const auto begin = static_cast<std::int64_t>(task) * height;
        maximum.raise(kernel(job, begin, std::min(rows, begin + height)));
    });
    if (amax) maximum.write(*amax->as<float>(), accumulate_amax);
}

}  // namespace fusible::norm
