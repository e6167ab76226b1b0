// The table of argument conversions: `arg<T>` says what a native parameter of type T is in Python and how it is read.
//
// A type that is not listed goes through pybind11's own conversions. A new type is one specialisation:
//   template <> struct arg<MyType> { using accepts = ...; static MyType from(const accepts&, const python::Argument& argument); };
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "fusible/python_tensor.hpp"
#include "fusible/python_types.hpp"

namespace fusible {

template <class T>
struct arg {
    using accepts = T;
    static T from(const accepts& value, const python::Argument&) { return value; }
};

template <>
struct arg<TensorView> {
    using accepts = python::Tensor;
    static TensorView from(const accepts& value, const python::Argument& argument) { return python::read_tensor(value, argument); }
};

template <>
struct arg<StridedView> {
    using accepts = python::StridedTensor;
    static StridedView from(const accepts& value, const python::Argument& argument) { return python::read_strided(value, argument); }
};

template <>
struct arg<std::optional<TensorView>> {
    using accepts = python::OptionalTensor;
    static std::optional<TensorView> from(const accepts& value, const python::Argument& argument) {
        if (value.is_none()) return std::nullopt;
        return python::read_tensor(value, argument);
    }
};

template <>
struct arg<std::vector<TensorView>> {
    using accepts = python::TensorSequence;
    static std::vector<TensorView> from(const accepts& value, const python::Argument& argument) {
        if (!PySequence_Check(value.ptr()) || PyObject_HasAttr(value.ptr(), python::names().data_ptr))
            throw DTypeError(expected("a list of tensors", python::argument_name(argument), python::type_name(value), "put them in a list"));
        std::vector<TensorView> tensors;
        for (const auto& item : value) tensors.push_back(python::read_tensor(item, argument));
        return tensors;
    }
};

/// A number, or a float32 tensor with one element (which spares the caller an `item()`).
template <>
struct arg<Scalar> {
    using accepts = python::ScalarLike;
    static Scalar from(const accepts& value, const python::Argument& argument) {
        if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr())) return Scalar{value.cast<float>()};
        const TensorView view = python::read_tensor(value, argument);
        const std::string name = python::argument_name(argument);
        check_dtype(view, name.c_str(), view.dtype == DType::Float32, "float32");
        check_numel(view, name.c_str(), 1);
        return Scalar{*view.as<const float>()};
    }
};

/// A framework's dtype, a value of the DType enumeration, or a name such as "float8_e4m3fn".
template <>
struct arg<DType> {
    using accepts = python::DTypeLike;
    static DType from(const accepts& value, const python::Argument& argument) {
        if (const auto known = python::find_dtype(value.ptr())) return *known;
        if (PyLong_Check(value.ptr())) {
            const int number = value.cast<int>();
            if (is_known(number)) return static_cast<DType>(number);
        }
        if (PyUnicode_Check(value.ptr())) {
            const std::string text = value.cast<std::string>();
            for (int i = 0; is_known(i); ++i)
                if (text == name_of(static_cast<DType>(i))) return static_cast<DType>(i);
        }
        throw DTypeError(expected("a dtype", python::argument_name(argument), pybind11::repr(value).cast<std::string>(),
                                  "pass a torch dtype, a tex DType or a name such as 'float8_e4m3fn'"));
    }
};

}  // namespace fusible
