#include "attention/problem.hpp"

#include "runtime/checks.hpp"
#include "runtime/indices.hpp"
#include "runtime/random_words.hpp"
#include "runtime/select.hpp"

namespace fusible::attention {

namespace {

constexpr std::int64_t kUnbounded = std::int64_t{1} << 40;

std::string shape_of(const TokenView& view) {
    const std::string batches = view.flat ? "" : std::to_string(view.batches) + ", ";
    return "[" + batches + std::to_string(view.tokens) + ", " + std::to_string(view.heads) + ", " + std::to_string(view.cols) + "]";
}

const std::int32_t* read_optional(const OptionalView& view, const char* name, std::int64_t at_least) {
    return view ? read_indices(*view, name, at_least) : nullptr;
}

/// How long a sequence is, where it begins in its batch, and how many rows memory has for it.
struct Extent {
    std::int64_t start;
    std::int64_t length;
    std::int64_t rows;
};

/// What the arguments of a side are called, for messages.
struct SideNames {
    const char* tokens;
    const char* lengths;
    const char* starts;
};

class Side {
  public:
    Side(const TokenView& view, const OptionalView& lengths, const OptionalView& starts, std::int64_t sequences, std::int64_t tokens,
         const SideNames& names)
        : view_(view), tokens_(tokens), names_(names) {
        if (view.flat && !lengths) throw ArgumentError(expected("cumulative lengths", names.tokens, "None", "pass them for [t, heads, width]"));
        lengths_ = read_optional(lengths, names.lengths, sequences + 1);
        starts_ = view.flat ? read_optional(starts, names.starts, sequences) : nullptr;
        if (lengths_ == nullptr) return;
        check_cumulative(lengths_, sequences, names.lengths);
        std::int64_t end = 0;
        for (std::int64_t i = 0; i < sequences; ++i) end = checked_end(i, end);
    }

    Extent at(std::int64_t i) const {
        if (lengths_ == nullptr) return {0, tokens_, tokens_};
        const std::int64_t length = length_of(lengths_, i);
        if (!view_.flat) return {0, length, tokens_};
        return {start_of(i), length, length};
    }

  private:
    std::int64_t start_of(std::int64_t i) const { return starts_ != nullptr ? starts_[i] : lengths_[i]; }

    /// Where sequence i ends, of those that lie one after another. No two may share a token: a gradient is written to each.
    std::int64_t checked_end(std::int64_t i, std::int64_t end) const {
        const std::int64_t length = length_of(lengths_, i);
        if (!view_.flat) {
            if (length > tokens_)
                throw ArgumentError(expected("sequences of at most " + std::to_string(tokens_) + " tokens", names_.lengths, std::to_string(length),
                                             "pass the lengths of the tensors"));
            return 0;
        }
        const std::int64_t start = start_of(i);
        if (start < 0 || start + length > tokens_)
            throw ArgumentError(expected("tokens among " + std::to_string(tokens_), names_.lengths,
                                         std::to_string(start) + " to " + std::to_string(start + length), "check the cumulative lengths"));
        if (length > 0 && start < end)
            throw ArgumentError(expected("sequences that begin past the ones before", names_.starts,
                                         std::to_string(start) + " before " + std::to_string(end), "check the cumulative lengths"));
        return length > 0 ? start + length : end;
    }

