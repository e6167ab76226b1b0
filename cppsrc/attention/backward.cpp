#include <atomic>
#include <cmath>

#include "attention/attention.hpp"
#include "attention/problem.hpp"
#include "attention/scratch.hpp"
#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::attention {

namespace {

constexpr std::int64_t kWantedTasks = 32;  // where there are fewer pairs, their keys are divided

thread_local Workspace rows_workspace;
thread_local Workspace keys_workspace;
thread_local Workspace partial_workspace;

struct Tensors {
    TokenView out;
    TokenView grad;
    TokenView stats;
    TokenView dq;
    TokenView dk;
    TokenView dv;
};

/// The queries of a sequence and all heads that share a kv head, packed in blocks of kGradRows; and the sums of their gradients.
struct Rows {
    std::int32_t* q_turned;
    std::int32_t* o_turned;
    std::int32_t* q_across;
    std::int32_t* o_across;
    float* stats;
    float* delta;
    float* dq;
};

/// A block of keys, its scratch, and the sums of its gradients.
struct Keys {
    std::int32_t* k;
    std::int32_t* v;
    std::int32_t* k_across;
    Span* seers;
    Span* seen;
    float* scores;
    float* gradients;
    std::int32_t* probabilities;
    std::int32_t* differences;
    std::int32_t* differences_across;
    float* dk;
    float* dv;
};

class Backward {
  public:
    Backward(const Problem& problem, const Tensors& tensors, int threads)
        : kernels_(kernels_for(problem.q.kind)), p_(problem), t_(tensors), threads_(threads) {}

    void run() {
        const auto pairs = static_cast<std::int64_t>(p_.sequences.size()) * p_.k.heads;
        if (pairs == 0) return;
        std::int64_t most_keys = 0;
        for (const auto& s : p_.sequences) {
            most_keys = std::max(most_keys, s.keys);
            most_rows_ = std::max(most_rows_, s.queries * p_.share());
        }
        // Follows from the sizes alone, so that the sums have one order.
        parts_ = std::clamp<std::int64_t>(ceil_div(kWantedTasks, pairs), 1, std::max<std::int64_t>(1, ceil_div(most_keys, kGradKeys)));
        if (parts_ > 1) partial_ = partial_workspace.of<float>(static_cast<std::size_t>(pairs * parts_ * most_rows_ * width(p_.q.cols)));
        extra_.assign(p_.sequences.size() * static_cast<std::size_t>(p_.q.heads), 0.0);
        unfinished_ = std::vector<std::atomic<std::int64_t>>(static_cast<std::size_t>(pairs));
        for (auto& count : unfinished_) count.store(parts_, std::memory_order_relaxed);
        parallel_for_uneven(static_cast<std::size_t>(pairs * parts_), threads_, [&](std::size_t i) {
            const std::int64_t pair = static_cast<std::int64_t>(i) / parts_;
            differentiate(pair, static_cast<std::int64_t>(i) % parts_);
            // Whoever finishes a divided pair's last part adds the parts up.
            if (parts_ > 1 && unfinished_[i / static_cast<std::size_t>(parts_)].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(pair);
        });
    }

    /// The gradient of each head's extra logit.
    void write_extra(float* out) const {
        for (std::int64_t h = 0; h < p_.q.heads; ++h) {
            double sum = 0.0;
            for (std::size_t i = static_cast<std::size_t>(h); i < extra_.size(); i += static_cast<std::size_t>(p_.q.heads)) sum += extra_[i];
            out[h] = static_cast<float>(sum);
        }
    }

  private:
    std::int64_t units(std::int64_t elements) const { return ceil_div(elements, kernels_.depth); }
    std::int64_t panels(std::int64_t cols) const { return ceil_div(cols, kernels_.panel); }
    std::int64_t width(std::int64_t cols) const { return panels(cols) * kernels_.panel; }

    /// Units of a packed block of rows of `cols` elements, whichever way it is packed.
    std::int64_t turned_units(std::int64_t cols) const { return kGradRows * units(cols); }
    std::int64_t across_units(std::int64_t rows, std::int64_t cols) const { return units(rows) * width(cols); }

    const Sequence& sequence_of(std::int64_t pair) const { return p_.sequences[static_cast<std::size_t>(pair / p_.k.heads)]; }
    float* partial(std::int64_t pair, std::int64_t part) const { return partial_ + (pair * parts_ + part) * most_rows_ * width(p_.q.cols); }

    void pack_across(const TokenView& x, const void* source, std::int64_t rows, std::int64_t block, std::int32_t* out) const {
        for (std::int64_t c = 0; c < panels(x.cols); ++c) {
            const std::int64_t cols = std::min<std::int64_t>(kernels_.panel, x.cols - c * kernels_.panel);
            std::int32_t* const panel = out + c * units(block) * kernels_.panel;
            if (cols < kernels_.panel) std::fill(panel, panel + units(rows) * kernels_.panel, 0);
            const auto* from = static_cast<const std::uint8_t*>(source) + c * kernels_.panel * x.width;
            kernels_.pack_across[table_index(x.kind)](from, x.token_stride, rows, cols, panel, kernels_.panel);
        }
    }

    void pack_turned(const TokenView& x, const std::uint8_t* source, std::int64_t rows, std::int32_t* out) const {
        for (std::int64_t r = 0; r < rows; r += kernels_.panel) {
            const std::int64_t some = std::min<std::int64_t>(kernels_.panel, rows - r);
            kernels_.pack_turned[table_index(x.kind)](source + r * x.token_stride * x.width, x.token_stride, some, x.cols, out + r * units(x.cols));
        }
    }

    /// One block of a head's queries, the `block`-th of its pair.
    void pack_rows(const Sequence& s, std::int64_t head, std::int64_t first, std::int64_t block, bool sums_extra, Rows& rows) {
        const std::int64_t count = std::min<std::int64_t>(kGradRows, s.queries - first);
        const std::uint8_t* q = p_.q.at(s.index, s.first_query + first, head);
        const std::uint8_t* o = t_.grad.at(s.index, s.first_query + first, head);
        pack_turned(p_.q, q, count, rows.q_turned + block * turned_units(p_.q.cols));
        pack_turned(t_.grad, o, count, rows.o_turned + block * turned_units(p_.v.cols));
        pack_across(p_.q, q, count, kGradRows, rows.q_across + block * across_units(kGradRows, p_.q.cols));
        pack_across(t_.grad, o, count, kGradRows, rows.o_across + block * across_units(kGradRows, p_.v.cols));
        float* const stats = rows.stats + block * kGradRows;
        float* const delta = rows.delta + block * kGradRows;
        std::fill(stats, stats + kGradRows, 0.0f);
        std::fill(delta, delta + kGradRows, 0.0f);
        double extra = 0.0;
        for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t token = s.first_query + first + r;
            const float stat = *reinterpret_cast<const float*>(t_.stats.at(s.index, token, head));
            stats[r] = stat == -HUGE_VALF ? 0.0f : stat;
            delta[r] = kernels_.dot[table_index(t_.grad.kind)](t_.grad.at(s.index, token, head), t_.out.at(s.index, token, head), p_.v.cols);
            if (sums_extra) extra -= static_cast<double>(std::exp(p_.extra[head] - stats[r]) * delta[r]);
        }
        extra_[static_cast<std::size_t>(s.index * p_.q.heads + head)] += extra;
    }

