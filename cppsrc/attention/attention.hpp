// Attention on tensors: checked, cut into blocks, split over threads. Queries, keys and values are [b, s, heads, width] or, for sequences one
// after another, [t, heads, width]; strides are free but for the last dimension's.
#pragma once

#include "cast/cast.hpp"
#include "fusible/strided_view.hpp"

namespace fusible::attention {

/// out = dropout(softmax(scale q k^T)) v; see the stub for every argument.
void attention_forward(const StridedView& q, const StridedView& k, const StridedView& v, const StridedView& out, const StridedView& stats,
                       const StridedView& largest, float scale, bool causal, bool causal_bottom_right, int window_left, int window_right,
                       bool window_bottom_right, const OptionalView& lengths_q, const OptionalView& starts_q, const OptionalView& lengths_kv,
                       const OptionalView& starts_kv, const OptionalView& page_table_k, const OptionalView& page_table_v,
                       const OptionalView& extra_logits, double dropout, const OptionalView& rng_state, std::int64_t max_seqlen_q,
                       std::int64_t max_seqlen_kv, int num_threads);

void attention_backward(const StridedView& q, const StridedView& k, const StridedView& v, const StridedView& out, const StridedView& grad,
                        const StridedView& stats, const StridedView& dq, const StridedView& dk, const StridedView& dv, float scale, bool causal,
                        bool causal_bottom_right, int window_left, int window_right, bool window_bottom_right, const OptionalView& lengths_q,
                        const OptionalView& starts_q, const OptionalView& lengths_kv, const OptionalView& starts_kv,
                        const OptionalView& extra_logits, const OptionalView& extra_gradient, double dropout, const OptionalView& rng_state,
                        std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv, int num_threads);

/// Puts new keys or values where a cache has their places; see the stub.
void copy_to_cache(const StridedView& new_k, const StridedView& k_cache, const StridedView& new_v, const StridedView& v_cache,
                   const OptionalView& table, const TensorView& new_lengths, const TensorView& cached_lengths, bool paged, int num_threads);

}  // namespace fusible::attention
