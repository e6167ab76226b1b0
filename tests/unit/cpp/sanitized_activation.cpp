// Every activation, at the edges of its runs, tiles and vectors.
#include "activation/activation.hpp"
#include "activation/kernels.hpp"
#include "sanitized.hpp"

namespace fusible::activation {

namespace {

const Scalar kScale{1.5f};

void pointwise(const char* name, std::int64_t rows, std::int64_t cols, DType wide, DType fp8, int threads) {
    const Buffer x(wide, rows, cols), grad(DType::BFloat16, rows, cols), out(wide, rows, cols), codes(DType::Byte, rows, cols);
    const Buffer turned(DType::Byte, cols, rows), sums(DType::Float32, 1, cols), largest(DType::Float32, 1, 1);
    activation(name, x.view, out.view, wide, {}, kScale, {}, false, threads);
    activation(name, x.view, codes.view, fp8, {}, kScale, largest.view, true, threads);
    activation(name, x.view, {}, fp8, turned.view, kScale, {}, false, threads);
    activation_backward(name, grad.view, x.view, out.view, wide, {}, kScale, {}, false, sums.view, threads);
    activation_backward(name, grad.view, x.view, codes.view, fp8, {}, kScale, largest.view, false, {}, threads);
    activation_backward(name, grad.view, x.view, codes.view, fp8, turned.view, kScale, largest.view, false, sums.view, threads);
}

void gated(const char* name, std::int64_t rows, std::int64_t cols, DType wide, DType fp8, int threads) {
    const Buffer x(wide, rows, 2 * cols), grad(DType::Float16, rows, cols), out(wide, rows, cols), codes(DType::Byte, rows, cols);
    const Buffer turned(DType::Byte, cols, rows), both(wide, rows, 2 * cols), both_codes(DType::Byte, rows, 2 * cols);
    const Buffer both_turned(DType::Byte, 2 * cols, rows);
    const float one = 1.0f;
    gated_activation(name, x.view, out.view, wide, {}, kScale, {}, false, one, one, one, one, one, threads);
    gated_activation(name, x.view, codes.view, fp8, {}, kScale, {}, false, one, one, one, one, one, threads);
    gated_activation(name, x.view, codes.view, fp8, turned.view, kScale, {}, false, one, one, one, one, one, threads);
    gated_activation_backward(name, grad.view, x.view, both.view, wide, {}, kScale, {}, false, one, one, one, one, one, threads);
    gated_activation_backward(name, grad.view, x.view, both_codes.view, fp8, {}, kScale, {}, false, one, one, one, one, one, threads);
    gated_activation_backward(name, grad.view, x.view, {}, fp8, both_turned.view, kScale, {}, false, one, one, one, one, one, threads);
}

const Drive driver([] {
    int turn = 0;
    for (const std::int64_t rows : {0, 1, 16, 63, 65, 130}) {
        for (const std::int64_t cols : {0, 1, 15, 33, 64, 127, 1100}) {
            const DType wide = turn % 3 == 0 ? DType::Float32 : turn % 3 == 1 ? DType::Float16 : DType::BFloat16;
            const DType fp8 = ++turn % 2 == 0 ? DType::Float8E4M3 : DType::Float8E5M2;
            for (const char* name : kPointwiseNames) pointwise(name, rows, cols, wide, fp8, 2);
            for (const char* name : kGatedNames) gated(name, rows, cols, wide, fp8, 2);
        }
    }
});

}  // namespace

}  // namespace fusible::activation
