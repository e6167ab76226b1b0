// Cosines and sines of the positions that a call uses, made once for all heads.
#pragma once

#include <cstdint>
#include <vector>

namespace fusible::rope {

/// How the elements of a head turn: with which partner, and in which direction.
struct Rotation {
    int width;
    bool interleaved;
    bool backward;
    const float* angles;  // [positions, width]
};

class Rotations {
  public:
    /// `positions` of the tokens; negative ones have none.
    Rotations(const Rotation& rotation, const std::vector<std::int64_t>& positions, int num_threads);

    /// The cosines of a position, and after them, `width` further on, the sines with the sign that they have in the rotation.
    const float* at(std::int64_t position) const { return table_.data() + rows_[static_cast<std::size_t>(position - lowest_)] * 2 * width_; }

  private:
    std::int64_t width_;
    std::int64_t lowest_ = 0;
    std::vector<std::int64_t> rows_;  // of each position from the lowest, or -1
    std::vector<float> table_;
};

}  // namespace fusible::rope
