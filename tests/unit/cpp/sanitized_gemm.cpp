// Products of every layout and kind, at the edges of the tiles, with every step of the epilogue.
#include <cstring>

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
                 bias.view, addend.view, 1.0f, 0.5f, 1, pre.view, {}, {}, false, {}, 2);
            gemm(a.view, left_transposed, left, Scalar{0.5f}, b.view, right_transposed, right, Scalar{2.0f}, codes.view, DType::Float8E4M3, turned.view,
                 Scalar{1.0f}, amax.view, false, {}, {}, 1.0f, 0.0f, 2, pre.view, sums.view, {}, false, {}, 2);
        }
}

/// Bytes near 127 for exponents, with which bf16 holds the values.
void fill_near(const Buffer& exponents) {
    const auto count = static_cast<std::size_t>(exponents.view.numel());
    for (std::size_t i = 0; i < count; ++i) exponents.bytes[i] = static_cast<unsigned char>(120 + i % 8);
}

/// Floats that are no powers of two, which are multiplied with sums.
void fill_ordinary(const Buffer& floats) {
    const auto count = static_cast<std::size_t>(floats.view.numel());
    for (std::size_t i = 0; i < count; ++i) {
        const float value = 0.7f + 0.1f * static_cast<float>(i % 9);
        std::memcpy(&floats.bytes[i * sizeof value], &value, sizeof value);
    }
}

/// Both operands in blocks: along rows, and along columns. `near`: with exponents like that, not with any.
void exercise_blocks(std::int64_t m, std::int64_t n, std::int64_t blocks, bool near) {
    const std::int64_t k = 32 * blocks;
    const Buffer out(DType::Float32, m, n), a(DType::Byte, m, k), b(DType::Byte, n, k);
    const auto multiply = [&](DType dtype, const Buffer& left, bool left_turned, const Buffer& left_scales, const Buffer& right, bool right_turned,
                              const Buffer& right_scales) {
        gemm(left.view, left_turned, dtype, Scalar{0.5f}, right.view, right_turned, dtype, Scalar{2.0f}, out.view, DType::Float32, {}, Scalar{1.0f}, {},
             false, {}, {}, 1.0f, 0.0f, 0, {}, {}, right_scales.view, false, left_scales.view, 2);
    };
    const Buffer exponents_a(DType::Byte, m, blocks), exponents_b(DType::Byte, n, blocks);
    const Buffer across_a(DType::Byte, blocks, m), across_b(DType::Byte, blocks, n);
    for (const Buffer* exponents : {&exponents_a, &exponents_b, &across_a, &across_b})
        if (near) fill_near(*exponents);
    multiply(DType::Float8E4M3, a, false, exponents_a, b, true, exponents_b);
    const Buffer turned_a(DType::Byte, k, m), turned_b(DType::Byte, k, n);
    multiply(DType::Float8E5M2, turned_a, true, across_a, turned_b, false, across_b);
    const std::int64_t longer = (k + 127) / 128;
    const Buffer floats_a(DType::Float32, longer, m), floats_b(DType::Float32, longer, n);
    for (const Buffer* floats : {&floats_a, &floats_b})
        if (near) fill_ordinary(*floats);
    multiply(DType::Float8E4M3, a, false, floats_a, b, true, floats_b);
    const Buffer fours_a(DType::Byte, m, k / 2), fours_b(DType::Byte, n, k / 2), bytes_a(DType::Byte, m, 2 * blocks), bytes_b(DType::Byte, n, 2 * blocks);
    multiply(DType::Float4E2M1, fours_a, false, bytes_a, fours_b, true, bytes_b);
    const Buffer powers_a(DType::Float8E8M0, m, blocks), powers_b(DType::Float8E8M0, n, blocks);
    for (const Buffer* exponents : {&powers_a, &powers_b})
        if (near) fill_near(*exponents);
    multiply(DType::Float4E2M1, fours_a, false, powers_a, fours_b, true, powers_b);
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
    for (const std::int64_t m : {1, 7, 30, 200})
        for (const std::int64_t n : {1, 17, 130})
            for (const std::int64_t blocks : {1, 3, 130})
                for (const bool near : {false, true}) exercise_blocks(m, n, blocks, near);
    exercise(3, 5, 4500, DType::Float8E4M3, DType::Float8E4M3, DType::BFloat16);
    exercise(20, 5, 4500, DType::Float8E4M3, DType::Float8E4M3, DType::BFloat16);
});

}  // namespace

}  // namespace fusible::gemm
