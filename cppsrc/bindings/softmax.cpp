#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_softmax(pybind11::module_&) {}

}  // namespace fusible
