#include "attention/attention.hpp"

#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_attention(pybind11::module_& m) {
    using pybind11::arg;
    const auto none = pybind11::none();
    define(m, "attention_forward", attention::attention_forward, reads<1, 2, 3, 13, 14, 15, 16, 17, 18, 19, 21>, arg("q"), arg("k"), arg("v"),
          arg("out"), arg("stats"), arg("largest"), arg("scale"), arg("causal"), arg("causal_bottom_right"), arg("window_left"), arg("window_right"),
          arg("window_bottom_right"), arg("lengths_q") = none, arg("starts_q") = none, arg("lengths_kv") = none, arg("starts_kv") = none,
          arg("page_table_k") = none, arg("page_table_v") = none, arg("extra_logits") = none, arg("dropout") = 0.0, arg("rng_state") = none,
          arg("max_seqlen_q") = 0, arg("max_seqlen_kv") = 0, arg("num_threads") = 0);
    define(m, "attention_backward", attention::attention_backward, reads<1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 23>, arg("q"), arg("k"), arg("v"),
          arg("out"), arg("grad"), arg("stats"), arg("dq"), arg("dk"), arg("dv"), arg("scale"), arg("causal"), arg("causal_bottom_right"),
          arg("window_left"), arg("window_right"), arg("window_bottom_right"), arg("lengths_q") = none, arg("starts_q") = none,
          arg("lengths_kv") = none, arg("starts_kv") = none, arg("extra_logits") = none, arg("extra_gradient") = none, arg("dropout") = 0.0,
          arg("rng_state") = none, arg("max_seqlen_q") = 0, arg("max_seqlen_kv") = 0, arg("num_threads") = 0);
    define(m, "copy_to_cache", attention::copy_to_cache, reads<1, 3, 5, 6, 7>, arg("new_k"), arg("k_cache"), arg("new_v"), arg("v_cache"),
          arg("table"), arg("new_lengths"), arg("cached_lengths"), arg("paged"), arg("num_threads") = 0);
}

}  // namespace fusible
