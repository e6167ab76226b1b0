// Reads a Python tensor into a TensorView by duck typing: `data_ptr()`, `dtype`, `shape`, `is_contiguous()`.
//
// A DLPack capsule costs several microseconds a tensor; these four look-ups cost about 0.3 us, and need no torch headers.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fusible/errors.hpp"
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

inline void read_shape(py::handle object, TensorView& view, int position) {
    const py::object shape = attribute(object, names().shape, position);
    if (!PyTuple_Check(shape.ptr()))
        throw DTypeError(expected("a tuple as shape", argument_name(position), type_name(shape), "pass a torch.Tensor"));
    const Py_ssize_t ndim = PyTuple_GET_SIZE(shape.ptr());
    if (ndim > kMaxDims)
        throw ShapeError(expected("at most " + std::to_string(kMaxDims) + " dimensions", argument_name(position),
                                  std::to_string(ndim), "flatten the leading dimensions"));
    view.ndim = static_cast<int>(ndim);
    for (Py_ssize_t i = 0; i < ndim; ++i) {
        view.shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), i));
        if (view.shape[i] == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
}

inline void require_cpu(py::handle object, int position) {
    PyObject* is_cpu = PyObject_GetAttr(object.ptr(), names().is_cpu);
    if (is_cpu == nullptr) return PyErr_Clear();
    const bool on_cpu = is_cpu == Py_True;
    Py_DECREF(is_cpu);
    if (!on_cpu)
        throw ArgumentError(expected("a tensor in host memory", argument_name(position), "one on another device", "move it with .cpu()"));
}

inline TensorView read_tensor(py::handle object, int position) {
    TensorView view;
    const py::object dtype = attribute(object, names().dtype, position);
    const std::optional<DType> known = find_dtype(dtype.ptr());
    if (!known)
        throw DTypeError(expected("a supported dtype", argument_name(position), py::str(dtype).cast<std::string>(), "convert it first"));
    view.dtype = *known;
    read_shape(object, view, position);
    require_cpu(object, position);
    if (call(object, names().is_contiguous, position).ptr() != Py_True)
        throw ArgumentError(expected("a contiguous tensor", argument_name(position), "strides with gaps", "call .contiguous() on it"));
    view.data = PyLong_AsVoidPtr(call(object, names().data_ptr, position).ptr());
    if (view.data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return view;
}

}  // namespace fusible::python
