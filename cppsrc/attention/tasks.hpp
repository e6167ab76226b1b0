// How the forward divides its work: pairs of a sequence and a head, blocks of their queries, and what a block keeps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels.hpp"
#include "attention/problem.hpp"

namespace fusible::attention {

/// Keys and values packed ahead, in tiles of kMaxTileKeys; null where the one block of queries packs them as it goes.
struct PackedKeys {
    std::int32_t* keys;
    std::int32_t* values;
};

/// A sequence and a kv head. Its queries are those of all heads that share it, one head after another.
struct HeadPair {
    const Sequence* sequence;
    std::int64_t head;
    std::int64_t rows;
    PackedKeys packed;
};

/// What a block of queries knows so far (AttendTile).
struct BlockState {
    float* largest;
    float* base;
    float* sums;
    float* out;
};

/// A block of queries and the keys that it is to see. Of a divided block, each part has a state of its own.
struct QueryBlock {
    std::size_t pair;
    std::int64_t row;
    std::int64_t rows;
    std::int64_t first_key;
    std::int64_t last_key;
    std::int64_t part;
    std::int64_t parts;
    std::size_t block;   // the task that is the first part, and
    std::size_t stride;  // how far apart the parts are
    BlockState state;    // of a divided block; else null
};

/// What a block keeps from tile to tile.
struct BlockOwn {
    std::int32_t* q;
    BlockState state;
};

struct BlockScratch {
    float* scores;
    std::int32_t* probabilities;
    Span* seen;
    std::uint64_t* counters;
    std::int32_t* keys;
    std::int32_t* values;
    std::uint8_t* gathered;
};

}  // namespace fusible::attention
