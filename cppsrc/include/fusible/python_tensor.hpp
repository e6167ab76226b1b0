// Reads a Python tensor into a view: by its type's exchange interface, or by duck typing (`data_ptr()`, `dtype`, `shape`, and `is_contiguous()` or
// `stride()`). Neither needs torch headers; a DLPack capsule would cost several microseconds a tensor.
//
// This is the one gate of all native functions: what passes it has memory of its own, in which each element lies where shape, strides and dtype say,
// with the value that it has in Python.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fusible/errors.hpp"
#include "fusible/exchange.hpp"
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

/// The Python object that names an element type, or null where this torch has none; borrowed.
inline PyObject* dtype_object(DType dtype) {
    for (const auto& entry : dtype_table())
        if (entry.second == dtype) return entry.first;
    return nullptr;
}

/// Which argument of a native function is read: for the sentence that refuses it.
struct Argument {
    int position;      // from 1
    const char* name;  // null of a function that was bound without names

    operator int() const { return position; }
};

inline std::string argument_name(const Argument& argument) {
    return argument.name != nullptr ? argument.name : "argument " + std::to_string(argument.position);
}

inline std::string type_name(py::handle object) { return "'" + std::string(Py_TYPE(object.ptr())->tp_name) + "'"; }

/// Interned attribute names: made once, never released.
struct AttributeNames {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* stride = PyUnicode_InternFromString("stride");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* is_neg = PyUnicode_InternFromString("is_neg");
    PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
    PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
};

inline const AttributeNames& names() {
    static const AttributeNames instance;
    return instance;
}

/// Where a tensor cannot say something about itself, its framework's own words why.
[[noreturn]] inline void refuse_answer(py::handle object, const Argument& argument) {
    py::error_already_set error;  // takes the error, which asking for an attribute would clear
    if (!error.matches(PyExc_Exception) || !PyObject_HasAttr(object.ptr(), names().is_neg)) throw error;
    std::string words = py::str(error.value()).cast<std::string>();
    words = words.substr(0, std::min(words.find('\n'), words.find(". ")));
    throw ArgumentError(expected("a tensor with memory of its own", argument_name(argument), "a " + type_name(object) + " that says: " + words,
                                 "pass an ordinary strided tensor"));
}

inline py::object attribute(py::handle object, PyObject* name, const Argument& argument) {
    PyObject* value = PyObject_GetAttr(object.ptr(), name);
    if (value != nullptr) return py::reinterpret_steal<py::object>(value);
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) refuse_answer(object, argument);
    PyErr_Clear();
    throw DTypeError(expected("a tensor", argument_name(argument), type_name(object),
                              "pass an object with data_ptr(), dtype, shape and is_contiguous(), such as a torch.Tensor"));
}

inline py::object call(py::handle object, PyObject* method, const Argument& argument) {
    PyObject* value = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (value != nullptr) return py::reinterpret_steal<py::object>(value);
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return attribute(object, method, argument);
    }
    refuse_answer(object, argument);
}

/// Writes the integers of a tuple such as a shape to `out`, which has room for kMaxDims, and returns how many there are.
inline int read_sizes(const py::object& sizes, const char* what, std::int64_t* out, const Argument& argument) {
    if (!PyTuple_Check(sizes.ptr()))
        throw DTypeError(expected(std::string("a tuple as ") + what, argument_name(argument), type_name(sizes), "pass a torch.Tensor"));
    const Py_ssize_t ndim = PyTuple_GET_SIZE(sizes.ptr());
    if (ndim > kMaxDims)
        throw ShapeError(expected("at most " + std::to_string(kMaxDims) + " dimensions", argument_name(argument),
                                  std::to_string(ndim), "flatten the leading dimensions"));
    for (Py_ssize_t i = 0; i < ndim; ++i) {
        out[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(sizes.ptr(), i));
        if (out[i] == -1 && PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            throw ShapeError(expected(std::string("numbers as ") + what, argument_name(argument), py::repr(sizes).cast<std::string>(),
                                      "pass a tensor of known sizes"));
        }
    }
    return static_cast<int>(ndim);
}

inline void require_cpu(py::handle object, const Argument& argument) {
    PyObject* is_cpu = PyObject_GetAttr(object.ptr(), names().is_cpu);
    if (is_cpu == nullptr) return PyErr_Clear();
    const bool on_cpu = is_cpu == Py_True;
    Py_DECREF(is_cpu);
    if (!on_cpu)
        throw ArgumentError(expected("a tensor in host memory", argument_name(argument), "one on another device", "move it with .cpu()"));
}

