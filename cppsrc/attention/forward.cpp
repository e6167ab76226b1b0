#include <atomic>
#include <cmath>

#include "attention/attention.hpp"
#include "attention/keys.hpp"
#include "attention/scratch.hpp"
#include "attention/tasks.hpp"
#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::attention {

namespace {

constexpr std::int64_t kPackedUnits = 1 << 22;  // keys and values packed ahead for all threads at once: 16 MiB
constexpr std::int64_t kNearKeys = 128;         // a tile of keys that a block packs for itself
constexpr std::int64_t kWantedTasks = 16;       // a cache's keys are divided to have about as many
constexpr std::int64_t kPairsPerThread = 8;     // where there is work like that, a thread takes all blocks of a pair, and packs its keys
constexpr std::int64_t kItemsPerThread = 4;     // of heads that are attended to side by side
constexpr std::int64_t kSideRows = 256;         // and the rows of all of them, at most
constexpr float kInfinity = HUGE_VALF;

thread_local Workspace packed_workspace;
thread_local Workspace partial_workspace;
thread_local Workspace block_workspace;
thread_local Workspace run_workspace;

class Forward {
  public:
    Forward(const Problem& problem, const TokenView& out, const TokenView& stats, const TokenView& largest, int threads)
        : kernels_(kernels_for(problem.q.kind)), p_(problem), packer_(kernels_, problem), out_(out), stats_(stats), largest_(largest),
          threads_(threads) {}

    void run() {
        std::int64_t work = 0;
        std::int64_t most = 0;  // of the pairs that share packed keys among blocks
        for (const auto& s : p_.sequences)
            for (std::int64_t g = 0; g < p_.k.heads; ++g) {
                if (s.rows == 0) continue;
                all_.push_back({&s, g, s.rows * p_.share(), {}});
                work += all_.back().rows * s.keys;
                if (packs_ahead(all_.back())) most = std::max(most, all_.back().rows * s.keys);
            }
        const bool whole = threads_ == 1 || work >= kPairsPerThread * threads_ * most;
        for (std::size_t next = 0; next < all_.size();) {
            const std::size_t first = next;
            next = whole ? all_.size() : pack_round(first);
            make_tasks(first, next, whole);
            parallel_for_uneven(items_.size(), threads_, [&](std::size_t i) { run_item(items_[i], whole); });
        }
    }

  private:
    /// Tasks [first, last), which a thread does in order; or side by side where they pack their keys themselves.
    struct Item {
        std::size_t first;
        std::size_t last;
    };

    std::int64_t q_stride() const { return round_up(packer_.units(p_.q.cols), kernels_.lanes); }
    std::int64_t out_stride() const { return packer_.value_panels() * kernels_.panel; }
    bool packs_ahead(const HeadPair& pair) const { return pair.rows > kMaxBlockRows; }

    std::int64_t packed_units(const HeadPair& pair) const {
        const std::int64_t keys = round_up(pair.sequence->keys, kMaxTileKeys);
        return packs_ahead(pair) ? packer_.key_units(keys) + packer_.value_units(keys) : 0;
    }

    PackedKeys place(const HeadPair& pair, std::int32_t* out) const {
        return {out, out + packer_.key_units(round_up(pair.sequence->keys, kMaxTileKeys))};
    }

    /// Takes as many pairs as fit, from `next` on, and packs their keys; returns the first one that did not.
    std::size_t pack_round(std::size_t next) {
        const std::size_t first = next;
        std::int64_t units = packed_units(all_[next++]);
        while (next < all_.size() && units + packed_units(all_[next]) <= kPackedUnits) units += packed_units(all_[next++]);
        auto* out = packed_workspace.of<std::int32_t>(static_cast<std::size_t>(units));
        std::vector<std::pair<std::size_t, std::int64_t>> runs;
        for (std::size_t i = first; i < next; ++i) {
            if (!packs_ahead(all_[i])) continue;
            all_[i].packed = place(all_[i], out);
            out += packed_units(all_[i]);
            for (std::int64_t run = 0; run < all_[i].sequence->keys; run += kRunKeys) runs.emplace_back(i, run);
        }
        parallel_for(runs.size(), threads_, [&](std::size_t i) { pack_run(all_[runs[i].first], all_[runs[i].first].packed, runs[i].second); });
        return next;
    }