    /// The gradients of a pair from every `parts_`-th block of its keys.
    void differentiate(std::int64_t pair, std::int64_t part) {
        const Sequence& s = sequence_of(pair);
        const std::int64_t kv_head = pair % p_.k.heads;
        const std::int64_t blocks = ceil_div(s.queries, kGradRows);
        const std::int64_t all = blocks * p_.share();
        Rows rows{};
        carve(rows_workspace, [&](Slices& slices) {
            rows.q_turned = slices.take<std::int32_t>(all * turned_units(p_.q.cols));
            rows.o_turned = slices.take<std::int32_t>(all * turned_units(p_.v.cols));
            rows.q_across = slices.take<std::int32_t>(all * across_units(kGradRows, p_.q.cols));
            rows.o_across = slices.take<std::int32_t>(all * across_units(kGradRows, p_.v.cols));
            rows.stats = slices.take<float>(all * kGradRows);
            rows.delta = slices.take<float>(all * kGradRows);
            rows.dq = slices.take<float>(parts_ > 1 ? 0 : s.queries * p_.share() * width(p_.q.cols));
        });
        if (parts_ > 1) rows.dq = partial(pair, part);
        std::fill(rows.dq, rows.dq + s.queries * p_.share() * width(p_.q.cols), 0.0f);
        for (std::int64_t i = 0; i < all; ++i)
            pack_rows(s, kv_head * p_.share() + i / blocks, i % blocks * kGradRows, i, p_.extra != nullptr && part == 0, rows);
        for (std::int64_t first = part * kGradKeys; first < s.keys; first += parts_ * kGradKeys) differentiate_keys(s, kv_head, first, rows);
        if (parts_ == 1) write_queries(s, kv_head, rows.dq);
    }

