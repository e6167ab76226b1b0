// Which position each token stands at.
#pragma once

#include <cstdint>
#include <vector>

namespace fusible::rope {

/// The position of a token that is in no sequence.
inline constexpr std::int64_t kNowhere = INT64_MIN;

/// What decides about positions. A rank of a group of `cp_size` holds one chunk from the front of a sequence and its mirror image from the back.
struct PositionRule {
    const std::int32_t* start_positions;  // of each sequence, or null
    std::int64_t cp_size;
    std::int64_t cp_rank;

    std::int64_t position(std::int64_t index, std::int64_t length, std::int64_t sequence) const;
};

/// The positions of [length, batch] tokens where `sequence_first`, else of [batch, length].
std::vector<std::int64_t> positions_of_grid(std::int64_t length, std::int64_t batch, bool sequence_first, const PositionRule& rule);

/// The positions of `tokens` tokens of sequences that lie one after another, kNowhere for those before the first and after the last one.
std::vector<std::int64_t> positions_of_packed(std::int64_t tokens, const std::int32_t* cu_seqlens, std::int64_t sequences,
                                              const PositionRule& rule);

}  // namespace fusible::rope
