#pragma once

#include <cstdint>

namespace fusible {

/// The least multiple of `step` that is at least `value`.
inline std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

}  // namespace fusible
