// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "rope/kernels.hpp"

#include "rope/rotate.hpp"
#include "rope/sine.hpp"

namespace fusible::rope::FUSIBLE_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {
    {{rotate<float, Halves>, rotate<float, Neighbours>},
     {rotate<f16, Halves>, rotate<f16, Neighbours>},
     {rotate<bf16, Halves>, rotate<bf16, Neighbours>}},
    sine_and_cosine,
};

}  // namespace fusible::rope::FUSIBLE_LEVEL
