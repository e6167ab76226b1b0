// An attention problem as the blocks see it: where tokens lie, how long sequences are, and which keys a query sees.
#pragma once

#include <algorithm>
#include <vector>

#include "attention/attention.hpp"
#include "attention/kernels.hpp"
#include "runtime/round_up.hpp"

namespace fusible::attention {

/// [batches, tokens, heads, cols], or [tokens, heads, cols] where all sequences lie one after another.
struct TokenView {
    std::uint8_t* data;
    ElementKind kind;
    std::int64_t width;  // bytes of an element
    bool flat;
    std::int64_t batches;
    std::int64_t tokens;
    std::int64_t heads;
    std::int64_t cols;
    std::int64_t batch_stride;  // in elements
    std::int64_t token_stride;
    std::int64_t head_stride;

    std::uint8_t* at(std::int64_t batch, std::int64_t token, std::int64_t head) const {
        return data + (batch * batch_stride + token * token_stride + head * head_stride) * width;
    }
};

/// Query i sees the keys [i - behind, i + ahead] of those that there are; queries from `queries` on are padding and see none.
struct Sequence {
    std::int64_t index;
    std::int64_t first_query;  // in the tensor's batch, as the next
    std::int64_t first_key;
    std::int64_t rows;  // queries that memory holds, padding included
    std::int64_t queries;
    std::int64_t keys;
    std::int64_t ahead;
    std::int64_t behind;

    /// The keys of query i, of those from `first` on.
    Span seen(std::int64_t i, std::int64_t first, std::int64_t count) const {
        if (i >= queries) return {0, 0};
        return clip(i - behind - first, std::min(i + ahead + 1, keys) - first, count);
    }

    /// The queries that see key j, of those from `first` on.
    Span seers(std::int64_t j, std::int64_t first, std::int64_t count) const {
        if (j >= keys) return {0, 0};
        return clip(j - ahead - first, std::min(j + behind + 1, queries) - first, count);
    }

  private:
    static Span clip(std::int64_t begin, std::int64_t end, std::int64_t count) {
        return {static_cast<int>(std::clamp<std::int64_t>(begin, 0, count)), static_cast<int>(std::clamp<std::int64_t>(end, 0, count))};
    }
};

/// Masks, lengths and dropout as Python gives them.
struct Rules {
    float scale;
    bool causal;
    bool causal_bottom_right;
    int window_left;
    int window_right;
    bool window_bottom_right;
    OptionalView lengths_q;  // cumulative, as the next
    OptionalView lengths_kv;
    OptionalView starts_q;
    OptionalView starts_kv;
    OptionalView page_table_k;
    OptionalView page_table_v;
    OptionalView extra_logits;
    double dropout;
    OptionalView rng_state;
    std::int64_t max_seqlen_q;
    std::int64_t max_seqlen_kv;
};

struct Problem {
    TokenView q;
    TokenView k;
    TokenView v;
    std::vector<Sequence> sequences;
    const std::int32_t* pages_k;  // [sequences, max_pages], or null
    const std::int32_t* pages_v;
    std::int64_t max_pages;
    float scale;
    const float* extra;  // of each head, or null
    Dropout dropout;
    std::uint64_t first_counter;
    std::int64_t max_seqlen_q;

    /// Query heads of a kv head.
    std::int64_t share() const { return q.heads / k.heads; }

    std::uint64_t counter(std::int64_t sequence, std::int64_t head, std::int64_t query, std::int64_t key) const {
        const auto row = static_cast<std::uint64_t>(sequence * q.heads + head) * static_cast<std::uint64_t>(max_seqlen_q);
        return first_counter + (row + static_cast<std::uint64_t>(query)) * dropout.width + static_cast<std::uint64_t>(key);
    }

    /// About the bytes that the work on all scores is worth.
    std::size_t work() const;
};

/// Raises for what does not fit; nothing is written.
Problem read_problem(const StridedView& q, const StridedView& k, const StridedView& v, const Rules& rules);

/// A tensor with a token and a head for each of `like`, `cols` wide.
TokenView read_like(const StridedView& view, const char* name, const TokenView& like, std::int64_t cols);

TokenView read_statistics(const StridedView& view, const char* name, const TokenView& q);

TokenView read_tokens(const StridedView& view, const char* name);

/// The table for operands of a kind at the level in force.
const Kernels& kernels_for(ElementKind kind);


inline std::int64_t ceil_div(std::int64_t value, std::int64_t step) { return (value + step - 1) / step; }

}  // namespace fusible::attention
