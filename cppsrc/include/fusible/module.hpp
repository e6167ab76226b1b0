// FUSIBLE_MODULE(name, m) { m.def("f", wrap(f)); }: an extension module with Fusible's conversions and exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "fusible/wrap.hpp"

namespace fusible::python {

inline void raise_as(const char* class_name, const std::exception& error) {
    const py::object type = py::module_::import("fusible.errors").attr(class_name);
    PyErr_SetString(type.ptr(), error.what());
}

inline void raise_no_memory() {
    PyErr_SetString(PyExc_MemoryError, "a native kernel: expected scratch memory, got none from the system; free some, or make the call smaller.");
}

inline void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const ShapeError& error) {
        raise_as("ShapeError", error);
    } catch (const DTypeError& error) {
        raise_as("DTypeError", error);
    } catch (const ArgumentError& error) {
        raise_as("ArgumentError", error);
    } catch (const std::bad_alloc&) {
        raise_no_memory();
    } catch (const std::length_error&) {
        raise_no_memory();  // a container longer than any memory
    }
}

/// Fills the tables of dtypes and of tensor types and registers the exceptions, for the module being loaded alone.
inline void set_up_module() {
    py::register_local_exception_translator(translate);
    auto& table = dtype_table();
    if (!table.empty()) return;
    const py::module_ dtypes = py::module_::import("fusible.cpp_extensions.dtypes");
    set_up_exchange(dtypes.attr("TENSORS"));
    const py::dict known = dtypes.attr("TABLE");
    for (const auto& item : known)
        table.emplace_back(item.first.inc_ref().ptr(), static_cast<DType>(item.second.cast<int>()));  // kept for the life of the process
}

}  // namespace fusible::python

#define FUSIBLE_MODULE(name, variable)                            \
    static void fusible_define_##name(pybind11::module_&);        \
    PYBIND11_MODULE(name, variable) {                             \
        ::fusible::python::set_up_module();                       \
        fusible_define_##name(variable);                          \
    }                                                             \
    static void fusible_define_##name(pybind11::module_& variable)
