#include "bindings/families.hpp"
#include "fingerprint/fingerprint.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

void bind_fingerprint(pybind11::module_& m) {
    using pybind11::arg;
    define(m, "fingerprints", fingerprint::fingerprints, reads<1>, arg("tensors"), arg("num_threads") = 0);
}

}  // namespace fusible