    Keys take_keys() const {
        Keys b{};
        carve(keys_workspace, [&](Slices& slices) {
            b.k = slices.take<std::int32_t>(kGradKeys * round_up(units(p_.k.cols), kernels_.lanes));
            b.v = slices.take<std::int32_t>(kGradKeys * round_up(units(p_.v.cols), kernels_.lanes));
            b.k_across = slices.take<std::int32_t>(across_units(kGradKeys, p_.k.cols));
            b.seers = slices.take<Span>(kGradKeys);
            b.seen = slices.take<Span>(kGradRows);
            b.scores = slices.take<float>(kGradKeys * kGradStride);
            b.gradients = slices.take<float>(kGradKeys * kGradStride);
            b.probabilities = slices.take<std::int32_t>(kGradKeys * kGradStride);
            b.differences = slices.take<std::int32_t>(kGradKeys * kGradStride);
            b.differences_across = slices.take<std::int32_t>(units(kGradKeys) * kGradStride);
            b.dk = slices.take<float>(kGradKeys * width(p_.k.cols));
            b.dv = slices.take<float>(kGradKeys * width(p_.v.cols));
        });
        return b;
    }

    void differentiate_keys(const Sequence& s, std::int64_t kv_head, std::int64_t first, const Rows& rows) const {
        const std::int64_t keys = std::min<std::int64_t>(kGradKeys, s.keys - first);
        const std::int64_t blocks = ceil_div(s.queries, kGradRows);
        const Keys b = take_keys();
        const void* k = p_.k.at(s.index, s.first_key + first, kv_head);
        const void* v = p_.v.at(s.index, s.first_key + first, kv_head);
        kernels_.pack_rows[table_index(p_.k.kind)](k, p_.k.token_stride, keys, p_.k.cols, b.k, round_up(units(p_.k.cols), kernels_.lanes));
        kernels_.pack_rows[table_index(p_.v.kind)](v, p_.v.token_stride, keys, p_.v.cols, b.v, round_up(units(p_.v.cols), kernels_.lanes));
        pack_across(p_.k, k, keys, kGradKeys, b.k_across);
        std::fill(b.dk, b.dk + keys * width(p_.k.cols), 0.0f);
        std::fill(b.dv, b.dv + keys * width(p_.v.cols), 0.0f);
        for (std::int64_t i = 0; i < blocks * p_.share(); ++i) differentiate_block(s, kv_head, first, keys, i, rows, b);
        for (std::int64_t j = 0; j < keys; ++j) {
            kernels_.write[table_index(t_.dk.kind)](b.dk + j * width(p_.k.cols), p_.scale, p_.k.cols,
                                                    t_.dk.at(s.index, s.first_key + first + j, kv_head));
            kernels_.write[table_index(t_.dv.kind)](b.dv + j * width(p_.v.cols), 1.0f, p_.v.cols,
                                                    t_.dv.at(s.index, s.first_key + first + j, kv_head));
        }
    }

    void differentiate_block(const Sequence& s, std::int64_t kv_head, std::int64_t first_key, std::int64_t keys, std::int64_t block, const Rows& rows,
                             const Keys& b) const {
        const std::int64_t blocks = ceil_div(s.queries, kGradRows);
        const std::int64_t first = block % blocks * kGradRows;
        const std::int64_t head = block / blocks;
        const std::int64_t count = std::min<std::int64_t>(kGradRows, s.queries - first);
        for (std::int64_t j = 0; j < kGradKeys; ++j) b.seers[j] = j < keys ? s.seers(first_key + j, first, count) : Span{0, 0};
        for (std::int64_t r = 0; r < count; ++r) b.seen[r] = s.seen(first + r, first_key, keys);
        const std::uint64_t counter = p_.dropout.key == 0 ? 0 : p_.counter(s.index, kv_head * p_.share() + head, first, first_key);
        float* const dq = rows.dq + (head * s.queries + first) * width(p_.q.cols);
        const auto lanes = kernels_.lanes;
        kernels_.differentiate({static_cast<int>(keys),
                                static_cast<int>(count),
                                units(p_.q.cols),
                                units(p_.v.cols),
                                b.k,
                                round_up(units(p_.k.cols), lanes),
                                b.v,
                                round_up(units(p_.v.cols), lanes),
                                rows.q_turned + block * turned_units(p_.q.cols),
                                rows.o_turned + block * turned_units(p_.v.cols),
                                rows.q_across + block * across_units(kGradRows, p_.q.cols),
                                rows.o_across + block * across_units(kGradRows, p_.v.cols),
                                units(kGradRows) * kernels_.panel,
                                b.k_across,
                                units(kGradKeys) * kernels_.panel,
                                static_cast<int>(panels(p_.q.cols)),
                                static_cast<int>(panels(p_.v.cols)),
                                b.seers,
                                b.seen,
                                p_.scale,
                                rows.stats + block * kGradRows,
                                rows.delta + block * kGradRows,
                                p_.dropout,
                                counter,
                                b.scores,
                                b.gradients,
                                b.probabilities,
                                b.differences,
                                b.differences_across,
                                dq,
                                width(p_.q.cols),
                                b.dk,
                                width(p_.k.cols),
                                b.dv,
                                width(p_.v.cols)});
    }

