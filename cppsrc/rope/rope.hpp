// The rotary position embedding on tensors: checked, split over threads, and served by the kernels of the level in force.
#pragma once

#include <optional>

#include "fusible/strided_view.hpp"

namespace fusible::rope {

/// dst = the rotation of src by the angles of its tokens' positions, or back; see the stub for every argument.
void rope(const StridedView& src, const TensorView& dst, const TensorView& freqs, bool sequence_first, bool interleaved, bool backward,
          const std::optional<TensorView>& start_positions, const std::optional<TensorView>& cu_seqlens, int cp_size, int cp_rank, int num_threads);

}  // namespace fusible::rope