    void pack_run(const HeadPair& pair, const PackedKeys& packed, std::int64_t first) const {
        const std::int64_t tile = first / kMaxTileKeys * kMaxTileKeys;
        const std::int64_t count = std::min(kRunKeys, pair.sequence->keys - first);
        auto* gathered = run_workspace.of<std::uint8_t>(static_cast<std::size_t>(packer_.gathered_bytes()));
        packer_.pack_keys(*pair.sequence, pair.head, first, count, gathered, packed.keys + packer_.key_units(first));
        std::int32_t* values = packed.values + packer_.value_units(tile) + (first - tile) / kernels_.depth * kernels_.panel;
        packer_.pack_values(*pair.sequence, pair.head, first, count, gathered, values, panel_stride(kMaxTileKeys));
    }

    /// Units from one panel of a tile's values to the next.
    std::ptrdiff_t panel_stride(std::int64_t tile_keys) const { return tile_keys / kernels_.depth * kernels_.panel; }

    void make_tasks(std::size_t first, std::size_t last, bool whole) {
        tasks_.clear();
        items_.clear();
        bool divided = false;
        for (std::size_t i = first; i < last;) {
            if (packs_ahead(all_[i])) {
                add_blocks(i++, whole);
                continue;
            }
            const std::int64_t parts = parts_of(all_[i]);
            divided = divided || parts > 1;
            const std::int64_t side = heads_side_by_side(all_[i], parts);
            std::size_t end = i + 1;
            while (end < last && end < i + static_cast<std::size_t>(side) && all_[end].sequence == all_[i].sequence) ++end;
            add_parts(i, end, parts);
            i = end;
        }
        if (!divided) return;
        unfinished_ = std::vector<std::atomic<std::int64_t>>(tasks_.size());
        for (std::size_t i = 0; i < tasks_.size(); ++i) unfinished_[i].store(tasks_[i].parts, std::memory_order_relaxed);
        carve(partial_workspace, [&](Slices& slices) {
            for (auto& task : tasks_)
                if (task.parts > 1) task.state = take_state(slices, task.rows);
        });
    }

    /// Blocks of a pair whose keys are packed ahead, those that see most keys under a causal mask first.
    void add_blocks(std::size_t pair, bool whole) {
        const std::size_t begin = tasks_.size();
        const std::int64_t all = all_[pair].rows;
        for (std::int64_t row = (all - 1) / kMaxBlockRows * kMaxBlockRows; row >= 0; row -= kMaxBlockRows) {
            if (!whole) items_.push_back({tasks_.size(), tasks_.size() + 1});
            const std::int64_t rows = std::min<std::int64_t>(kMaxBlockRows, all - row);
            tasks_.push_back({pair, row, rows, 0, all_[pair].sequence->keys, 0, 1, tasks_.size(), 1, {}});
        }
        if (whole) items_.push_back({begin, tasks_.size()});
    }

    /// The one block of each of the pairs [first, last), divided by keys.
    void add_parts(std::size_t first, std::size_t last, std::int64_t parts) {
        const std::int64_t keys = all_[first].sequence->keys;
        const std::int64_t step = std::max(kNearKeys, round_up(ceil_div(keys, parts), kNearKeys));
        const std::size_t begin = tasks_.size();
        for (std::int64_t part = 0; part < parts; ++part) {
            items_.push_back({tasks_.size(), tasks_.size() + (last - first)});
            for (std::size_t i = first; i < last; ++i)
                tasks_.push_back({i, 0, all_[i].rows, std::min(keys, part * step), std::min(keys, (part + 1) * step), part, parts,
                                  begin + (i - first), last - first, {}});
        }
    }

    /// In how many parts a block that is its pair's only one is divided: several where there are few of them. Follows from the sizes alone, so
    /// that the sums have one order.
    std::int64_t parts_of(const HeadPair& pair) const {
        const std::int64_t few = ceil_div(kWantedTasks, static_cast<std::int64_t>(all_.size()));
        return std::clamp<std::int64_t>(pair.sequence->keys / (2 * kNearKeys), 1, few);
    }

