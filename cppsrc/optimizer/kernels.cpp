// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "optimizer/kernels.hpp"

#include "optimizer/adam.hpp"
#include "optimizer/reduce.hpp"
#include "optimizer/sgd.hpp"

namespace fusible::optimizer::FUSIBLE_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {
    {adam<Decay::Nothing>, adam<Decay::Gradient>, adam<Decay::Update>},
    {adam_amaxes<Decay::Nothing>, adam_amaxes<Decay::Gradient>, adam_amaxes<Decay::Update>},
    {sgd<false>, sgd<true>},
    {sum_of_squares<float>, sum_of_squares<f16>, sum_of_squares<bf16>},
    {{scale<float, float>, scale<float, f16>, scale<float, bf16>},
     {scale<f16, float>, scale<f16, f16>, scale<f16, bf16>},
     {scale<bf16, float>, scale<bf16, f16>, scale<bf16, bf16>}},
};

}  // namespace fusible::optimizer::FUSIBLE_LEVEL
