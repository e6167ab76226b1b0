// Where the scales of blocks of an operand enter its product. It is decoded panel by panel while it is packed, and never as a whole.
//
// Order of accumulation. Where values are scaled, the packed bits are those of an operand that was decoded before, and the product is that one: a result
// is off by at most K roundings of the sum of the magnitudes of its products, as with one scale for all. Where sums are, the products of a block are
// added up as there; its sum times its scale is added to the result in one rounding, so that there is one more for each block, and two where both
// operands have such scales, whose product is rounded.
#pragma once

#include "gemm/operand.hpp"

namespace fusible::gemm {

enum class Scaling {
    None,      // there are none
    OfValues,  // packed are codes times their scales: in units that hold each of these, and products of two
    OfFloats,  // the same, in floats: units of bf16 would not hold one
    OfSums,    // packed are codes; the sum of the products of a block is multiplied by its scale
};

/// For an operand with scales of blocks, and kernels that take its kind. In units of floats, values are scaled. Bf16 holds a code of four bits times its
/// scale, and a code of FP8 times a power of two that is not too near the ends of its exponents: so values are scaled there, too. Where other floats are
/// among the scales, all are multiplied with sums. Where one is near the ends (an E8M0 byte with codes that are not all zeros), values are floats.
Scaling scaling_for(const Kernels& kernels, const Operand& x);

}  // namespace fusible::gemm
