#include "rope/positions.hpp"

#include <algorithm>

namespace fusible::rope {

std::int64_t PositionRule::position(std::int64_t index, std::int64_t length, std::int64_t sequence) const {
    const std::int64_t half = length / 2;
    if (cp_size > 1) index += index < half ? cp_rank * half : length * cp_size - (cp_rank + 2) * half;
    return start_positions != nullptr ? index + start_positions[sequence] : index;
}

std::vector<std::int64_t> positions_of_grid(std::int64_t length, std::int64_t batch, bool sequence_first, const PositionRule& rule) {
    std::vector<std::int64_t> positions(static_cast<std::size_t>(length * batch));
    for (std::int64_t i = 0; i < length; ++i)
        for (std::int64_t b = 0; b < batch; ++b)
            positions[static_cast<std::size_t>(sequence_first ? i * batch + b : b * length + i)] = rule.position(i, length, b);
    return positions;
}

std::vector<std::int64_t> positions_of_packed(std::int64_t tokens, const std::int32_t* cu_seqlens, std::int64_t sequences,
                                              const PositionRule& rule) {
    std::vector<std::int64_t> positions(static_cast<std::size_t>(tokens), kNowhere);
    for (std::int64_t k = 0; k < sequences; ++k) {
        const std::int64_t begin = cu_seqlens[k] / rule.cp_size;
        const std::int64_t end = cu_seqlens[k + 1] / rule.cp_size;
        for (std::int64_t token = begin; token < std::min(end, tokens); ++token)
            positions[static_cast<std::size_t>(token)] = rule.position(token - begin, end - begin, k);
    }
    return positions;
}

}  // namespace fusible::rope
