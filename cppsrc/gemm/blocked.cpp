// The schedules in which B is packed.
#include <algorithm>
#include <atomic>
#include <vector>

#include "gemm/packing.hpp"
#include "gemm/schedules.hpp"
#include "runtime/round_up.hpp"
#include "runtime/threads.hpp"

namespace fusible::gemm {

namespace {

/// Threads of which each packs all of A for itself: to read what another one has written costs more than that, a cache line 45 cycles where packing it
/// takes 10 (Zen 4).
constexpr int kMostOwners = 4;

std::int64_t row_blocks(const Product& p, const Plan& plan) { return (p.m + plan.mc - 1) / plan.mc; }

/// Packs KC x NC of B, and multiplies all blocks of rows with it.
void run_round(Product& p, const Plan& plan, Round& round) {
    const std::int64_t panels = p.micro_panels(round.nc);
    const std::int64_t panel_units = p.panel_units(round.kc);
    auto* packed = scratch().packed_b.of<std::int32_t>(static_cast<std::size_t>(panels * panel_units));
    parallel_for(static_cast<std::size_t>(panels), p.threads, [&](std::size_t panel) {
        pack_b_panel(p, round, static_cast<std::int64_t>(panel), packed + static_cast<std::int64_t>(panel) * panel_units);
    });
    round.b = packed;
    // Fewer blocks of rows than threads: the columns are divided too.
    const std::int64_t blocks = row_blocks(p, plan);
    const std::int64_t parts = std::clamp<std::int64_t>((p.threads + blocks - 1) / blocks, 1, panels);
    parallel_for(static_cast<std::size_t>(blocks * parts), p.threads, [&](std::size_t task) {
        const auto part = static_cast<std::int64_t>(task) % parts;
        const std::int64_t i = static_cast<std::int64_t>(task) / parts;
        auto* const packed_a = scratch().packed_a.of<std::int32_t>(static_cast<std::size_t>(a_block_units(p, round)));
        multiply_block(p, round, i, pack_a_block(p, round, i, packed_a), panels * part / parts, panels * (part + 1) / parts);
    });
}

}  // namespace

void run_blocked(Product& p, const Plan& plan) {
    for (std::int64_t n0 = 0; n0 < p.n; n0 += plan.nc) {
        Round round{n0, std::min(plan.nc, p.n - n0), 0, plan.kc, nullptr, 0, nullptr, false};
        if (p.k > plan.kc) round.sums = scratch().shared.of<float>(static_cast<std::size_t>(p.rows_held(p.m) * round_up(round.nc, p.kernels.nr)));
        do {
            round.kc = std::min(plan.kc, p.k - round.k0);
            round.last = round.k0 + round.kc == p.k;
            run_round(p, plan, round);
            round.k0 += plan.kc;
        } while (!round.last);
    }
}

void run_whole_a(Product& p, const Plan& plan) {
    const std::int64_t panels = p.micro_panels(p.n);
    const std::int64_t panel_units = p.panel_units(p.k);
    const std::int64_t step = plan.nc / p.kernels.nr;
    const Round whole{0, p.n, 0, p.k, nullptr, 0, nullptr, true};
    const std::int64_t block_units = a_block_units(p, whole);
    std::vector<Block> shared(static_cast<std::size_t>(row_blocks(p, plan)));
    const std::size_t units = shared.size() * static_cast<std::size_t>(block_units);
    const auto pack = [&](std::vector<Block>& blocks, std::int32_t* memory, std::size_t i) {
        blocks[i] = pack_a_block(p, whole, static_cast<std::int64_t>(i), memory + static_cast<std::int64_t>(i) * block_units);
    };
    const bool owned = p.threads <= kMostOwners;
    if (!owned) {
        auto* const memory = scratch().shared.of<std::int32_t>(units);
        parallel_for(shared.size(), p.threads, [&](std::size_t i) { pack(shared, memory, i); });
    }
    std::atomic<std::int64_t> taken{0};
    const std::int64_t tasks = (panels + step - 1) / step;
    parallel_for(static_cast<std::size_t>(std::min<std::int64_t>(p.threads, tasks)), p.threads, [&](std::size_t) {
        std::vector<Block> blocks = shared;
        if (owned) {
            auto* const memory = scratch().packed_a.of<std::int32_t>(units);
            for (std::size_t i = 0; i < blocks.size(); ++i) pack(blocks, memory, i);
        }
        auto* const packed_b = scratch().packed_b.of<std::int32_t>(static_cast<std::size_t>(step * panel_units));
        for (std::int64_t task = taken++; task < tasks; task = taken++) {
            const std::int64_t first = task * step;
            const std::int64_t last = std::min(first + step, panels);
            for (std::int64_t panel = first; panel < last; ++panel) pack_b_panel(p, whole, panel, packed_b + (panel - first) * panel_units);
            Round round = whole;
            round.b = packed_b;
            round.first_panel = first;
            for (std::size_t i = 0; i < blocks.size(); ++i) multiply_block(p, round, static_cast<std::int64_t>(i), blocks[i], first, last);
        }
    });
}

}  // namespace fusible::gemm
