// The rotary embedding's kernels as a table of functions, one table a level. Plain data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cast/kernels.hpp"
#include "runtime/tables.hpp"

namespace fusible::rope {

/// The heads of one token: `width` elements each, of which the first `rotated` are rotated and the others copied.
///
/// y[i] = x[i] cosines[i] + x[partner of i] sines[i], the sines carrying the sign that the direction of the rotation gives them.
struct RopeToken {
    const void* source;
    std::ptrdiff_t source_stride;  // from head to head, in elements
    void* out;                     // heads lie one after another
    int heads;
    int width;
    int rotated;
    const float* cosines;
    const float* sines;
};

struct Kernels {
    /// By source type, and by whether partners are neighbours (1) or half of the rotated width apart (0).
    void (*rotate[kWideKinds][2])(const RopeToken& token);
    void (*sine_and_cosine)(const float* angles, float* sines, float* cosines, std::size_t count);
};

FUSIBLE_DECLARE_TABLES(Kernels, kernels)

/// The table of the level in force.
const Kernels& kernels();

}  // namespace fusible::rope