inline void read_type_and_shape(py::handle object, TensorBase& view, const Argument& argument) {
    const py::object dtype = attribute(object, names().dtype, argument);
    const std::optional<DType> known = find_dtype(dtype.ptr());
    if (!known)
        throw DTypeError(expected("a supported dtype", argument_name(argument), py::str(dtype).cast<std::string>(), "convert it first"));
    view.dtype = *known;
    view.ndim = read_sizes(attribute(object, names().shape, argument), "shape", view.shape, argument);
    require_cpu(object, argument);
}

inline void read_data(py::handle object, TensorBase& view, const Argument& argument) {
    view.data = PyLong_AsVoidPtr(call(object, names().data_ptr, argument).ptr());
    if (view.data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
}

/// Sizes that no memory holds would wrap where they are multiplied, be there elements or not.
inline void check_sizes(const TensorBase& view, const Argument& argument) {
    std::int64_t bytes = static_cast<std::int64_t>(size_of(view.dtype));
    for (int i = 0; i < view.ndim; ++i) {
        if (view.shape[i] < 0)
            throw ShapeError(expected("sizes >= 0", argument_name(argument), view.shape_text(), "pass such a tensor"));
        bytes = product(bytes, std::max<std::int64_t>(view.shape[i], 1), "the bytes of a tensor");
    }
}

/// Asks a torch tensor what its address does not tell: whether its elements are negated, and how much memory its storage has left.
inline void check_memory(py::handle object, const TensorBase& view, std::int64_t extent, const Argument& argument) {
    check_sizes(view, argument);
    PyObject* const is_neg = PyObject_CallMethodNoArgs(object.ptr(), names().is_neg);
    if (is_neg == nullptr && !PyErr_ExceptionMatches(PyExc_AttributeError)) refuse_answer(object, argument);
    if (is_neg == nullptr) PyErr_Clear();
    const bool negated = is_neg == Py_True;
    const bool has_storage = is_neg != nullptr;
    Py_XDECREF(is_neg);
    if (negated)
        throw NegatedError(expected("a tensor without torch's negative bit", argument_name(argument), "one with it", "call .resolve_neg() on it"));
    if (extent == 0) return;
    bool held = view.data != nullptr;
    if (held && has_storage) {
        const Py_ssize_t bytes = PyObject_Size(call(object, names().untyped_storage, argument).ptr());
        if (bytes < 0) refuse_answer(object, argument);
        const py::object offset = call(object, names().storage_offset, argument);
        const auto size = static_cast<std::int64_t>(size_of(view.dtype));
        held = PyLong_AsLongLong(offset.ptr()) <= bytes / size - extent;
    }
    if (!held)
        throw ArgumentError(expected("a tensor with memory of its own", argument_name(argument),
                                     "a " + type_name(object) + " of shape " + view.shape_text() + " whose storage holds less",
                                     "pass a tensor that was not freed, faked or deferred"));
}

inline TensorView read_tensor(py::handle object, const Argument& argument) {
    StridedView view;
    bool contiguous;
    if (read_exchanged(object.ptr(), view)) {
        contiguous = view.is_contiguous();
    } else {
        read_type_and_shape(object, view, argument);
        contiguous = call(object, names().is_contiguous, argument).ptr() == Py_True;
    }
    if (!contiguous)
        throw ArgumentError(expected("a contiguous tensor", argument_name(argument), "strides with gaps", "call .contiguous() on it"));
    if (view.data == nullptr) read_data(object, view, argument);
    check_memory(object, view, view.numel(), argument);
    TensorView tensor;
    static_cast<TensorBase&>(tensor) = view;
    return tensor;
}

inline StridedView read_strided(py::handle object, const Argument& argument) {
    StridedView view;
    if (!read_exchanged(object.ptr(), view)) {
        read_type_and_shape(object, view, argument);
        const int strides = read_sizes(call(object, names().stride, argument), "stride()", view.strides, argument);
        if (strides != view.ndim)
            throw ShapeError(expected(std::to_string(view.ndim) + " strides", argument_name(argument), std::to_string(strides),
                                      "pass a torch.Tensor"));
        read_data(object, view, argument);
    }
    check_memory(object, view, view.extent(), argument);
    return view;
}

}  // namespace fusible::python
