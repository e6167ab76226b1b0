#include "activation/activation.hpp"
#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_activations(pybind11::module_& m) {
    using pybind11::arg;
    const auto none = pybind11::none();
    define(m, "activation", activation::activation, reads<2, 6>, arg("name"), arg("src"), arg("dst"), arg("dtype"), arg("dst_transposed") = none,
          arg("scale") = 1.0, arg("amax") = none, arg("accumulate_amax") = false, arg("num_threads") = 0);
    define(m, "activation_backward", activation::activation_backward, reads<2, 3, 7>, arg("name"), arg("grad"), arg("src"), arg("dst"), arg("dtype"),
          arg("dst_transposed") = none, arg("scale") = 1.0, arg("amax") = none, arg("accumulate_amax") = false, arg("bias_grad") = none,
          arg("num_threads") = 0);
    define(m, "gated_activation", activation::gated_activation, reads<2, 6>, arg("name"), arg("src"), arg("dst"), arg("dtype"),
          arg("dst_transposed") = none, arg("scale") = 1.0, arg("amax") = none, arg("accumulate_amax") = false, arg("beta1") = 4.0,
          arg("beta2") = 25.0, arg("limit") = 7.0, arg("alpha") = 1.702, arg("offset") = 1.0, arg("num_threads") = 0);
    define(m, "gated_activation_backward", activation::gated_activation_backward, reads<2, 3, 7>, arg("name"), arg("grad"), arg("src"), arg("dst"),
          arg("dtype"), arg("dst_transposed") = none, arg("scale") = 1.0, arg("amax") = none, arg("accumulate_amax") = false, arg("beta1") = 4.0,
          arg("beta2") = 25.0, arg("limit") = 7.0, arg("alpha") = 1.702, arg("offset") = 1.0, arg("num_threads") = 0);
}

}  // namespace fusible
