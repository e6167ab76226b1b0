#include "gemm/gemm.hpp"

#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_gemm(pybind11::module_& m) {
    using pybind11::arg;
    const auto none = pybind11::none();
    define(m, "gemm", gemm::gemm, reads<1, 4, 5, 8, 12, 15, 16, 22, 24>, arg("left"), arg("left_transposed"), arg("left_dtype"), arg("left_scale"),
          arg("right"), arg("right_transposed"), arg("right_dtype"), arg("right_scale"), arg("dst"), arg("dtype"), arg("dst_transposed") = none,
          arg("scale") = 1.0, arg("amax") = none, arg("accumulate_amax") = false, arg("bias") = none, arg("addend") = none, arg("alpha") = 1.0,
          arg("beta") = 0.0, arg("gelu") = 0, arg("pre_gelu") = none, arg("column_sums") = none, arg("right_scales") = none,
          arg("right_tiled") = false, arg("left_scales") = none, arg("num_threads") = 0);
}

}  // namespace fusible