    const TokenView& view_;
    std::int64_t tokens_;
    SideNames names_;
    const std::int32_t* lengths_;
    const std::int32_t* starts_;
};

std::int64_t count_sequences(const Problem& p, const Rules& rules) {
    if (!p.q.flat) return p.q.batches;
    if (!rules.lengths_q || rules.lengths_q->numel() < 1)
        throw ArgumentError(expected("cumulative lengths", "q", "None", "pass them for [t, heads, width]"));
    return rules.lengths_q->numel() - 1;
}

void check_pages(const Problem& p, const Sequence& s) {
    const std::int64_t used = ceil_div(s.keys, p.k.tokens);
    for (const auto* table : {p.pages_k, p.pages_v})
        for (std::int64_t i = 0; i < used; ++i) check_index(table[s.index * p.max_pages + i], p.k.batches, "a page", "a page table");
}

void read_pages(Problem& p, const Rules& rules, std::int64_t sequences) {
    p.pages_k = p.pages_v = nullptr;
    p.max_pages = 0;
    if (!rules.page_table_k) return;
    if (p.k.flat || p.k.tokens < 1)
        throw ShapeError(expected("pages [pages, page size, heads, width] of at least one token", "k", shape_of(p.k), "make larger pages"));
    p.max_pages = rules.page_table_k->cols();
    if (rules.page_table_v && rules.page_table_v->cols() != p.max_pages)
        throw ShapeError(expected("rows of " + std::to_string(p.max_pages) + " pages", "page_table_v", rules.page_table_v->shape_text(),
                                  "pass tables of one shape"));
    p.pages_k = read_optional(rules.page_table_k, "page_table_k", product(sequences, p.max_pages, "page_table_k"));
    p.pages_v = rules.page_table_v ? read_optional(rules.page_table_v, "page_table_v", product(sequences, p.max_pages, "page_table_v")) : p.pages_k;
}

void read_sequences(Problem& p, const Rules& r) {
    const std::int64_t count = count_sequences(p, r);
    read_pages(p, r, count);
    const bool paged = p.pages_k != nullptr;
    if (!paged && !p.k.flat && p.k.batches < count)
        throw ShapeError(expected(std::to_string(count) + " sequences", "k", std::to_string(p.k.batches), "pass keys for each"));
    const Side queries(p.q, r.lengths_q, r.starts_q, count, p.q.tokens, {"q", "lengths_q", "starts_q"});
    const std::int64_t most_keys = paged ? product(p.max_pages, p.k.tokens, "page_table_k") : p.k.tokens;
    const Side keys(p.k, r.lengths_kv, r.starts_kv, count, most_keys, {"k", "lengths_kv", "starts_kv"});
    for (std::int64_t i = 0; i < count; ++i) {
        const Extent q = queries.at(i);
        const Extent kv = keys.at(i);
        const std::int64_t end = kv.length - q.length;
        const std::int64_t diagonal = r.window_bottom_right ? end : 0;
        Sequence s{i, q.start, kv.start, q.rows, 0, 0, kUnbounded, kUnbounded};
        s.queries = q.length;
        s.keys = kv.length;
        if (r.causal) s.ahead = r.causal_bottom_right ? end : 0;
        if (r.window_right >= 0) s.ahead = std::min(s.ahead, diagonal + r.window_right);
        if (r.window_left >= 0) s.behind = r.window_left - diagonal;
        if (paged) check_pages(p, s);
        p.sequences.push_back(s);
    }
}

void read_dropout(Problem& p, const Rules& r) {
    p.dropout = {0, 0, static_cast<std::uint64_t>(r.max_seqlen_kv), 1.0f};
    p.first_counter = 0;
    p.max_seqlen_q = r.max_seqlen_q;
    if (r.dropout == 0.0) return;
    if (!(r.dropout > 0.0 && r.dropout < 1.0))
        throw ArgumentError(expected("a probability in [0, 1)", "dropout", std::to_string(r.dropout), "pass such a number"));
    if (!r.rng_state || r.rng_state->dtype != DType::Int64 || r.rng_state->numel() != 2)
        throw ArgumentError(expected("int64 [2]", "rng_state", r.rng_state ? r.rng_state->shape_text() : "None", "pass a seed and an offset"));
    const auto* state = r.rng_state->as<const std::uint64_t>();
    p.dropout.key = key_of_seed(state[0]);
    p.dropout.threshold = static_cast<std::uint64_t>(r.dropout * 0x1p32);
    p.dropout.factor = static_cast<float>(1.0 / (1.0 - r.dropout));
    p.first_counter = state[1] << 40;
}

}  // namespace

std::size_t Problem::work() const {
    std::int64_t scores = 0;
    for (const auto& s : sequences) scores += s.queries * s.keys;
    return static_cast<std::size_t>(scores * q.heads) * static_cast<std::size_t>(q.cols + v.cols) / 16;
}

TokenView read_tokens(const StridedView& view, const char* name) {
    if (view.ndim != 3 && view.ndim != 4)
        throw ShapeError(expected("[b, s, heads, width] or [t, heads, width]", name, view.shape_text(), "reshape it"));
    check_rows_contiguous(view, name);
    const int last = view.ndim - 1;
    const bool flat = view.ndim == 3;
    return {static_cast<std::uint8_t*>(view.data),
            ElementKind::Float32,
            static_cast<std::int64_t>(size_of(view.dtype)),
            flat,
            flat ? 1 : view.shape[0],
            view.shape[last - 2],
            view.shape[last - 1],
            view.shape[last],
            flat ? 0 : view.strides[0],
            view.strides[last - 2],
            view.strides[last - 1]};
}

namespace {

TokenView read_wide(const StridedView& view, const char* name) {
    TokenView tokens = read_tokens(view, name);
    tokens.kind = wide_kind(view, name);
    return tokens;
}

}  // namespace

TokenView read_like(const StridedView& view, const char* name, const TokenView& like, std::int64_t cols) {
    const TokenView found = read_wide(view, name);
    TokenView wanted = like;
    wanted.cols = cols;
    if (shape_of(found) != shape_of(wanted)) throw ShapeError(expected(shape_of(wanted), name, shape_of(found), "check its shape"));
    return found;
}

TokenView read_statistics(const StridedView& view, const char* name, const TokenView& q) {
    check_dtype(view, name, view.dtype == DType::Float32, "float32");
    return read_like(view, name, q, 1);
}

Problem read_problem(const StridedView& q, const StridedView& k, const StridedView& v, const Rules& rules) {
    Problem p{};
    p.q = read_wide(q, "q");
    p.k = read_wide(k, "k");
    p.v = read_like(v, "v", p.k, read_wide(v, "v").cols);
    check_dtype(k, "k", k.dtype == q.dtype, name_of(q.dtype));
    check_dtype(v, "v", v.dtype == q.dtype, name_of(q.dtype));
    if (p.k.heads < 1 || p.q.heads % p.k.heads != 0 || p.q.cols != p.k.cols)
        throw ShapeError(expected("equal widths, and a multiple of k's heads", "q", shape_of(p.q) + " with k " + shape_of(p.k), "reshape them"));
    // Exact beside any score: a scale of zero would make NaN of a hidden score.
    p.scale = rules.scale == 0.0f ? 1e-38f : rules.scale;
    read_dropout(p, rules);
    if (rules.extra_logits) check_float32(*rules.extra_logits, "extra_logits", p.q.heads);
    p.extra = rules.extra_logits ? rules.extra_logits->as<const float>() : nullptr;
    read_sequences(p, rules);
    return p;
}

const Kernels& kernels_for(ElementKind kind) {
#if defined(FUSIBLE_X86_KERNELS)
    const Kernels& halves = current_level() == Level::Amx ? amx::kernels : avx512bf16::kernels;
    if (current_level() >= Level::Avx512Bf16 && halves.takes[table_index(kind)]) return halves;
#endif
    (void)kind;
    return FUSIBLE_SELECT(kernels);
}

}  // namespace fusible::attention
