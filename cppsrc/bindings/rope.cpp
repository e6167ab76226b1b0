#include "bindings/families.hpp"
#include "fusible/wrap.hpp"
#include "rope/rope.hpp"

namespace fusible {

void bind_rope(pybind11::module_& m) {
    using pybind11::arg;
    const auto none = pybind11::none();
    define(m, "rope", rope::rope, reads<1, 3, 7, 8>, arg("src"), arg("dst"), arg("freqs"), arg("sequence_first"), arg("interleaved"), arg("backward"),
          arg("start_positions") = none, arg("cu_seqlens") = none, arg("cp_size") = 1, arg("cp_rank") = 0, arg("num_threads") = 0);
}

}  // namespace fusible
