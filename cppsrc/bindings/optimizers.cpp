#include "bindings/families.hpp"
#include "fusible/wrap.hpp"
#include "optimizer/optimizer.hpp"

namespace fusible {

void bind_optimizers(pybind11::module_& m) {
    using pybind11::arg;
    define(m, "multi_tensor_adam", optimizer::multi_tensor_adam, reads<1>, arg("gradients"), arg("weights"), arg("first"), arg("second"),
          arg("masters"), arg("lr"), arg("beta1"), arg("beta2"), arg("epsilon"), arg("correction1"), arg("correction2"), arg("decoupled"),
          arg("weight_decay"), arg("num_threads") = 0);
    define(m, "multi_tensor_adam_scaled", optimizer::multi_tensor_adam_scaled, reads<1>, arg("gradients"), arg("weights"), arg("first"),
           arg("second"), arg("first_scales"), arg("second_scales"), arg("masters"), arg("master_scales"), arg("lr"), arg("beta1"), arg("beta2"),
           arg("epsilon"), arg("correction1"), arg("correction2"), arg("decoupled"), arg("weight_decay"), arg("num_threads") = 0);
    define(m, "multi_tensor_l2norm", optimizer::multi_tensor_l2norm, reads<1>, arg("tensors"), arg("num_threads") = 0);
    define(m, "multi_tensor_scale", optimizer::multi_tensor_scale, reads<1>, arg("inputs"), arg("outputs"), arg("scale"),
           arg("flag") = pybind11::none(), arg("num_threads") = 0);
    define(m, "multi_tensor_sgd", optimizer::multi_tensor_sgd, reads<1>, arg("gradients"), arg("weights"), arg("momenta"), arg("copies"), arg("lr"),
          arg("momentum"), arg("dampening"), arg("weight_decay"), arg("scale"), arg("nesterov"), arg("first_run"), arg("decay_after"),
          arg("num_threads") = 0);
}

}  // namespace fusible
