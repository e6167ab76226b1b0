// `call_key(entries, kinds, sort, integers)`: a function that computes the key of a call in tex's dispatcher from the arguments that are in it, as
// `fusible/tex/selection/call_keys.py` says in Python. Every call of tex pays for it.
#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <utility>

#include "bindings/families.hpp"
#include "fusible/python_tensor.hpp"

namespace fusible {

namespace {

namespace py = pybind11;

/// What a key holds of an argument; the letters are those of call_keys.py.
enum Entry : char { kValue = 'v', kMember = 'm', kClass = 'c', kKind = 'k', kDType = 'd', kPresence = 'p', kSort = 's', kVector = 'i', kIndices = 'j' };

/// What each function that is made holds: its entries, and Python's ways to describe an argument that is not looked at here.
struct Maker {
    const char* entries;
    Py_ssize_t count;
    py::handle kinds, sort, integers;

    explicit Maker(PyObject* self)
        : entries(PyBytes_AS_STRING(PyTuple_GET_ITEM(self, 0))),
          count(PyBytes_GET_SIZE(PyTuple_GET_ITEM(self, 0))),
          kinds(PyTuple_GET_ITEM(self, 1)),
          sort(PyTuple_GET_ITEM(self, 2)),
          integers(PyTuple_GET_ITEM(self, 3)) {}
};

py::object called(py::handle function, PyObject* argument) {
    PyObject* result = PyObject_CallOneArg(function.ptr(), argument);
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

py::object kind_of(py::handle kinds, PyObject* x) {
    PyObject* describe = PyObject_GetItem(kinds.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(x)));
    if (describe == nullptr) throw py::error_already_set();
    return called(py::reinterpret_steal<py::object>(describe), x);
}

/// What decides of a tensor on a CPU.
struct Seen {
    py::object dtype;
    long ndim = 0;
};

py::object attribute(PyObject* x, const char* name) {
    PyObject* value = PyObject_GetAttrString(x, name);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
}

bool is_dense(PyObject* x) {
    static const py::handle strided = py::object(py::module_::import("torch").attr("strided")).release();
    return attribute(x, "layout").is(strided);
}

/// What is known of an argument that decides and is no dense tensor on a CPU: its kind, and the layout of a tensor that is sparse.
py::object other(py::handle kinds, PyObject* x) {
    if (python::is_exchanged(x) && !is_dense(x)) return py::make_tuple(kind_of(kinds, x), attribute(x, "layout"));
    return py::make_tuple(kind_of(kinds, x));
}

/// How many tensors are still to be asked by name. Guarded by the GIL.
int by_name = 0;

/// Fills `seen`, if `x` is a torch tensor or parameter itself (no subclass), and on a CPU. torch's exchange interface tells all of it in the time
/// (40 ns) in which it gives one attribute and a half; but for what it cannot read (meta, sparse) it raises, which takes milliseconds. Where that has
/// happened, more of the kind are to come: the tensors after it are asked by name.
bool see_on_cpu(PyObject* x, Seen& seen) {
    if (!python::is_exchanged(x)) return false;
    python::dlpack::Tensor tensor{};
    if (by_name > 0) {
        --by_name;
    } else if (python::exchange().read(x, &tensor) == 0) {
        const auto dtype = python::dlpack::dtype_of(tensor);
        PyObject* object = dtype ? python::dtype_object(*dtype) : nullptr;
        if (object != nullptr && tensor.device_type == python::dlpack::kHost) {
            seen = {py::reinterpret_borrow<py::object>(object), tensor.ndim};
            return true;
        }
    } else {
        PyErr_Clear();
        by_name = 10000;
    }
    if (!attribute(x, "is_cpu").is(py::bool_(true)) || !is_dense(x)) return false;
    seen = {attribute(x, "dtype"), attribute(x, "ndim").cast<long>()};
    return true;
}

bool is_int32(const Seen& seen) { return python::find_dtype(seen.dtype.ptr()) == DType::Int32; }

bool is_dtype(PyObject* x) { return Py_TYPE(x) == Py_TYPE(python::dtype_object(DType::Int32)); }

py::object borrowed(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

py::object entry_of(char entry, PyObject* x, const Maker& by) {
    if (entry == kValue) return borrowed(x);
    if (entry == kClass) return borrowed(reinterpret_cast<PyObject*>(Py_TYPE(x)));
    if (entry == kMember) return PyLong_Check(x) || is_dtype(x) ? borrowed(x) : kind_of(by.kinds, x);
    if (x == Py_None) return borrowed(x);
    if (entry == kSort) return called(by.sort, x);
    Seen seen;
    const bool plain = see_on_cpu(x, seen);
    if (entry == kKind) return plain ? std::move(seen.dtype) : other(by.kinds, x);
    if (entry == kDType) return plain ? std::move(seen.dtype) : called(by.sort, x);
    if (entry == kPresence) return plain ? borrowed(Py_True) : called(by.sort, x);
    if (!plain || !is_int32(seen)) return called(by.integers, x);
    return entry == kVector ? py::int_(seen.ndim) : borrowed(Py_True);
}

PyObject* make_key(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    const Maker by(self);
    if (count != by.count) {
        PyErr_Format(PyExc_TypeError, "a call's key: expected %zd arguments, got %zd; pass those that its entries are for.", by.count, count);
        return nullptr;
    }
    try {
        py::tuple key(count);
        for (Py_ssize_t i = 0; i < count; ++i) PyTuple_SET_ITEM(key.ptr(), i, entry_of(by.entries[i], arguments[i], by).release().ptr());
        return key.release().ptr();
    } catch (py::error_already_set& error) {
        error.restore();
        return nullptr;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

py::object call_key(const py::bytes& entries, const py::object& kinds, const py::object& sort, const py::object& integers) {
    const char known[] = {kValue, kMember, kClass, kKind, kDType, kPresence, kSort, kVector, kIndices, '\0'};
    const auto text = static_cast<std::string>(entries);
    if (text.find_first_not_of(known) != std::string::npos)
        throw ArgumentError(expected(std::string("letters of ") + known, "entries of call_key", "'" + text + "'", "pass those of fusible.tex.selection.call_keys"));
    by_name = 0;
    static PyMethodDef method{"key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_key)), METH_FASTCALL, "The key of a call."};
    const py::tuple self = py::make_tuple(entries, kinds, sort, integers);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace

void bind_call_key(pybind11::module_& m) {
    using pybind11::arg;
    m.def("call_key", call_key, arg("entries"), arg("kinds"), arg("sort"), arg("integers"));
    m.def("has_exchange", [] { return python::exchange().read != nullptr; });
}

}  // namespace fusible
