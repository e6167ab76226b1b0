// What each file of this folder adds to the extension module.
#pragma once

#include <pybind11/pybind11.h>

namespace fusible {

void bind_casts(pybind11::module_& m);
void bind_activations(pybind11::module_& m);
void bind_norms(pybind11::module_& m);
void bind_gemm(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_rope(pybind11::module_& m);
void bind_softmax(pybind11::module_& m);
void bind_optimizers(pybind11::module_& m);
void bind_fingerprint(pybind11::module_& m);
void bind_call_key(pybind11::module_& m);
void bind_layouts(pybind11::module_& m);
void bind_programs(pybind11::module_& m);

}  // namespace fusible
