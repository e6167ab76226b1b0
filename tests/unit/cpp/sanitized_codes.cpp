// Products with codes that are read as they lie, or packed with their scales: every format, with blocks and ends of them.
#include "gemm/gemm.hpp"
#include "sanitized.hpp"

namespace fusible::codes {

namespace {

void exercise(std::int64_t m, std::int64_t n, std::int64_t k, DType left, DType right, const Buffer* scales, bool tiled) {
    const Buffer a(left, m, k), b(DType::Byte, n, right == DType::Float4E2M1 ? k / 2 : k), out(DType::BFloat16, m, n);
    const OptionalView blocks = scales == nullptr ? OptionalView{} : OptionalView{scales->view};
    gemm::gemm(a.view, false, left, Scalar{0.5f}, b.view, true, right, Scalar{2.0f}, out.view, DType::BFloat16, {}, Scalar{1.0f}, {}, false, {}, {}, 1.0f,
               0.0f, 0, {}, {}, blocks, tiled, {}, 2);
}

/// With scales of blocks along the columns of the right operand; bytes near 127, with which bf16 holds the values, and any.
void exercise_across(std::int64_t m, std::int64_t n, std::int64_t k, DType left, DType right) {
    const Buffer a(left, m, k), down(left, k, m), b(DType::Byte, k, n), any(DType::Byte, k / 32, n), usual(DType::Byte, k / 32, n), out(DType::Float32, m, n);
    for (std::int64_t i = 0; i < k / 32 * n; ++i) usual.bytes[static_cast<std::size_t>(i)] = static_cast<unsigned char>(120 + i % 8);
    for (const Buffer* scales : {&any, &usual})
        for (const bool transposed : {false, true})
            gemm::gemm(transposed ? down.view : a.view, transposed, left, Scalar{0.5f}, b.view, false, right, Scalar{2.0f}, out.view, DType::Float32, {},
                       Scalar{1.0f}, {}, false, {}, {}, 1.0f, 0.0f, 0, {}, {}, OptionalView{scales->view}, false, {}, 2);
}

const Drive driver([] {
    for (const std::int64_t m : {0, 1, 2, 5, 8, 13, 24, 25, 70})
        for (const std::int64_t n : {1, 8, 65, 130})
            for (const std::int64_t k : {0, 32, 96, 1024, 1312}) {
                const Buffer exponents(DType::Byte, n, k / 32), small(DType::Byte, n, k / 16);
                const std::int64_t ragged = k == 0 ? 0 : k - 3;
                const Buffer rows(DType::Float32, (k + 127) / 128, n), squares(DType::Float32, (n + 127) / 128, (k + 127) / 128);
                for (const DType right : {DType::Float8E4M3, DType::Float8E5M2}) {
                    exercise(m, n, ragged, DType::BFloat16, right, nullptr, false);
                    exercise(m, n, k, DType::Float32, right, &exponents, false);
                    exercise_across(m, n, k, DType::BFloat16, right);
                    exercise_across(m, n, k, DType::Float32, right);
                    exercise(m, n, ragged, DType::Float8E5M2, right, &rows, false);
                    exercise(m, n, ragged, DType::Float16, right, &squares, true);
                }
                const Buffer powers(DType::Float8E8M0, n, k / 32);
                for (const Buffer* bytes : {&small, &powers}) exercise(m, n, k, DType::BFloat16, DType::Float4E2M1, bytes, false);
            }
});

}  // namespace

}  // namespace fusible::codes
