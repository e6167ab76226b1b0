// Products of every layout and kind, at the edges of the tiles, with every step of the epilogue.
#include "gemm/gemm.hpp"
#include "sanitized.hpp"

namespace fusible::gemm {

namespace {

void exercise(std::int64_t m, std::int64_t n, std::int64_t k, DType left, DType right, DType out) {
    const Buffer bias(out, 1, n), addend(out, m, n), pre(out, m, n), sums(DType::Float32, 1, n), amax(DType::Float32, 1, 1);
    const Buffer wide(out, m, n), codes(DType::Byte, m, n), turned(DType::Byte, n, m);
    for (const bool left_transposed : {false, true})
        for (const bool right_transposed : {false, true}) {
            const Buffer a(left, left_transposed ? k : m, left_transposed ? m : k), b(right, right_transposed ? n : k, right_transposed ? k : n);
            gemm(a.view, left_transposed, left, Scalar{0.5f}, b.view, right_transposed, right, Scalar{2.0f}, wide.view, out, {}, Scalar{1.0f}, {}, false,
                 bias.view, addend.view, 1.0f, 0.5f, 1, pre.view, {}, {}, false, 2);
            gemm(a.view, left_transposed, left, Scalar{0.5f}, b.view, right_transposed, right, Scalar{2.0f}, codes.view, DType::Float8E4M3, turned.view,
                 Scalar{1.0f}, amax.view, false, {}, {}, 1.0f, 0.0f, 2, pre.view, sums.view, {}, false,
                 2);
        }
}

const Drive driver([] {
    for (const std::int64_t m : {0, 1, 7, 30, 65, 200})
        for (const std::int64_t n : {1, 17, 130, 210})
            for (const std::int64_t k : {0, 1, 70, 131}) {
                exercise(m, n, k, DType::Float8E4M3, DType::Float8E5M2, DType::BFloat16);
                exercise(m, n, k, DType::BFloat16, DType::Float8E4M3, DType::Float32);
                exercise(m, n, k, DType::Float8E5M2, DType::Float16, DType::Float16);
                exercise(m, n, k, DType::BFloat16, DType::BFloat16, DType::BFloat16);
                exercise(m, n, k, DType::Float32, DType::Float32, DType::Float32);
            }
    exercise(3, 5, 4500, DType::Float8E4M3, DType::Float8E4M3, DType::BFloat16);
    exercise(20, 5, 4500, DType::Float8E4M3, DType::Float8E4M3, DType::BFloat16);
});

}  // namespace

}  // namespace fusible::gemm
