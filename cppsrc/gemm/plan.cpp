#include "gemm/plan.hpp"

#include <algorithm>

#include "runtime/round_up.hpp"

namespace fusible::gemm {

namespace {

constexpr std::int64_t kMaxMC = 192;
constexpr std::int64_t kPackedAUnits = 192 * 1024;  // of MC x KC, which stay in the second cache: 768 KiB
constexpr std::int64_t kPackedBUnits = 1 << 19;     // of KC x NC: 2 MiB

// Of tiles, which are so fast that the third cache is slow beside them: of it they read MC x K and NC x K for MC x NC sums, and the rest from the second
// one, which has these sums, a slab of both operands, and the next one, that is fetched meanwhile (amx.hpp).
constexpr std::int64_t kTiledMC = 384;
constexpr std::int64_t kTiledRows = 32;
constexpr std::int64_t kTiledBUnits = 1 << 21;      // of KC x NC: 8 MiB
constexpr std::int64_t kTiledTaskBUnits = 1 << 20;  // of K x NC, a task's: 4 MiB

constexpr std::int64_t kWholeARows = 512;        // of M, in all
constexpr std::int64_t kTaskBUnits = 128 * 1024;  // of K x NC, a task's: 512 KiB

constexpr std::int64_t kPackedElements = 128;  // of K for each row and lane, up to which B is packed for more than kFewRows: measured

constexpr std::int64_t kTurnedMC = 512;
constexpr std::int64_t kTurnedAUnits = 1 << 19;  // of MC x K: 2 MiB
constexpr std::int64_t kTurnedNC = 48;           // a multiple of every level's MR; at most kTile
constexpr std::int64_t kTurnedMinN = 1024;       // for which packing A is little beside the products
constexpr std::int64_t kTurnedBytes = 2 << 20;   // of a B that no second cache holds

/// Whether turning the sums and packing A costs less than packing B, or reading it before its products.
bool turns(const Product& p) {
    const bool few = 2 * p.m <= p.k;
    const bool large = p.n * p.k * p.b.width > kTurnedBytes;
    return (few || large) && p.n >= std::min(p.m, kTurnedMinN);
}

/// Whether reading B at a row's speed costs less than packing it. Tiles take sixteen rows at once; else each kFewRows read B anew, and what adding up
/// the lanes of their sums costs does not fall with K, while packing does.
bool are_few_rows(const Product& p) {
    if (p.kernels.reads_tiles) return p.m <= kMaxFewTiledRows;
    return p.m <= kFewRows || (p.m <= kMaxFewRows && p.k * p.kernels.lanes > kPackedElements * p.m);
}

/// NC of a task: for wide results such that each thread has as many tasks as the others.
std::int64_t turned_nc(const Product& p) {
    if (!is_wide(p.epilogue.out.kind)) return cast::kTile;
    const std::int64_t most = p.k <= kMaxKC ? kTurnedNC : kTurnedNC / 2;
    const std::int64_t tasks = p.threads * ((p.n + most * p.threads - 1) / (most * p.threads));
    return round_up((p.n + tasks - 1) / tasks, 4);
}

/// MC of bands of one size, for which the packed A stays in cache.
std::int64_t turned_mc(const Product& p) {
    const std::int64_t fit = kTurnedAUnits / std::max<std::int64_t>(1, p.units(p.k)) / cast::kTile * cast::kTile;
    const std::int64_t most = std::clamp<std::int64_t>(fit, cast::kTile, kTurnedMC);
    const std::int64_t bands = (p.m + most - 1) / most;
    return round_up((p.m + bands - 1) / bands, cast::kTile);
}

/// NC of a task, in whole micro-panels: what fits, and four tasks a thread where there are as many. Of tiles, for which an A that the second cache does not
/// hold beside a task's B is read from the third, once for each task: two larger ones.
std::int64_t whole_a_nc(const Product& p) {
    const std::int64_t nr = p.kernels.nr;
    const std::int64_t panel_units = p.panel_units(p.k);
    const bool large = p.kernels.reads_tiles && p.m * p.units(p.k) > kTaskBUnits;
    const std::int64_t most = large ? kTiledTaskBUnits : kTaskBUnits;
    const std::int64_t tasks = p.threads * (large ? 2 : 4);
    const std::int64_t fit = std::min(most / std::max<std::int64_t>(1, panel_units), p.micro_panels(p.n) / tasks);
    return std::clamp<std::int64_t>(fit, 1, p.sums_cols() / nr) * nr;
}

}  // namespace

std::int64_t chunk_rows_for(std::int64_t m, std::int64_t k, bool transposes, bool tiles) {
    const std::int64_t most = tiles ? kTiledMC : std::min(kMaxMC, kPackedAUnits / std::clamp<std::int64_t>(k / 2, 1, kMaxKC / 2));
    const std::int64_t blocks = m <= most / 2 ? 1 : 2 * ((m + 2 * most - 1) / (2 * most));
    const std::int64_t whole = transposes ? cast::kTile : tiles ? kTiledRows : 1;
    return round_up(std::max<std::int64_t>(1, (m + blocks - 1) / blocks), whole);
}

Plan plan_for(const Product& p) {
    if (p.codes != nullptr) return {Schedule::FewCodes, p.m, kFewCodesCols, p.k};
    if (p.b.transposed && !p.a.transposed) {
        if (are_few_rows(p) && p.scaling_a != Scaling::OfSums) return {Schedule::FewRows, p.m, kFewRowsCols, p.k};
        if (!p.kernels.reads_tiles && !p.scales_sums() && turns(p)) return {Schedule::Turned, turned_mc(p), turned_nc(p), p.k};
    }
    const std::int64_t nr = p.kernels.nr;
    if (p.m <= kWholeARows && p.k <= p.max_kc() && p.n >= 2 * p.threads * nr) return {Schedule::WholeA, p.chunk_rows, whole_a_nc(p), p.k};
    const std::int64_t kc = std::min(p.k, p.max_kc());
    const std::int64_t most = p.kernels.reads_tiles ? kTiledBUnits : kPackedBUnits;
    return {Schedule::Blocked, p.chunk_rows, std::max(nr, most / std::max<std::int64_t>(1, p.units(kc)) / nr * nr), kc};
}

}  // namespace fusible::gemm