    void write_queries(const Sequence& s, std::int64_t kv_head, const float* dq) const {
        for (std::int64_t r = 0; r < s.queries * p_.share(); ++r) {
            const std::int64_t head = kv_head * p_.share() + r / s.queries;
            const std::int64_t token = s.first_query + r % s.queries;
            kernels_.write[table_index(t_.dq.kind)](dq + r * width(p_.q.cols), p_.scale, p_.q.cols, t_.dq.at(s.index, token, head));
        }
    }

    void merge(std::int64_t pair) const {
        const Sequence& s = sequence_of(pair);
        float* const sum = partial(pair, 0);
        const std::int64_t count = s.queries * p_.share() * width(p_.q.cols);
        for (std::int64_t part = 1; part < parts_; ++part) {
            const float* more = partial(pair, part);
            for (std::int64_t i = 0; i < count; ++i) sum[i] += more[i];
        }
        write_queries(s, pair % p_.k.heads, sum);
    }

    const Kernels& kernels_;
    const Problem& p_;
    const Tensors& t_;
    int threads_;
    std::int64_t parts_ = 1;
    std::int64_t most_rows_ = 0;
    float* partial_ = nullptr;
    std::vector<std::atomic<std::int64_t>> unfinished_;  // parts of each pair
    std::vector<double> extra_;                          // [sequences, heads]
};

}  // namespace

void attention_backward(const StridedView& q, const StridedView& k, const StridedView& v, const StridedView& out, const StridedView& grad,
                        const StridedView& stats, const StridedView& dq, const StridedView& dk, const StridedView& dv, float scale, bool causal,
                        bool causal_bottom_right, int window_left, int window_right, bool window_bottom_right, const OptionalView& lengths_q,
                        const OptionalView& starts_q, const OptionalView& lengths_kv, const OptionalView& starts_kv,
                        const OptionalView& extra_logits, const OptionalView& extra_gradient, double dropout, const OptionalView& rng_state,
                        std::int64_t max_seqlen_q, std::int64_t max_seqlen_kv, int num_threads) {
    check_threads(num_threads);
    const Rules rules{scale,     causal,    causal_bottom_right, window_left, window_right, window_bottom_right, lengths_q, lengths_kv,
                      starts_q,  starts_kv, {},                  {},          extra_logits, dropout,             rng_state, max_seqlen_q,
                      max_seqlen_kv};
    const Problem problem = read_problem(q, k, v, rules);
    const TokenView& like = problem.q;
    const Tensors tensors{read_like(out, "out", like, problem.v.cols),       read_like(grad, "grad", like, problem.v.cols),
                          read_statistics(stats, "stats", like),             read_like(dq, "dq", like, like.cols),
                          read_like(dk, "dk", problem.k, problem.k.cols),    read_like(dv, "dv", problem.k, problem.v.cols)};
    for (const auto& [view, name] : {std::pair(&dq, "dq"), std::pair(&dk, "dk"), std::pair(&dv, "dv")}) {
        check_apart(*view, name);
        for (const auto& [read, other] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v"), std::pair(&out, "out"), std::pair(&grad, "grad")})
            check_elsewhere(*view, name, *read, other);
    }
    check_dtype(out, "out", out.dtype == q.dtype, name_of(q.dtype));
    check_dtype(grad, "grad", grad.dtype == q.dtype, name_of(q.dtype));
    if (extra_gradient) check_float32(*extra_gradient, "extra_gradient", like.heads);
    Backward backward(problem, tensors, threads_for(num_threads, problem.work()));
    backward.run();
    if (extra_gradient) backward.write_extra(extra_gradient->as<float>());
}

}  // namespace fusible::attention
