#include "bindings/families.hpp"
#include "fusible/wrap.hpp"
#include "softmax/softmax.hpp"

namespace fusible {

void bind_softmax(pybind11::module_& m) {
    using pybind11::arg;
    define(m, "softmax_forward", softmax::softmax_forward, reads<1, 4>, arg("src"), arg("dst"), arg("scale"), arg("mask") = pybind11::none(),
          arg("causal") = false, arg("num_threads") = 0);
    define(m, "softmax_backward", softmax::softmax_backward, reads<1, 2>, arg("grads"), arg("results"), arg("dst"), arg("scale"),
          arg("causal") = false, arg("num_threads") = 0);
}

}  // namespace fusible
