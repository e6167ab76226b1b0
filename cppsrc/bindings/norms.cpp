#include "bindings/families.hpp"
#include "fusible/wrap.hpp"
#include "norm/norm.hpp"

namespace fusible {

void bind_norms(pybind11::module_& m) {
    using pybind11::arg;
    const auto none = pybind11::none();
    define(m, "norm_fwd", norm::norm_fwd, reads<1, 2, 3, 6, 11>, arg("x"), arg("weight"), arg("bias"), arg("mu"), arg("rsigma"), arg("eps"),
          arg("zero_centered_gamma"), arg("dst"), arg("dtype"), arg("dst_transposed") = none, arg("scale") = 1.0, arg("amax") = none,
          arg("accumulate_amax") = false, arg("num_threads") = 0);
    define(m, "norm_bwd", norm::norm_bwd, reads<1, 2, 3, 4, 5, 10>, arg("dz"), arg("x"), arg("mu"), arg("rsigma"), arg("weight"),
          arg("zero_centered_gamma"), arg("dx"), arg("dgamma"), arg("dbeta") = none, arg("add") = none, arg("num_threads") = 0);
}

}  // namespace fusible
