// Reads a tensor by DLPack's C exchange interface (DLPack 1.3), where the framework's tensor type has one: a function that fills a struct, which costs
// a tenth of asking for each attribute by name.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "fusible/strided_view.hpp"

namespace fusible::python {

/// The structs of dlpack.h, as far as they are read here; their layout is fixed within a major version.
namespace dlpack {

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
    const std::int64_t* shape;
    const std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct Interface {
    std::uint32_t major;
    std::uint32_t minor;
    Interface* former;
    void* allocate;
    void* managed_from;
    void* managed_to;
    int (*read)(void* object, Tensor* out);
    void* stream;
};

constexpr std::int32_t kHost = 1;

inline std::optional<DType> dtype_of(const Tensor& tensor) {
    if (tensor.lanes != 1) return std::nullopt;
    switch (tensor.code * 256 + tensor.bits) {
        case 0 * 256 + 16: return DType::Int16;
        case 0 * 256 + 32: return DType::Int32;
        case 0 * 256 + 64: return DType::Int64;
        case 1 * 256 + 8: return DType::Byte;
        case 2 * 256 + 16: return DType::Float16;
        case 2 * 256 + 32: return DType::Float32;
        case 4 * 256 + 16: return DType::BFloat16;
        case 10 * 256 + 8: return DType::Float8E4M3;
        case 12 * 256 + 8: return DType::Float8E5M2;
        case 14 * 256 + 8: return DType::Float8E8M0;
        default: return std::nullopt;
    }
}

}  // namespace dlpack

/// The tensor types that are read so, and how. An instance of a subclass may have no memory, and is asked by name.
struct Exchange {
    std::vector<PyTypeObject*> types;
    int (*read)(void* object, dlpack::Tensor* out) = nullptr;
};

inline Exchange& exchange() {
    static Exchange instance;
    return instance;
}

/// Looks for the interface on `types[0]`; the types are kept for the life of the process.
inline void set_up_exchange(const pybind11::tuple& types) {
    const auto name = "__dlpack_c_exchange_api__";
    if (!pybind11::hasattr(types[0], name)) return;
    const pybind11::object capsule = types[0].attr(name);
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    const auto* found = static_cast<const dlpack::Interface*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (found != nullptr && found->major != 1) found = found->former;
    if (found == nullptr) return;
    exchange().read = found->read;
    for (const auto& type : types) exchange().types.push_back(reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()));
}

/// Whether `object` is of one of the types that are read so.
inline bool is_exchanged(PyObject* object) {
    for (const auto* type : exchange().types)
        if (type == Py_TYPE(object)) return true;
    return false;
}

/// Fills `view`, and returns whether it could: otherwise the tensor is asked by name, which also finds the words of an error.
inline bool read_exchanged(PyObject* object, StridedView& view) {
    if (!is_exchanged(object)) return false;
    dlpack::Tensor tensor{};
    if (exchange().read(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    const auto dtype = dlpack::dtype_of(tensor);
    if (!dtype || tensor.device_type != dlpack::kHost || tensor.ndim > kMaxDims) return false;
    view.data = static_cast<std::uint8_t*>(tensor.data) + tensor.byte_offset;
    view.dtype = *dtype;
    view.ndim = tensor.ndim;
    for (int i = 0; i < tensor.ndim; ++i) {
        view.shape[i] = tensor.shape[i];
        view.strides[i] = tensor.strides[i];
    }
    return true;
}

}  // namespace fusible::python
