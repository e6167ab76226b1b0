// New keys and values go where a cache has their places.
#include <algorithm>
#include <cstring>

#include "attention/problem.hpp"
#include "runtime/checks.hpp"
#include "runtime/indices.hpp"
#include "runtime/threads.hpp"

namespace fusible::attention {

namespace {

/// Where a sequence's tokens come from and go to.
struct Move {
    std::int64_t start;  // of the new tokens
    std::int64_t added;
    std::int64_t cached;  // with the new ones
    std::int64_t from;    // the batch of a dense cache that has held the sequence
};

class Cache {
  public:
    Cache(const TokenView& tokens, const TokenView& cache, const std::int32_t* table, std::int64_t max_pages, bool paged)
        : tokens_(tokens), cache_(cache), table_(table), max_pages_(max_pages), paged_(paged) {}

    std::uint8_t* at(std::int64_t sequence, std::int64_t position, std::int64_t head) const {
        if (!paged_) return cache_.at(sequence, position, head);
        return cache_.at(table_[sequence * max_pages_ + position / cache_.tokens], position % cache_.tokens, head);
    }

    /// Raises for what is not in the tensors.
    Move read(std::int64_t i, const std::int32_t* added, const std::int32_t* cached) const {
        Move m{tokens_.flat ? added[i] : 0, length_of(added, i), length_of(cached, i), i};
        if (!paged_ && table_ != nullptr) m.from = table_[i];
        if (!paged_) check_index(m.from, cache_.batches, "a row of the cache", "table");
        const std::int64_t room = paged_ ? product(max_pages_, cache_.tokens, "table") : cache_.tokens;
        if (m.cached < m.added || m.cached > room)
            throw ArgumentError(expected("new tokens that fit in " + std::to_string(room), "a KV cache",
                                         std::to_string(m.added) + " of " + std::to_string(m.cached), "check the lengths"));
        if (m.start + m.added > tokens_.tokens)
            throw ArgumentError(expected("new tokens among " + std::to_string(tokens_.tokens), "new_lengths",
                                         std::to_string(m.start) + " to " + std::to_string(m.start + m.added), "check the lengths"));
        for (std::int64_t page = 0; paged_ && page < ceil_div(m.cached, cache_.tokens); ++page)
            check_index(table_[i * max_pages_ + page], cache_.batches, "a page", "table");
        return m;
    }

    /// The pages that `add` writes to.
    void written(std::int64_t i, const Move& m, std::vector<std::int64_t>& pages) const {
        if (m.added == 0) return;
        for (std::int64_t page = (m.cached - m.added) / cache_.tokens; page <= (m.cached - 1) / cache_.tokens; ++page)
            pages.push_back(table_[i * max_pages_ + page]);
    }

    void add(std::int64_t i, const Move& m) const {
        for (std::int64_t t = 0; t < m.added; ++t)
            for (std::int64_t h = 0; h < cache_.heads; ++h)
                std::memcpy(at(i, m.cached - m.added + t, h), tokens_.at(i, m.start + t, h), row_bytes());
    }

    /// What sequence i had in the cache, out of it or into it.
    void save(const Move& m, std::vector<std::uint8_t>& rows) const {
        rows.resize(static_cast<std::size_t>((m.cached - m.added) * cache_.heads) * row_bytes());
        std::uint8_t* to = rows.data();
        for (std::int64_t t = 0; t < m.cached - m.added; ++t)
            for (std::int64_t h = 0; h < cache_.heads; ++h, to += row_bytes()) std::memcpy(to, cache_.at(m.from, t, h), row_bytes());
    }

    void restore(std::int64_t i, const Move& m, const std::vector<std::uint8_t>& rows) const {
        const std::uint8_t* from = rows.data();
        for (std::int64_t t = 0; t < m.cached - m.added; ++t)
            for (std::int64_t h = 0; h < cache_.heads; ++h, from += row_bytes()) std::memcpy(cache_.at(i, t, h), from, row_bytes());
    }

  private:
    std::size_t row_bytes() const { return static_cast<std::size_t>(cache_.cols * cache_.width); }

