// `program(tensors, values, calls)`: native calls that follow one another, as a function of the tensors that they read and write.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/families.hpp"
#include "fusible/wrap.hpp"

namespace fusible {

namespace {

namespace py = pybind11;

/// What a program knows of a tensor that a run is given: how many bytes of it its values reach, and whether a call writes to them.
struct Given {
    std::int64_t bytes = 0;
    bool written = false;
};

/// Where a tensor lies in a run.
struct Memory {
    std::uint8_t* begin;
    std::uint8_t* end;
};

class Program {
  public:
    /// A value: the number of a tensor, the byte of it at which the value begins, dtype, shape and strides.
    using Value = std::tuple<int, std::int64_t, python::DTypeLike, std::vector<std::int64_t>, std::vector<std::int64_t>>;
    /// A call: the function's name, what is the same each time, and the numbers of values, by parameter.
    using Listed = std::tuple<std::string, py::dict, py::dict>;

    Program(int tensors, const std::vector<Value>& values, const std::vector<Listed>& calls) : given_(static_cast<std::size_t>(tensors)) {
        for (const auto& [tensor, offset, dtype, shape, strides] : values) add(tensor, offset, dtype, shape, strides);
        for (const auto& [name, constants, places] : calls) {
            const auto maker = program::makers().find(name);
            if (maker == program::makers().end())
                throw ArgumentError(expected("a native function of tensors", "calls", "'" + name + "'", "pass one of those"));
            for (const auto& place : places)
                if (const auto number = place.second.cast<int>(); number < 0 || number >= static_cast<int>(values_.size()))
                    throw ArgumentError(expected("the numbers of values", "calls", std::to_string(number), "list the value"));
            calls_.push_back(maker->second({constants, places}, values_));
            for (const int value : calls_.back()->written()) given_[of_[static_cast<std::size_t>(value)]].written = true;
        }
    }

    /// Makes the calls; or none, and false, where memory that they write to is another tensor's too, or holds numbers that torch has negated in word only.
    bool run(const py::list& tensors) const {
        if (tensors.size() != given_.size())
            throw ArgumentError(expected(std::to_string(given_.size()) + " tensors", "tensors", std::to_string(tensors.size()), "pass all"));
        std::vector<Memory> memory;
        memory.reserve(given_.size());
        try {
            for (std::size_t i = 0; i < given_.size(); ++i) memory.push_back(read(tensors[i], i));
        } catch (const NegatedError&) {
            return false;
        }
        if (!lie_apart(memory)) return false;
        std::vector<StridedView> values = values_;
        for (std::size_t i = 0; i < values.size(); ++i) values[i].data = memory[of_[i]].begin + offsets_[i];
        const py::gil_scoped_release released;
        for (const auto& call : calls_) call->run(values);
        return true;
    }

  private:
    void add(int tensor, std::int64_t offset, const python::DTypeLike& dtype, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides) {
        const bool fits = tensor >= 0 && tensor < static_cast<int>(given_.size()) && offset >= 0 && shape.size() == strides.size() &&
                          shape.size() <= kMaxDims;
        if (!fits || std::any_of(strides.begin(), strides.end(), [](auto stride) { return stride < 0; }))
            throw ArgumentError(expected("a tensor, a byte of it, and as many strides as sizes", "values", "another", "describe the value"));
        StridedView view;
        view.dtype = fusible::arg<DType>::from(dtype, {2, "values"});
        view.ndim = static_cast<int>(shape.size());
        std::copy(shape.begin(), shape.end(), view.shape);
        std::copy(strides.begin(), strides.end(), view.strides);
        python::check_sizes(view, {2, "values"});
        const auto size = static_cast<std::int64_t>(size_of(view.dtype));
        Given& of = given_[static_cast<std::size_t>(tensor)];
        of.bytes = std::max(of.bytes, offset + product(view.extent(), size, "the bytes of a value"));
        values_.push_back(view);
        of_.push_back(static_cast<std::size_t>(tensor));
        offsets_.push_back(offset);
    }

    Memory read(const py::handle& tensor, std::size_t number) const {
        const python::Argument argument{1, "tensors"};
        const StridedView view = python::read_strided(tensor, argument);
        const std::int64_t bytes = view.extent() * static_cast<std::int64_t>(size_of(view.dtype));
        if (bytes < given_[number].bytes)
            throw ShapeError(expected("at least " + std::to_string(given_[number].bytes) + " bytes", "tensor " + std::to_string(number) + " of a program",
                                      std::to_string(bytes), "pass one that lies as it was described"));
        auto* const begin = static_cast<std::uint8_t*>(view.data);
        return {begin, begin + bytes};
    }