    /// Heads whose keys lie side by side are read side by side: memory and its pages are then visited once.
    std::int64_t heads_side_by_side(const HeadPair& pair, std::int64_t parts) const {
        const std::int64_t enough = static_cast<std::int64_t>(all_.size()) * parts / (threads_ == 1 ? 1 : kItemsPerThread * threads_);
        return std::max<std::int64_t>(1, std::min(enough, kSideRows / pair.rows));
    }

    void run_item(const Item& item, bool whole) {
        const HeadPair& pair = all_[tasks_[item.first].pair];
        PackedKeys packed = pair.packed;
        if (whole && packs_ahead(pair)) {
            packed = place(pair, packed_workspace.of<std::int32_t>(static_cast<std::size_t>(packed_units(pair))));
            for (std::int64_t run = 0; run < pair.sequence->keys; run += kRunKeys) pack_run(pair, packed, run);
        }
        if (packs_ahead(pair))
            for (std::size_t i = item.first; i < item.last; ++i) attend(i, i + 1, packed);
        else
            attend(item.first, item.last, packed);
    }

    BlockState take_state(Slices& slices, std::int64_t rows) const {
        return {slices.take<float>(rows), slices.take<float>(rows), slices.take<float>(rows * kMaxLanes), slices.take<float>(rows * out_stride())};
    }

    void clear(const QueryBlock& task, const BlockState& state) const {
        std::fill(state.largest, state.largest + task.rows, -kInfinity);
        std::fill(state.sums, state.sums + task.rows * kMaxLanes, 0.0f);
        std::fill(state.out, state.out + task.rows * out_stride(), 0.0f);
        for (std::int64_t r = 0; r < task.rows; ++r) {
            const bool has_extra = p_.extra != nullptr && task.part == 0;
            state.base[r] = has_extra ? p_.extra[head_of(task, r)] : -kInfinity;
            if (has_extra) state.sums[r * kMaxLanes] = 1.0f;
        }
    }

    std::int64_t head_of(const QueryBlock& task, std::int64_t r) const {
        const HeadPair& pair = all_[task.pair];
        return pair.head * p_.share() + (task.row + r) / pair.sequence->rows;
    }

    std::int64_t query_of(const QueryBlock& task, std::int64_t r) const { return (task.row + r) % all_[task.pair].sequence->rows; }

    void pack_queries(const QueryBlock& task, std::int32_t* out) const {
        const Sequence& s = *all_[task.pair].sequence;
        for (std::int64_t r = 0; r < task.rows;) {
            const std::int64_t i = query_of(task, r);
            const std::int64_t count = std::min(task.rows - r, s.rows - i);
            kernels_.pack_rows[table_index(p_.q.kind)](p_.q.at(s.index, s.first_query + i, head_of(task, r)), p_.q.token_stride, count, p_.q.cols,
                                          out + r * q_stride(), q_stride());
            r += count;
        }
    }

    /// Tasks [first, last) of as many rows and the same keys, tile by tile.
    void attend(std::size_t first, std::size_t last, const PackedKeys& packed) {
        const std::int64_t tile_keys = packed.keys != nullptr ? kMaxTileKeys : kNearKeys;
        const QueryBlock& any = tasks_[first];
        const std::int64_t rows = round_up(any.rows, kOperandRows);
        std::vector<BlockOwn> own(last - first);
        BlockScratch scratch{};
        carve(block_workspace, [&](Slices& slices) {
            scratch.scores = slices.take<float>(any.rows * kScoreStride);
            scratch.probabilities = slices.take<std::int32_t>(rows * kScoreStride);
            scratch.seen = slices.take<Span>(any.rows);
            scratch.counters = slices.take<std::uint64_t>(any.rows);
            scratch.keys = slices.take<std::int32_t>(packed.keys != nullptr ? 0 : packer_.key_units(tile_keys));
            scratch.values = slices.take<std::int32_t>(packed.keys != nullptr ? 0 : packer_.value_units(tile_keys));
            scratch.gathered = slices.take<std::uint8_t>(packed.keys != nullptr ? 0 : packer_.gathered_bytes());
            for (std::size_t i = first; i < last; ++i)
                own[i - first] = {slices.take<std::int32_t>(rows * q_stride()), any.parts > 1 ? tasks_[i].state : take_state(slices, any.rows)};
        });
        for (std::size_t i = first; i < last; ++i) {
            clear(tasks_[i], own[i - first].state);
            pack_queries(tasks_[i], own[i - first].q);
        }
        for (std::int64_t key = any.first_key; key < any.last_key; key += tile_keys) {
            const HeadPair& pair = all_[any.pair];
            const std::int64_t keys = std::min(tile_keys, any.last_key - key);
            const Span all = seen_keys(any, key, keys, scratch.seen);
            if (all.end <= all.begin) continue;
            const auto heads = static_cast<std::int64_t>(last - first);
            if (packed.keys == nullptr) packer_.fetch(*pair.sequence, pair.head, heads, key + all.begin, all.end - all.begin);
            for (std::size_t i = first; i < last; ++i) attend_tile(tasks_[i], own[i - first], scratch, packed, key, keys, all);
        }
        for (std::size_t i = first; i < last; ++i) finish_part(tasks_[i], own[i - first].state);
    }

