// `layouts(tensors)`: how torch tensors on a CPU lie, as bytes to compare. Every replayed pass asks for it, and a look at all of its inputs by name would
// cost more than a small kernel.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bindings/families.hpp"
#include "fusible/exchange.hpp"

namespace fusible {

namespace {

namespace py = pybind11;

/// Where a tensor begins in memory does not enter, nor what it holds.
struct Layout {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
    std::int32_t ndim;
};

template <typename T>
void append(std::string& to, const T* values, std::size_t count) {
    to.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

/// None where one is no dense tensor in host memory that holds what it says, by torch's own types.
py::object layouts(const py::list& tensors) {
    if (python::exchange().read == nullptr) return py::none();
    std::string found;
    found.reserve(64 * tensors.size());
    for (const py::handle x : tensors) {
        if (!python::is_exchanged(x.ptr())) return py::none();
        python::dlpack::Tensor tensor{};
        if (python::exchange().read(x.ptr(), &tensor) != 0) {
            PyErr_Clear();
            return py::none();
        }
        if (tensor.device_type != python::dlpack::kHost) return py::none();
        const Layout layout{tensor.code, tensor.bits, tensor.lanes, tensor.ndim};
        append(found, &layout, 1);
        append(found, tensor.shape, static_cast<std::size_t>(tensor.ndim));
        append(found, tensor.strides, static_cast<std::size_t>(tensor.ndim));
    }
    return py::bytes(found);
}

}  // namespace

void bind_layouts(pybind11::module_& m) { m.def("layouts", layouts, pybind11::arg("tensors")); }

}  // namespace fusible
