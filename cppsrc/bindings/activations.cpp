#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_activations(pybind11::module_&) {}

}  // namespace fusible
