// New keys and values go where a cache has their places.
#include <cstring>

#include "attention/problem.hpp"
#include "cast/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible {

namespace {

const std::int32_t* read_int32(const TensorView& view, const char* name, std::int64_t count) {
    check_dtype(view, name, view.dtype == DType::Int32, "int32");
    if (view.numel() < count)
        throw ShapeError(expected(std::to_string(count) + " elements", name, std::to_string(view.numel()), "pass one a sequence"));
    return view.as<const std::int32_t>();
}

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

    Move read(std::int64_t i, const std::int32_t* added, const std::int32_t* cached) const {
        Move m{tokens_.flat ? added[i] : 0, added[i + 1] - added[i], cached[i + 1] - cached[i], i};
        if (!paged_ && table_ != nullptr) m.from = table_[i];
        const std::int64_t room = paged_ ? max_pages_ * cache_.tokens : cache_.tokens;
        if (m.added < 0 || m.cached < m.added || m.cached > room || m.start + m.added > tokens_.tokens || (!paged_ && m.from >= cache_.batches))
            throw ArgumentError(expected("new tokens that fit in " + std::to_string(room), "a KV cache",
                                         std::to_string(m.added) + " of " + std::to_string(m.cached), "check the lengths"));
        for (std::int64_t page = 0; paged_ && page < ceil_div(m.cached, cache_.tokens); ++page)
            if (table_[i * max_pages_ + page] < 0 || table_[i * max_pages_ + page] >= cache_.batches)
                throw ArgumentError(expected("pages below " + std::to_string(cache_.batches), "page_table",
                                             std::to_string(table_[i * max_pages_ + page]), "check the table"));
        return m;
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

}  // namespace

void copy_to_cache(const StridedView& tokens, const StridedView& cache, const OptionalView& table, const TensorView& new_lengths,
                   const TensorView& cached_lengths, bool paged, int num_threads) {
    check_threads(num_threads);
    const TokenView from = read_tokens(tokens, "tokens");
    const TokenView to = read_tokens(cache, "cache");
    check_dtype(tokens, "tokens", tokens.dtype == cache.dtype, name_of(cache.dtype));
    if (to.flat || from.heads != to.heads || from.cols != to.cols)
        throw ShapeError(expected("[pages, page size, heads, width] with the tokens' heads and width", "cache", cache.shape_text(), "reshape it"));
    const std::int64_t count = std::max<std::int64_t>(1, new_lengths.numel()) - 1;
    if (paged && !table) throw ArgumentError(expected("a table", "page_table", "None", "pass one with a paged cache"));
    if ((!from.flat && from.batches < count) || (!paged && to.batches < count))
        throw ShapeError(expected(std::to_string(count) + " sequences", "tokens and cache", tokens.shape_text() + " and " + cache.shape_text(),
                                  "pass a row for each"));
    const std::int64_t max_pages = paged ? table->cols() : 1;
    const std::int32_t* pages = table ? read_int32(*table, "page_table", count * max_pages) : nullptr;
    const std::int32_t* added = read_int32(new_lengths, "new_lengths", count + 1);
    const std::int32_t* cached = read_int32(cached_lengths, "cached_lengths", count + 1);

    const Cache cells(from, to, pages, max_pages, paged);
    std::vector<Move> moves;
    for (std::int64_t i = 0; i < count; ++i) moves.push_back(cells.read(i, added, cached));
    const std::size_t bytes = static_cast<std::size_t>(from.batches * from.tokens * from.heads * from.cols * from.width);
    const int threads = threads_for(num_threads, bytes);
    const auto sequences = static_cast<std::size_t>(count);
    // All are taken out before any is put in: a sequence may go where another one has been.
    std::vector<std::vector<std::uint8_t>> moved(sequences);
    for (std::size_t i = 0; i < sequences; ++i)
        if (moves[i].from != static_cast<std::int64_t>(i)) cells.save(moves[i], moved[i]);
    parallel_for(sequences, threads, [&](std::size_t i) {
        const auto sequence = static_cast<std::int64_t>(i);
        if (moves[i].from != sequence) cells.restore(sequence, moves[i], moved[i]);
        cells.add(sequence, moves[i]);
    });
}

}  // namespace fusible
