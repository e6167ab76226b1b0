// Keys and values as the products read them.
#pragma once

#include <cstring>

#include "attention/problem.hpp"

namespace fusible::attention {

constexpr std::int64_t kRunKeys = 64;  // packed at once: whole panels and units at every level

/// Packs keys and values of a sequence and a kv head, from wherever their pages are.
class KeyPacker {
  public:
    KeyPacker(const Kernels& kernels, const Problem& problem) : kernels_(kernels), p_(problem) {}

    std::int64_t units(std::int64_t elements) const { return ceil_div(elements, kernels_.depth); }
    std::int64_t value_panels() const { return ceil_div(p_.v.cols, kernels_.panel); }

    /// Packed units of `keys` keys, and of their values: a whole number of tiles' worth.
    std::int64_t key_units(std::int64_t keys) const { return round_up(keys, kRunKeys) * units(p_.k.cols); }
    std::int64_t value_units(std::int64_t keys) const { return round_up(keys, kRunKeys) / kernels_.depth * kernels_.panel * value_panels(); }

    /// Elements that `gather` needs room for.
    std::int64_t gathered_bytes() const { return p_.pages_k == nullptr ? 0 : kRunKeys * std::max(p_.k.cols, p_.v.cols) * p_.k.width; }

    /// Keys [first, first + count), at most a run: panels of [units of width, panel].
    void pack_keys(const Sequence& s, std::int64_t head, std::int64_t first, std::int64_t count, std::uint8_t* gathered, std::int32_t* out) const {
        const Rows rows = find(s, p_.k, p_.pages_k, head, first, count, gathered);
        for (std::int64_t j = 0; j < count; j += kernels_.panel) {
            const std::int64_t some = std::min<std::int64_t>(kernels_.panel, count - j);
            const auto* const from = rows.data + j * rows.stride * p_.k.width;
            kernels_.pack_turned[table_index(p_.k.kind)](from, rows.stride, some, p_.k.cols, out + j * units(p_.k.cols));
        }
    }

    /// Their values: panels of [units of keys, panel], `stride` apart.
    void pack_values(const Sequence& s, std::int64_t head, std::int64_t first, std::int64_t count, std::uint8_t* gathered, std::int32_t* out,
                     std::ptrdiff_t stride) const {
        const Rows rows = find(s, p_.v, p_.pages_v, head, first, count, gathered);
        for (std::int64_t c = 0; c < value_panels(); ++c) {
            const std::int64_t col = c * kernels_.panel;
            const std::int64_t cols = std::min<std::int64_t>(kernels_.panel, p_.v.cols - col);
            std::int32_t* const panel = out + c * stride;
            if (cols < kernels_.panel) std::fill(panel, panel + units(count) * kernels_.panel, 0);
            kernels_.pack_across[table_index(p_.v.kind)](rows.data + col * p_.v.width, rows.stride, count, cols, panel, kernels_.panel);
        }
    }

    /// Brings the keys and values [first, first + count) of `heads` heads from `head` on into the cache, in the order of their addresses: memory
    /// is read at its full rate in that order, and at a fraction of it in that of packing, head by head.
    void fetch(const Sequence& s, std::int64_t head, std::int64_t heads, std::int64_t first, std::int64_t count) const {
        fetch(s, p_.k, p_.pages_k, head, heads, first, count);
        fetch(s, p_.v, p_.pages_v, head, heads, first, count);
    }

  private:
    struct Rows {
        const std::uint8_t* data;
        std::int64_t stride;
    };

    const std::uint8_t* row(const Sequence& s, const TokenView& x, const std::int32_t* pages, std::int64_t head, std::int64_t j) const {
        if (pages == nullptr) return x.at(s.index, s.first_key + j, head);
        return x.at(pages[s.index * p_.max_pages + j / x.tokens], j % x.tokens, head);
    }

    void fetch(const Sequence& s, const TokenView& x, const std::int32_t* pages, std::int64_t head, std::int64_t heads, std::int64_t first,
               std::int64_t count) const {
        if (x.cols == 0) return;  // heads without elements have no memory, whatever their strides say
        constexpr std::int64_t kLine = 64;
        const bool by_token = x.head_stride <= x.token_stride;
        const std::int64_t bytes = (by_token ? (heads - 1) * x.head_stride + x.cols : x.cols) * x.width;
        for (std::int64_t h = head; h < head + (by_token ? 1 : heads); ++h)
            for (std::int64_t j = first; j < first + count; ++j) {
                const volatile std::uint8_t* const source = row(s, x, pages, h, j);
                for (std::int64_t at = 0; at < bytes; at += kLine) static_cast<void>(source[at]);
            }
    }

    Rows find(const Sequence& s, const TokenView& x, const std::int32_t* pages, std::int64_t head, std::int64_t first, std::int64_t count,
              std::uint8_t* gathered) const {
        const bool gathers = pages != nullptr && first % x.tokens + count > x.tokens;
        if (!gathers) return {row(s, x, pages, head, first), x.token_stride};
        const auto bytes = static_cast<std::size_t>(x.cols * x.width);
        std::uint8_t* to = gathered;
        for (std::int64_t j = 0; j < count; ++j, to += bytes) std::memcpy(to, row(s, x, pages, head, first + j), bytes);
        return {gathered, x.cols};
    }

    const Kernels& kernels_;
    const Problem& p_;
};

}  // namespace fusible::attention