    /// What each row sees of a tile, and what any row does.
    Span seen_keys(const QueryBlock& task, std::int64_t first, std::int64_t keys, Span* seen) const {
        Span all{static_cast<int>(keys), 0};
        for (std::int64_t r = 0; r < task.rows; ++r) {
            seen[r] = all_[task.pair].sequence->seen(query_of(task, r), first, keys);
            if (seen[r].end > seen[r].begin) all = {std::min(all.begin, seen[r].begin), std::max(all.end, seen[r].end)};
        }
        return all;
    }

    void attend_tile(const QueryBlock& task, const BlockOwn& own, const BlockScratch& b, const PackedKeys& packed, std::int64_t first,
                     std::int64_t keys, Span all) const {
        const HeadPair& pair = all_[task.pair];
        for (std::int64_t r = 0; r < task.rows && p_.dropout.key != 0; ++r)
            b.counters[r] = p_.counter(pair.sequence->index, head_of(task, r), query_of(task, r), first);
        if (packed.keys == nullptr) pack_near(pair, b, first, all);
        const std::int32_t* k = packed.keys != nullptr ? packed.keys + packer_.key_units(first) : b.keys;
        const std::int32_t* v = packed.keys != nullptr ? packed.values + packer_.value_units(first) : b.values;
        const std::ptrdiff_t stride = panel_stride(packed.keys != nullptr ? kMaxTileKeys : kNearKeys);
        const BlockState& state = own.state;
        kernels_.attend({own.q, q_stride(), static_cast<int>(task.rows), packer_.units(p_.q.cols), k, v, stride,
                         static_cast<int>(packer_.value_panels()), static_cast<int>(keys), b.seen, p_.scale, p_.dropout, b.counters, b.scores,
                         b.probabilities, state.largest, state.base, state.sums, state.out, out_stride()});
    }

    /// Packs the runs of a tile that are seen.
    void pack_near(const HeadPair& pair, const BlockScratch& b, std::int64_t first, Span all) const {
        const Sequence& s = *pair.sequence;
        for (std::int64_t run = all.begin / kRunKeys * kRunKeys; run < all.end; run += kRunKeys) {
            const std::int64_t count = std::min(kRunKeys, s.keys - first - run);
            std::int32_t* values = b.values + run / kernels_.depth * kernels_.panel;
            packer_.pack_keys(s, pair.head, first + run, count, b.gathered, b.keys + packer_.key_units(run));
            packer_.pack_values(s, pair.head, first + run, count, b.gathered, values, panel_stride(kNearKeys));
        }
    }

