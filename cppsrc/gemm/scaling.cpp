#include "gemm/scaling.hpp"

#include <algorithm>
#include <cstring>

#include "cast/kernels.hpp"

namespace fusible::gemm {

namespace {

/// Biased exponents of scales with which every code is within 2^-kPlainExponent .. 2^kPlainExponent, as values of bf16 are that are multiplied exactly.
struct Range {
    int first;
    int last;

    bool has(int exponent) const { return exponent >= first && exponent <= last; }
};

Range plain_exponents(ElementKind kind) {
    // Codes of E4M3 lie within 2^-9 and 2^9, those of E5M2 within 2^-16 and 2^16.
    const int reach = kind == ElementKind::E5M2 ? 16 : 9;
    return {127 - cast::kPlainExponent + reach, 127 + cast::kPlainExponent - reach};
}

/// Whether the codes of a block are zeros: that of the `line`-th line of scales, the i-th of its own.
bool is_of_zeros(const Operand& b, std::int64_t line, std::int64_t i) {
    const std::uint8_t* code = b.transposed ? b.data + line * b.cols + i * cast::kMxBlock : b.data + line * cast::kMxBlock * b.cols + i;
    const std::int64_t step = b.transposed ? 1 : b.cols;
    int bits = 0;
    for (int place = 0; place < cast::kMxBlock; ++place) bits |= code[place * step] & 0x7f;
    return bits == 0;
}

/// Whether bf16 holds the values: those of a block with another exponent do where all are zeros.
bool are_plain_bytes(const Operand& b) {
    const Range plain = plain_exponents(b.kind);
    const std::int64_t lines = b.rows / b.scales.lines;
    const std::int64_t count = b.cols / b.scales.length;
    for (std::int64_t line = 0; line < lines; ++line) {
        const auto* const bytes = static_cast<const std::uint8_t*>(b.scales.at(line * b.scales.lines));
        int least = 0xff;
        int most = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            least = std::min<int>(least, bytes[i]);
            most = std::max<int>(most, bytes[i]);
        }
        if (plain.has(least) && plain.has(most)) continue;
        for (std::int64_t i = 0; i < count; ++i)
            if (bytes[i] == 0xff || (!plain.has(bytes[i]) && !is_of_zeros(b, line, i))) return false;
    }
    return true;
}

/// What floats are for bf16: powers of two, with which it holds the values; other numbers, zeros among them; or any that are too near the ends.
Scaling scaling_by_floats(const Operand& b) {
    const Range plain = plain_exponents(b.kind);
    const std::int64_t lines = (b.rows + b.scales.lines - 1) / b.scales.lines;
    std::int32_t least = plain.first;
    std::int32_t most = plain.last;
    bool powers = true;
    for (std::int64_t col = 0; col < b.cols; col += b.scales.length) {
        const auto* const floats = static_cast<const std::uint8_t*>(b.scales.at(0, col));
        for (std::int64_t i = 0; i < lines; ++i) {
            std::int32_t bits;
            std::memcpy(&bits, floats + i * b.scales.line_step * b.scales.width, sizeof bits);
            const std::int32_t size = bits & 0x7fffffff;
            const std::int32_t exponent = size == 0 ? plain.first : size >> 23;
            least = std::min(least, exponent);
            most = std::max(most, exponent);
            powers = powers && bits > 0 && (bits & 0x7fffff) == 0;
        }
    }
    if (!plain.has(least) || !plain.has(most)) return Scaling::OfFloats;
    return powers ? Scaling::OfValues : Scaling::OfSums;
}

}  // namespace

Scaling scaling_for(const Kernels& kernels, const Operand& b) {
    const bool halves = kernels.units_kind == ElementKind::BFloat16;
    if (!halves || b.coding == codes::Coding::Fp4) return Scaling::OfValues;
    if (b.scales.width > 1) return scaling_by_floats(b);
    return are_plain_bytes(b) ? Scaling::OfValues : Scaling::OfFloats;
}

}  // namespace fusible::gemm
