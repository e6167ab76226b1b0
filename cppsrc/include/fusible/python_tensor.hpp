// Reads a Python tensor into a view by duck typing: `data_ptr()`, `dtype`, `shape`, and `is_contiguous()` or `stride()`.
//
// A DLPack capsule costs several microseconds a tensor; these four look-ups cost about 0.3 us, and need no torch headers.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fusible/errors.hpp"
#include "fusible/strided_view.hpp"
#include "fusible/tensor_view.hpp"

namespace fusible::python {

namespace py = pybind11;

/// The Python objects that name an element type (`torch.float32`, ...), filled when a module is loaded.
inline std::vector<std::pair<PyObject*, DType>>& dtype_table() {
    static std::vector<std::pair<PyObject*, DType>> table;
    return table;
}

inline std::optional<DType> find_dtype(PyObject* object) {
    for (const auto& entry : dtype_table())
        if (entry.first == object) return entry.second;
    return std::nullopt;
}

inline std::string argument_name(int position) { return "argument " + std::to_string(position); }

inline std::string type_name(py::handle object) { return "'" + std::string(Py_TYPE(object.ptr())->tp_name) + "'"; }

/// Interned attribute names: made once, never released.
struct AttributeNames {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* stride = PyUnicode_InternFromString("stride");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
};

inline const AttributeNames& names() {
    static const AttributeNames instance;
    return instance;
}

inline py::object attribute(py::handle object, PyObject* name, int position) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name);
    if (value != nullptr) return py::reinterpret_steal<py::object>(value);
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
    PyErr_Clear();
    throw DTypeError(expected("a tensor", argument_name(position), type_name(object),
                              "pass an object with data_ptr(), dtype, shape and is_contiguous(), such as a torch.Tensor"));
}

inline py::object call(py::handle object, PyObject* method, int position) {
    PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (value != nullptr) return py::reinterpret_steal<py::object>(value);
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return attribute(object, method, position);
    }
    throw py::error_already_set();
}

/// Writes the integers of a tuple such as a shape to `out`, which has room for kMaxDims, and returns how many there are.
inline int read_sizes(const py::object& sizes, const char* what, std::int64_t* out, int position) {
    if (!PyTuple_Check(sizes.ptr()))
        throw DTypeError(expected(std::string("a tuple as ") + what, argument_name(position), type_name(sizes), "pass a torch.Tensor"));
    const Py_ssize_t ndim = PyTuple_GET_SIZE(sizes.ptr());
    if (ndim > kMaxDims)
        throw ShapeError(expected("at most " + std::to_string(kMaxDims) + " dimensions", argument_name(position),
                                  std::to_string(ndim), "flatten the leading dimensions"));
    for (Py_ssize_t i = 0; i < ndim; ++i) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
        if (out[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
    return static_cast<int>(ndim);
}

inline void require_cpu(py::handle object, int position) {
    PyObject* is_cpu = PyObject_GetAttr(object.ptr(), names().is_cpu);
    if (is_cpu == nullptr) return PyErr_Clear();
    const bool on_cpu = is_cpu == Py_True;
    Py_DECREF(is_cpu);
    if (!on_cpu)
        throw ArgumentError(expected("a tensor in host memory", argument_name(position), "one on another device", "move it with .cpu()"));
}

inline void read_type_and_shape(py::handle object, TensorBase& view, int position) {
    const py::object dtype = attribute(object, names().dtype, position);
    const std::optional<DType> known = find_dtype(dtype.ptr());
    if (!known)
        throw DTypeError(expected("a supported dtype", argument_name(position), py::str(dtype).cast<std::string>(), "convert it first"));
    view.dtype = *known;
    view.ndim = read_sizes(attribute(object, names().shape, position), "shape", view.shape, position);
    require_cpu(object, position);
}

inline void read_data(py::handle object, TensorBase& view, int position) {
    view.data = PyLong_AsVoidPtr(call(object, names().data_ptr, position).ptr());
    if (view.data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
}

inline TensorView read_tensor(py::handle object, int position) {
    TensorView view;
    read_type_and_shape(object, view, position);
    if (call(object, names().is_contiguous, position).ptr() != Py_True)
        throw ArgumentError(expected("a contiguous tensor", argument_name(position), "strides with gaps", "call .contiguous() on it"));
    read_data(object, view, position);
    return view;
}

inline StridedView read_strided(py::handle object, int position) {
    StridedView view;
    read_type_and_shape(object, view, position);
    const int strides = read_sizes(call(object, names().stride, position), "stride()", view.strides, position);
    if (strides != view.ndim)
        throw ShapeError(expected(std::to_string(view.ndim) + " strides", argument_name(position), std::to_string(strides), "pass a torch.Tensor"));
    read_data(object, view, position);
    return view;
}

}  // namespace fusible::python
