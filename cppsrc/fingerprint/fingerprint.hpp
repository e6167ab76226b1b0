// Fingerprints of lists of tensors: all tensors of a call split over threads together.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "fusible/tensor_view.hpp"

namespace fusible::fingerprint {

/// 128 bits for the bytes of each tensor, whatever its type and shape. They depend on neither the threads nor the level.
std::vector<std::pair<std::uint64_t, std::uint64_t>> fingerprints(const std::vector<TensorView>& tensors, int num_threads);

}  // namespace fusible::fingerprint