    void finish_part(const QueryBlock& task, const BlockState& state) {
        if (task.parts == 1) return finish(task, state);
        // Whoever finishes a divided block's last part adds the parts up.
        if (unfinished_[task.block].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(task.block);
    }

    /// Adds up the parts of a divided block, in their order; task i is the first.
    void merge(std::size_t i) const {
        const QueryBlock& task = tasks_[i];
        const BlockState& all = task.state;
        for (std::int64_t r = 0; r < task.rows; ++r) {
            float base = -kInfinity;
            const auto state_of = [&](std::int64_t part) { return tasks_[i + static_cast<std::size_t>(part) * task.stride].state; };
            for (std::int64_t part = 0; part < task.parts; ++part) base = std::max(base, state_of(part).base[r]);
            for (std::int64_t part = 0; part < task.parts; ++part) {
                const BlockState own = state_of(part);
                const float factor = own.base[r] == -kInfinity ? 0.0f : std::exp(own.base[r] - base);
                all.largest[r] = std::max(all.largest[r], own.largest[r]);
                add_scaled(all.sums + r * kMaxLanes, own.sums + r * kMaxLanes, kMaxLanes, factor, part > 0);
                add_scaled(all.out + r * out_stride(), own.out + r * out_stride(), out_stride(), factor, part > 0);
            }
            all.base[r] = base;
        }
        finish(task, all);
    }

    static void add_scaled(float* to, const float* from, std::int64_t count, float factor, bool add) {
        for (std::int64_t i = 0; i < count; ++i) to[i] = (add ? to[i] : 0.0f) + from[i] * factor;
    }

    void finish(const QueryBlock& task, const BlockState& state) const {
        const Sequence& s = *all_[task.pair].sequence;
        for (std::int64_t r = 0; r < task.rows; ++r) {
            const std::int64_t head = head_of(task, r);
            const std::int64_t token = s.first_query + query_of(task, r);
            float total = 0.0f;
            for (int i = 0; i < kernels_.lanes; ++i) total += state.sums[r * kMaxLanes + i];
            const bool nothing = total == 0.0f;
            kernels_.write[table_index(out_.kind)](state.out + r * out_stride(), nothing ? 0.0f : 1.0f / total, p_.v.cols,
                                                   out_.at(s.index, token, head));
            *reinterpret_cast<float*>(stats_.at(s.index, token, head)) = nothing ? -kInfinity : state.base[r] + std::log(total);
            // A maximum of vectors may lose a NaN among numbers; the sum does not.
            const bool lost = std::isnan(total) && state.largest[r] < kInfinity;
            *reinterpret_cast<float*>(largest_.at(s.index, token, head)) = lost ? total : state.largest[r];
        }
    }

    const Kernels& kernels_;
    const Problem& p_;
    KeyPacker packer_;
    TokenView out_;
    TokenView stats_;
    TokenView largest_;
    int threads_;
    std::vector<HeadPair> all_;
    std::vector<QueryBlock> tasks_;
    std::vector<Item> items_;
    std::vector<std::atomic<std::int64_t>> unfinished_;  // parts of the block that begins at each task
};

}  // namespace

void attention_forward(const StridedView& q, const StridedView& k, const StridedView& v, const StridedView& out, const StridedView& stats,
                       const StridedView& largest, float scale, bool causal, bool causal_bottom_right, int window_left, int window_right,
                       bool window_bottom_right, const OptionalView& lengths_q, const OptionalView& starts_q, const OptionalView& lengths_kv,
                       const OptionalView& starts_kv, const OptionalView& page_table_k, const OptionalView& page_table_v,
                       const OptionalView& extra_logits, double dropout, const OptionalView& rng_state, std::int64_t max_seqlen_q,
                       std::int64_t max_seqlen_kv, int num_threads) {
    check_threads(num_threads);
    const Rules rules{scale,      causal,     causal_bottom_right, window_left, window_right, window_bottom_right, lengths_q,    lengths_kv,
                      starts_q,   starts_kv,  page_table_k,        page_table_v, extra_logits, dropout,            rng_state,    max_seqlen_q,
                      max_seqlen_kv};
    const Problem problem = read_problem(q, k, v, rules);
    const TokenView o = read_like(out, "out", problem.q, problem.v.cols);
    const TokenView row_stats = read_statistics(stats, "stats", problem.q);
    const TokenView row_largest = read_statistics(largest, "largest", problem.q);
    for (const auto& [view, name] : {std::pair(&out, "out"), std::pair(&stats, "stats"), std::pair(&largest, "largest")}) {
        check_apart(*view, name);
        for (const auto& [read, other] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")}) check_elsewhere(*view, name, *read, other);
    }
    Forward(problem, o, row_stats, row_largest, threads_for(num_threads, problem.work())).run();
}

}  // namespace fusible::attention
