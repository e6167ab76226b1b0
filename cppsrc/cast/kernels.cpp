// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "cast/kernels.hpp"

#include "cast/add_columns.hpp"
#include "cast/fp4_lines.hpp"
#include "cast/mx_bands.hpp"
#include "cast/scaled_blocks.hpp"
#include "cast/strips.hpp"

namespace fusible::cast::FUSIBLE_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {
    {{quantize<float, E4M3>, quantize<float, E5M2>},
     {quantize<f16, E4M3>, quantize<f16, E5M2>},
     {quantize<bf16, E4M3>, quantize<bf16, E5M2>}},
    {{quantize_strip<float, E4M3>, quantize_strip<float, E5M2>},
     {quantize_strip<f16, E4M3>, quantize_strip<f16, E5M2>},
     {quantize_strip<bf16, E4M3>, quantize_strip<bf16, E5M2>}},
    {amax_of<float>, amax_of<f16>, amax_of<bf16>},
    {{dequantize<E4M3, float>, dequantize<E4M3, f16>, dequantize<E4M3, bf16>},
     {dequantize<E5M2, float>, dequantize<E5M2, f16>, dequantize<E5M2, bf16>}},
    {{quantize_mx<float, E4M3>, quantize_mx<float, E5M2>},
     {quantize_mx<f16, E4M3>, quantize_mx<f16, E5M2>},
     {quantize_mx<bf16, E4M3>, quantize_mx<bf16, E5M2>}},
    {{dequantize_mx<E4M3, float>, dequantize_mx<E4M3, f16>, dequantize_mx<E4M3, bf16>},
     {dequantize_mx<E5M2, float>, dequantize_mx<E5M2, f16>, dequantize_mx<E5M2, bf16>}},
    {{quantize_fp4_rows<float>, quantize_fp4_rows<f16>, quantize_fp4_rows<bf16>},
     {quantize_fp4_columns<float>, quantize_fp4_columns<f16>, quantize_fp4_columns<bf16>}},
    {transform_columns<float>, transform_columns<f16>, transform_columns<bf16>},
    {dequantize_fp4<float>, dequantize_fp4<f16>, dequantize_fp4<bf16>},
    {{quantize_blocks<float, E4M3>, quantize_blocks<float, E5M2>},
     {quantize_blocks<f16, E4M3>, quantize_blocks<f16, E5M2>},
     {quantize_blocks<bf16, E4M3>, quantize_blocks<bf16, E5M2>}},
    {{dequantize_blocks<E4M3, float>, dequantize_blocks<E4M3, f16>, dequantize_blocks<E4M3, bf16>},
     {dequantize_blocks<E5M2, float>, dequantize_blocks<E5M2, f16>, dequantize_blocks<E5M2, bf16>}},
    {add_columns<float>, add_columns<f16>, add_columns<bf16>},
    transpose_tile,
};

}  // namespace fusible::cast::FUSIBLE_LEVEL
