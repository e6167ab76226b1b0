#include "gemm/gemm.hpp"

#include <optional>

#include "cast/destination.hpp"
#include "gemm/schedules.hpp"
#include "runtime/checks.hpp"
#include "runtime/select.hpp"
#include "runtime/threads.hpp"

namespace fusible::gemm {

namespace {

const Kernels& kernels_for(ElementKind a, ElementKind b) {
#if defined(FUSIBLE_X86_KERNELS)
    const auto& halves = current_level() == Level::Amx ? amx::kernels : avx512bf16::kernels;
    if (current_level() >= Level::Avx512Bf16 && halves.takes[table_index(a)] && halves.takes[table_index(b)]) return halves;
#endif
    return FUSIBLE_SELECT(kernels);
}

/// Those for `m` rows of a product whose right operand is codes that are read as they lie; null where it is not, or the rows are many, or dot products
/// of bfloat16 serve: for codes with one scale, where there are no tiles. An EPYC is fast at these (docs/performance.md); on a Xeon 32 elements take two
/// cycles by them, and 16 floats take half a cycle.
const codes::Kernels* codes_for(std::int64_t m, const Operand& a, const Operand& b) {
    if (m > kMaxFewCodedRows || a.transposed || !b.transposed || b.coding == codes::Coding::None) return nullptr;
    bool by_tiles = false;
#if defined(FUSIBLE_X86_KERNELS)
    by_tiles = current_level() == Level::Amx && amx::kernels.takes[table_index(a.kind)] && !a.has_blocks();
    const bool dots = current_level() == Level::Avx512Bf16 && avx512bf16::kernels.takes[table_index(a.kind)];
    if (dots && b.scales.data == nullptr) return nullptr;
#endif
    return m <= (by_tiles ? kMaxFewCodedRows : kMaxFewRows) ? &codes::kernels() : nullptr;
}

/// The kernels of a product, where they take the scales of each operand, and whether bf16 has the values of A.
struct Choice {
    const Kernels& kernels;
    Scaling a;
    Scaling b;
    bool halves_hold_a;
};

Choice choose(const Operand& a, const Operand& b, bool reads_codes) {
    const Kernels& fastest = kernels_for(a.kind, b.kind);
    const Scaling of_a = a.has_blocks() ? scaling_for(fastest, a) : Scaling::None;
    const Scaling of_b = b.has_blocks() && !reads_codes ? scaling_for(fastest, b) : Scaling::None;
    const bool halves_hold_a = a.kind >= ElementKind::BFloat16 && (of_a == Scaling::None || of_a == Scaling::OfValues);
    if (reads_codes || of_a == Scaling::OfFloats || of_b == Scaling::OfFloats) {
        const auto in_floats = [](Scaling of) { return of == Scaling::None ? of : Scaling::OfFloats; };
        return {FUSIBLE_SELECT(kernels), in_floats(of_a), in_floats(of_b), halves_hold_a};
    }
#if defined(FUSIBLE_X86_KERNELS)
    if (current_level() == Level::Avx512Bf16) {
        if (a.has_fours() && a.coding == b.coding) return {avx512bf16::kernels_of_integers, Scaling::OfSums, Scaling::OfSums, halves_hold_a};
        if (of_a == Scaling::OfSums || of_b == Scaling::OfSums) return {avx512bf16::kernels_of_sums, of_a, of_b, halves_hold_a};
    }
#endif
    return {fastest, of_a, of_b, halves_hold_a};
}

void check_wide(const OptionalView& view, const char* name, std::int64_t count) {
    if (!view) return;
    check_dtype(*view, name, is_wide_float(view->dtype), "float32, float16 or bfloat16");
    check_numel(*view, name, count);
}

void run(Product& p) {
    const Plan plan = plan_for(p);
    switch (plan.schedule) {
        case Schedule::FewRows:
            return run_few_rows(p, plan);
        case Schedule::FewCodes:
            return run_few_codes(p, plan);
        case Schedule::Turned:
            return run_turned(p, plan);
        case Schedule::WholeA:
            return run_whole_a(p, plan);
        case Schedule::Blocked:
            return run_blocked(p, plan);
    }
}

GeluStep read_gelu(int gelu, const OptionalView& pre_gelu) {
    if (gelu < 0 || gelu > 2) throw ArgumentError(expected("0, 1 or 2", "gelu", std::to_string(gelu), "pass one of the three"));
    if (gelu == 2 && !pre_gelu) throw ArgumentError(expected("a tensor", "pre_gelu with gelu 2", "None", "pass the input of the GELU"));
    return static_cast<GeluStep>(gelu);
}

}  // namespace

Scratch& scratch() {
    thread_local Scratch of_thread;
    return of_thread;
}

void gemm(const TensorView& left, bool left_transposed, DType left_dtype, Scalar left_scale, const TensorView& right, bool right_transposed,
          DType right_dtype, Scalar right_scale, const OptionalView& dst, DType dtype, const OptionalView& dst_transposed, Scalar scale,
          const OptionalView& amax, bool accumulate_amax, const OptionalView& bias, const OptionalView& addend, float alpha, float beta, int gelu,
          const OptionalView& pre_gelu, const OptionalView& column_sums, const OptionalView& right_scales, bool right_tiled,
          const OptionalView& left_scales, int num_threads) {
    check_threads(num_threads);
    for (const auto& [view, name] : {std::pair(&dst, "dst"), std::pair(&dst_transposed, "dst_transposed"), std::pair(&pre_gelu, "pre_gelu"),
                                     std::pair(&column_sums, "column_sums")}) {
        if (!*view) continue;
        check_elsewhere(**view, name, left, "left");
        check_elsewhere(**view, name, right, "right");
        if (right_scales) check_elsewhere(**view, name, *right_scales, "right_scales");
        if (left_scales) check_elsewhere(**view, name, *left_scales, "left_scales");
    }
    const Operand a = left_scales ? read_blocks(left, left_transposed, !left_transposed, left_dtype, left_scale, *left_scales, false, "left")
                                  : read_operand(left, left_transposed, left_dtype, left_scale, "left");
    const Operand b = right_scales ? read_blocks(right, right_transposed, right_transposed, right_dtype, right_scale, *right_scales, right_tiled, "right")
                                   : read_operand(right, right_transposed, right_dtype, right_scale, "right");
    const std::int64_t m = a.transposed ? a.cols : a.rows;
    const std::int64_t k = a.transposed ? a.rows : a.cols;
    const std::int64_t n = b.transposed ? b.rows : b.cols;
    const std::int64_t other = b.transposed ? b.cols : b.rows;
    if (k != other)
        throw ShapeError(expected(std::to_string(k) + " in the contracted dimension", "right", std::to_string(other), "check the transposes"));
    product(m, n, "the result");
    const cast::Output out = cast::read_output(dst, dtype, dst_transposed, scale, m, n);
    const GeluStep step = read_gelu(gelu, pre_gelu);
    check_wide(bias, "bias", n);
    check_wide(addend, "addend", m * n);
    check_wide(pre_gelu, "pre_gelu", m * n);
    if (beta != 0.0f && !addend) throw ArgumentError(expected("a tensor", "addend with beta", "None", "pass one, or beta 0"));
    if (amax) check_float32(*amax, "amax", 1);
    if (column_sums) check_float32(*column_sums, "column_sums", n);

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
    const auto work = static_cast<std::size_t>(m * n) * static_cast<std::size_t>(k) / 16;
    const codes::Kernels* const codes = codes_for(m, a, b);
    const auto [kernels, scaling_a, scaling_b, halves_hold_a] = choose(a, b, codes != nullptr);
    const std::int64_t chunk_rows = chunk_rows_for(m, k, dst_transposed.has_value(), kernels.reads_tiles);
    Product product{kernels, codes, a, b, scaling_a, scaling_b, halves_hold_a, m, n, k, chunk_rows, epilogue, nullptr, threads_for(num_threads, work), {}};
    std::optional<cast::ColumnSums> sums;
    if (column_sums) product.column_sums = &sums.emplace(m, n, chunk_rows);
    if (m * n > 0) run(product);
    if (amax) product.maximum.write(*amax->as<float>(), accumulate_amax);
    if (sums) sums->total(column_sums->as<float>());
}

}  // namespace fusible::gemm