    bool lie_apart(const std::vector<Memory>& memory) const {
        for (std::size_t i = 0; i < memory.size(); ++i) {
            if (!given_[i].written) continue;
            for (std::size_t j = 0; j < memory.size(); ++j)
                if (i != j && memory[i].begin < memory[j].end && memory[j].begin < memory[i].end) return false;
        }
        return true;
    }

    std::vector<Given> given_;
    std::vector<StridedView> values_;
    std::vector<std::size_t> of_;  // whose part each value is
    std::vector<std::int64_t> offsets_;
    std::vector<std::unique_ptr<program::Call>> calls_;
};

py::typing::Callable<bool(const py::list&)> make_program(int tensors, const py::list& values, const py::list& calls) {
    if (tensors < 0) throw ArgumentError(expected("a number >= 0", "tensors", std::to_string(tensors), "pass how many there are"));
    const auto made = std::make_shared<const Program>(tensors, values.cast<std::vector<Program::Value>>(), calls.cast<std::vector<Program::Listed>>());
    return py::cpp_function([made](const py::list& given) { return made->run(given); }, py::arg("tensors"));
}

/// Elements one after another, of a tensor whose elements may lie apart.
template <class T>
void copy_elements(const StridedView& src, int dim, const T* from, T*& to) {
    if (dim == src.ndim) {
        *to++ = *from;
        return;
    }
    if (dim + 1 == src.ndim && src.strides[dim] == 1) {
        std::memcpy(to, from, static_cast<std::size_t>(src.shape[dim]) * sizeof(T));
        to += src.shape[dim];
        return;
    }
    for (std::int64_t i = 0; i < src.shape[dim]; ++i) copy_elements(src, dim + 1, from + i * src.strides[dim], to);
}

template <class T>
void copy_as(const StridedView& src, const TensorView& dst) {
    T* to = dst.as<T>();
    copy_elements(src, 0, src.as<const T>(), to);
}

/// Of programs alone, which have no torch between their calls: a copy; what is read after memory was written to that a compiler knows nothing of.
void copy(const StridedView& src, const TensorView& dst) {
    check_numel(dst, "dst", src.numel());
    check_dtype(dst, "dst", size_of(dst.dtype) == size_of(src.dtype), "one as wide as that of src");
    switch (size_of(src.dtype)) {
        case 1: return copy_as<std::uint8_t>(src, dst);
        case 2: return copy_as<std::uint16_t>(src, dst);
        case 4: return copy_as<std::uint32_t>(src, dst);
        default: return copy_as<std::uint64_t>(src, dst);
    }
}

/// ``dst = src / by``, in float32.
void quotient(const TensorView& src, float by, const TensorView& dst) {
    check_numel(dst, "dst", src.numel());
    check_dtype(src, "src", src.dtype == DType::Float32, "float32");
    check_dtype(dst, "dst", dst.dtype == DType::Float32, "float32");
    for (std::int64_t i = 0; i < src.numel(); ++i) dst.as<float>()[i] = src.as<const float>()[i] / by;
}

/// ``dst``, of bfloat16, is ``src``, of float32, rounded to nearest even; a NaN stays one.
void round(const TensorView& src, const TensorView& dst) {
    check_numel(dst, "dst", src.numel());
    check_dtype(src, "src", src.dtype == DType::Float32, "float32");
    check_dtype(dst, "dst", dst.dtype == DType::BFloat16, "bfloat16");
    for (std::int64_t i = 0; i < src.numel(); ++i) {
        std::uint32_t bits;
        std::memcpy(&bits, src.as<const float>() + i, sizeof bits);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        dst.as<std::uint16_t>()[i] = static_cast<std::uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
}

void zero(const TensorView& dst) { std::memset(dst.data, 0, static_cast<std::size_t>(dst.numel()) * size_of(dst.dtype)); }

}  // namespace

void bind_programs(pybind11::module_& m) {
    using pybind11::arg;
    compiled::offer("copy", copy, arg("src"), arg("dst"));
    program::offer("copy", copy, reads<1>, arg("src"), arg("dst"));
    program::offer("quotient", quotient, reads<1>, arg("src"), arg("by"), arg("dst"));
    program::offer("round", round, reads<1>, arg("src"), arg("dst"));
    program::offer("zero", zero, reads<>, arg("dst"));
    m.def("program", make_program, arg("tensors"), arg("values"), arg("calls"));
}

}  // namespace fusible
