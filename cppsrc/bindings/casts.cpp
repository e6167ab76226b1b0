#include "bindings/families.hpp"
#include "cast/cast.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_casts(pybind11::module_& m) {
    using pybind11::arg;
    const auto none = pybind11::none();
    define(m, "quantize", cast::quantize, reads<1, 3, 9>, arg("src"), arg("dst"), arg("scale"), arg("fp8_dtype"), arg("dst_transposed") = none,
          arg("amax") = none, arg("accumulate_amax") = false, arg("bias_grad") = none, arg("noop") = none, arg("num_threads") = 0);
    define(m, "dequantize", cast::dequantize, reads<1, 3>, arg("src"), arg("dst"), arg("scale_inv"), arg("fp8_dtype"), arg("num_threads") = 0);
    define(m, "quantize_mxfp8", cast::quantize_mxfp8, reads<1>, arg("src"), arg("fp8_dtype"), arg("dst") = none, arg("exponents") = none,
          arg("dst_columns") = none, arg("exponents_columns") = none, arg("tiled") = false, arg("num_threads") = 0);
    define(m, "dequantize_mxfp8", cast::dequantize_mxfp8, reads<1, 2>, arg("src"), arg("exponents"), arg("along_rows"), arg("dst"), arg("fp8_dtype"),
          arg("num_threads") = 0);
    define(m, "quantize_nvfp4", cast::quantize_nvfp4, reads<1, 2, 7>, arg("src"), arg("amax"), arg("dst"), arg("scale_bytes"), arg("columns") = false,
          arg("tiled") = false, arg("seed") = none, arg("num_threads") = 0);
    define(m, "transform_columns", cast::transform_columns, reads<1, 2>, arg("src"), arg("transform"), arg("dst"), arg("out") = none,
          arg("source_amax") = none, arg("num_threads") = 0);
    define(m, "dequantize_nvfp4", cast::dequantize_nvfp4, reads<1, 2>, arg("src"), arg("scale_bytes"), arg("dst"), arg("num_threads") = 0);
    define(m, "quantize_block_fp8", cast::quantize_block_fp8, reads<1>, arg("src"), arg("fp8_dtype"), arg("dst") = none, arg("scale_inv") = none,
           arg("dst_columns") = none, arg("scale_inv_columns") = none, arg("tiled") = false, arg("epsilon") = 0.0f, arg("power_of_two") = false,
           arg("num_threads") = 0);
    define(m, "dequantize_block_fp8", cast::dequantize_block_fp8, reads<1, 2>, arg("src"), arg("scale_inv"), arg("tiled"), arg("dst"), arg("fp8_dtype"),
           arg("num_threads") = 0);
    define(m, "amax", cast::amax, reads<1>, arg("src"), arg("out") = none, arg("num_threads") = 0);
    define(m, "column_sums", cast::column_sums, reads<1>, arg("src"), arg("dst"), arg("num_threads") = 0);
    define(m, "transpose_bytes", cast::transpose_bytes, reads<1>, arg("src"), arg("dst"), arg("num_threads") = 0);
}

}  // namespace fusible
