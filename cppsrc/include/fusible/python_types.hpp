// Python-side stand-ins for native argument types: they take any object, and print in signatures as the stub spells them.
#pragma once

#include <pybind11/pybind11.h>

namespace fusible::python {

inline bool any_object(PyObject* object) { return object != nullptr; }

struct Tensor : pybind11::object {
    PYBIND11_OBJECT_DEFAULT(Tensor, pybind11::object, any_object)
};

struct StridedTensor : pybind11::object {
    PYBIND11_OBJECT_DEFAULT(StridedTensor, pybind11::object, any_object)
};

struct OptionalTensor : pybind11::object {
    PYBIND11_OBJECT_DEFAULT(OptionalTensor, pybind11::object, any_object)
};

struct TensorSequence : pybind11::object {
    PYBIND11_OBJECT_DEFAULT(TensorSequence, pybind11::object, any_object)
};

struct ScalarLike : pybind11::object {
    PYBIND11_OBJECT_DEFAULT(ScalarLike, pybind11::object, any_object)
};

struct DTypeLike : pybind11::object {
    PYBIND11_OBJECT_DEFAULT(DTypeLike, pybind11::object, any_object)
};

}  // namespace fusible::python

namespace pybind11::detail {

template <>
struct handle_type_name<fusible::python::Tensor> {
    static constexpr auto name = const_name("TensorLike");
};

template <>
struct handle_type_name<fusible::python::StridedTensor> {
    static constexpr auto name = const_name("StridedTensorLike");
};

template <>
struct handle_type_name<fusible::python::OptionalTensor> {
    static constexpr auto name = const_name("TensorLike | None");
};

template <>
struct handle_type_name<fusible::python::TensorSequence> {
    static constexpr auto name = const_name("Sequence[TensorLike]");
};

template <>
struct handle_type_name<fusible::python::ScalarLike> {
    static constexpr auto name = const_name("float | TensorLike");
};

template <>
struct handle_type_name<fusible::python::DTypeLike> {
    static constexpr auto name = const_name("DTypeLike");
};

}  // namespace pybind11::detail
