#include "rope/rotations.hpp"

#include <algorithm>

#include "rope/kernels.hpp"
#include "runtime/threads.hpp"

namespace fusible::rope {

namespace {

/// Sines as the kernels want them. The backward is the transpose: it takes the partner's sine, with the other sign.
void arrange(const Rotation& rotation, float* sines) {
    const int half = rotation.width / 2;
    for (int i = 0; i < half; ++i) {
        const int low = rotation.interleaved ? 2 * i : i;
        const int high = rotation.interleaved ? 2 * i + 1 : i + half;
        const float of_low = sines[low];
        const float of_high = sines[high];
        sines[low] = rotation.backward ? of_high : -of_low;
        sines[high] = rotation.backward ? -of_low : of_high;
    }
}

void fill(const Rotation& rotation, const float* angles, float* cosines, float* sines) {
    const int half = rotation.width / 2;
    // Both halves are mostly the same angles.
    const bool repeated = std::equal(angles, angles + half, angles + half);
    kernels().sine_and_cosine(angles, sines, cosines, static_cast<std::size_t>(repeated ? half : rotation.width));
    if (repeated) {
        std::copy(cosines, cosines + half, cosines + half);
        std::copy(sines, sines + half, sines + half);
    }
    arrange(rotation, sines);
}

}  // namespace

Rotations::Rotations(const Rotation& rotation, const std::vector<std::int64_t>& positions, int num_threads) : width_(rotation.width) {
    std::int64_t highest = -1;
    for (const std::int64_t position : positions) {
        if (position < 0) continue;
        lowest_ = highest < 0 ? position : std::min(lowest_, position);
        highest = std::max(highest, position);
    }
    rows_.assign(highest < 0 ? 0 : static_cast<std::size_t>(highest - lowest_ + 1), -1);
    std::vector<std::int64_t> used;
    for (const std::int64_t position : positions) {
        if (position < 0 || rows_[static_cast<std::size_t>(position - lowest_)] >= 0) continue;
        rows_[static_cast<std::size_t>(position - lowest_)] = static_cast<std::int64_t>(used.size());
        used.push_back(position);
    }
    table_.resize(used.size() * 2 * static_cast<std::size_t>(width_));
    parallel_for(used.size(), threads_for(num_threads, table_.size() * sizeof(float)), [&](std::size_t i) {
        float* cosines = table_.data() + i * 2 * static_cast<std::size_t>(width_);
        fill(rotation, rotation.angles + used[i] * width_, cosines, cosines + width_);
    });
}

}  // namespace fusible::rope
