// The schedules of a product: which of its loops share which packing (plan.hpp has the terms). The choice follows from the sizes and the layout, and
// between the two that pack B from the number of threads as well: both add up K slab by slab (kernels.cpp), of which KC is a whole number, so that no
// result depends on the threads.
#pragma once

#include "gemm/plan.hpp"
#include "runtime/workspace.hpp"

namespace fusible::gemm {

/// BLIS's five loops, for what no other schedule takes. All threads pack KC x NC of B together, and then take blocks of MC rows, each of which packs
/// its own block of A: B is packed once, A once for each NC columns. Where K is longer than KC, the sums of all M x NC wait in memory. With fewer
/// blocks of rows than threads, the micro-panels of a block are divided, and A is packed by each of the threads that share it.
void run_blocked(Product& p, const Plan& plan);

/// For M of a few blocks, the K of one, and an N that is wide beside the threads: there the barrier after packing all of B costs more than the packing
/// itself. All of A is packed first, by a few threads each for itself, by more for all; then each task packs NC columns of B and goes through every block
/// of A with them, while they are in its own second cache. No thread waits for another's B.
void run_whole_a(Product& p, const Plan& plan);

/// For the layout in which the rows of both operands are contiguous in K (TN, the forward pass of a linear layer), where A is small beside B or B beyond
/// the second cache. The roles are exchanged: A is packed in micro-panels of NR of its rows and kept, MC of them at a time, and the rows of B stand where
/// those of A else do, which as they lie are what the micro-kernel broadcasts from (or are decoded, NC rows at a time). So B is read once and packed
/// never. The sums come out as the transpose of C, and are turned in cache before the epilogue. Kernels of tiles pack both
/// operands anyhow, and have no use for it.
void run_turned(Product& p, const Plan& plan);

/// For at most kMaxFewRows rows in the same layout (kMaxFewTiledRows where tiles are multiplied; fewer where K is short), as in generation token by
/// token: the time is that of reading B once, so that B is decoded in registers on the way to its products, and neither packed nor blocked in K but for
/// the nearest cache (few_rows.hpp). All of A is packed.
void run_few_rows(Product& p, const Plan& plan);

/// The same where B is codes, with one scale or with scales of blocks along K: A is packed as floats, in the order in which codes are decoded, and what
/// comes of a block is multiplied by its scale (codes/multiply.hpp); or, where A is bfloat16 and the level multiplies it,
/// as that: from three rows on by tiles (codes/tiles.hpp), and then kMaxFewCodedRows of them, or by dot products.
void run_few_codes(Product& p, const Plan& plan);

/// Scratch of a thread, which the schedules share.
struct Scratch {
    Workspace packed_a;
    Workspace packed_b;  // and the micro-panels of A where the roles are exchanged
    Workspace sums;
    Workspace shared;  // among the tasks of a product: all of A, or the sums that wait
};

Scratch& scratch();

}  // namespace fusible::gemm