    TokenView tokens_;
    TokenView cache_;
    const std::int32_t* table_;
    std::int64_t max_pages_;
    bool paged_;
};

/// The keys or the values of a call: their tokens and their cache, checked.
Cache read_pair(const StridedView& tokens, const char* tokens_name, const StridedView& cache, const char* name, const std::int32_t* table,
                std::int64_t max_pages, bool paged, std::int64_t count) {
    const TokenView from = read_tokens(tokens, tokens_name);
    const TokenView to = read_tokens(cache, name);
    check_apart(cache, name);
    check_dtype(tokens, tokens_name, tokens.dtype == cache.dtype, name_of(cache.dtype));
    if (to.flat || from.heads != to.heads || from.cols != to.cols)
        throw ShapeError(expected("[pages, page size, heads, width] with the tokens' heads and width", name, cache.shape_text(), "reshape it"));
    if (paged && to.tokens < 1) throw ShapeError(expected("pages of at least one token", name, cache.shape_text(), "make larger pages"));
    if ((!from.flat && from.batches < count) || (!paged && to.batches < count))
        throw ShapeError(expected(std::to_string(count) + " sequences", std::string(tokens_name) + " and " + name,
                                  tokens.shape_text() + " and " + cache.shape_text(), "pass a row for each"));
    return {from, to, table, max_pages, paged};
}

std::vector<Move> read_moves(const Cache& cells, std::int64_t count, const std::int32_t* added, const std::int32_t* cached) {
    std::vector<Move> moves;
    for (std::int64_t i = 0; i < count; ++i) moves.push_back(cells.read(i, added, cached));
    return moves;
}

/// Whether two sequences write to one page, so that the later one is to win.
bool share_pages(const Cache& cells, const std::vector<Move>& moves) {
    std::vector<std::int64_t> pages;
    for (std::size_t i = 0; i < moves.size(); ++i) cells.written(static_cast<std::int64_t>(i), moves[i], pages);
    std::sort(pages.begin(), pages.end());
    return std::adjacent_find(pages.begin(), pages.end()) != pages.end();
}

void put(const Cache& cells, const std::vector<Move>& moves, int threads) {
    // All are taken out before any is put in: a sequence may go where another one has been.
    std::vector<std::vector<std::uint8_t>> moved(moves.size());
    for (std::size_t i = 0; i < moves.size(); ++i)
        if (moves[i].from != static_cast<std::int64_t>(i)) cells.save(moves[i], moved[i]);
    parallel_for(moves.size(), threads, [&](std::size_t i) {
        const auto sequence = static_cast<std::int64_t>(i);
        if (moves[i].from != sequence) cells.restore(sequence, moves[i], moved[i]);
        cells.add(sequence, moves[i]);
    });
}

}  // namespace

void copy_to_cache(const StridedView& new_k, const StridedView& k_cache, const StridedView& new_v, const StridedView& v_cache,
                   const OptionalView& table, const TensorView& new_lengths, const TensorView& cached_lengths, bool paged, int num_threads) {
    check_threads(num_threads);
    const std::int64_t count = std::max<std::int64_t>(1, new_lengths.numel()) - 1;
    if (paged && !table) throw ArgumentError(expected("a table", "table", "None", "pass one with a paged cache"));
    const std::int64_t max_pages = paged ? table->cols() : 1;
    const std::int32_t* pages = table ? read_indices(*table, "table", product(count, max_pages, "table")) : nullptr;
    const std::int32_t* added = read_indices(new_lengths, "new_lengths", count + 1);
    const std::int32_t* cached = read_indices(cached_lengths, "cached_lengths", count + 1);
    check_cumulative(added, count, "new_lengths");
    check_cumulative(cached, count, "cached_lengths");
    const Cache keys = read_pair(new_k, "new_k", k_cache, "k_cache", pages, max_pages, paged, count);
    const Cache values = read_pair(new_v, "new_v", v_cache, "v_cache", pages, max_pages, paged, count);
    const std::vector<Move> moves_k = read_moves(keys, count, added, cached);
    const std::vector<Move> moves_v = read_moves(values, count, added, cached);

    const auto bytes = static_cast<std::size_t>(new_k.numel() + new_v.numel()) * size_of(new_k.dtype);
    const int threads = paged && (share_pages(keys, moves_k) || share_pages(values, moves_v)) ? 1 : threads_for(num_threads, bytes);
    put(keys, moves_k, threads);
    put(values, moves_v, threads);
}

}  // namespace fusible::attention
