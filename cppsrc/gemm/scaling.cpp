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
bool is_of_zeros(const Operand& x, std::int64_t line, std::int64_t i) {
    if (x.has_fours()) {
        const std::uint8_t* pair = x.data + line * x.row_bytes() + x.bytes_of(i * cast::kMxBlock);
        return std::all_of(pair, pair + x.bytes_of(cast::kMxBlock), [](std::uint8_t codes) { return (codes & 0x77) == 0; });
    }
    const std::uint8_t* code = x.scales.length > 1 ? x.data + line * x.cols + i * cast::kMxBlock : x.data + line * cast::kMxBlock * x.cols + i;
    const std::int64_t step = x.scales.length > 1 ? 1 : x.cols;
    int bits = 0;
    for (int place = 0; place < cast::kMxBlock; ++place) bits |= code[place * step] & 0x7f;
    return bits == 0;
}

/// Whether bf16 holds the values: those of a block with another exponent do where all are zeros.
bool are_plain_bytes(const Operand& x) {
    const Range plain = plain_exponents(x.kind);
    const std::int64_t lines = x.rows / x.scales.lines;
    const std::int64_t count = x.cols / x.scales.length;
    for (std::int64_t line = 0; line < lines; ++line) {
        const auto* const bytes = static_cast<const std::uint8_t*>(x.scales.at(line * x.scales.lines));
        int least = 0xff;
        int most = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            least = std::min<int>(least, bytes[i]);
            most = std::max<int>(most, bytes[i]);
        }
        if (plain.has(least) && plain.has(most)) continue;
        for (std::int64_t i = 0; i < count; ++i)
            if (bytes[i] == 0xff || (!plain.has(bytes[i]) && !is_of_zeros(x, line, i))) return false;
    }
    return true;
}

/// What floats are for bf16: powers of two, with which it holds the values; other numbers, zeros among them; or any that are too near the ends.
Scaling scaling_by_floats(const Operand& x) {
    const Range plain = plain_exponents(x.kind);
    const std::int64_t lines = (x.rows + x.scales.lines - 1) / x.scales.lines;
    std::int32_t least = plain.first;
    std::int32_t most = plain.last;
    bool powers = true;
    for (std::int64_t col = 0; col < x.cols; col += x.scales.length) {
        const auto* const floats = static_cast<const std::uint8_t*>(x.scales.at(0, col));
        for (std::int64_t i = 0; i < lines; ++i) {
            std::int32_t bits;
            std::memcpy(&bits, floats + i * x.scales.line_step * x.scales.width, sizeof bits);
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

Scaling scaling_for(const Kernels& kernels, const Operand& x) {
    const bool halves = kernels.units_kind == ElementKind::BFloat16;
    if (!halves || x.coding == codes::Coding::Fp4) return Scaling::OfValues;
    if (x.scales.width > 1) return scaling_by_floats(x);
    return are_plain_bytes(x) ? Scaling::OfValues : Scaling::OfFloats;
}

}  // namespace fusible::gemm
