// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "softmax/kernels.hpp"

#include "softmax/rows.hpp"

namespace fusible::softmax::FUSIBLE_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {
    {{forward<float, false>, forward<float, true>}, {forward<f16, false>, forward<f16, true>}, {forward<bf16, false>, forward<bf16, true>}},
    {backward<float>, backward<f16>, backward<bf16>},
};

}  // namespace fusible::softmax::FUSIBLE_LEVEL
