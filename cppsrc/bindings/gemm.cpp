#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_gemm(pybind11::module_&) {}

}  // namespace fusible
