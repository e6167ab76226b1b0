// Lists of native calls that run without Python between them: what `define` offers to Python, a program may call, with the same checks of its
// arguments. What is the same each time is read when a program is made; tensors are views of those that a run is given.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fusible/arguments.hpp"
#include "fusible/strided_view.hpp"

namespace fusible::program {

namespace py = pybind11;

/// One call of a program. `values`: every view that the program knows, where it lies in this run.
class Call {
  public:
    virtual ~Call() = default;
    virtual void run(const std::vector<StridedView>& values) const = 0;
    /// The values that it may write to.
    virtual std::vector<int> written() const = 0;
};

/// What a call is made of: parameters that are the same each time, and those that are values, by the numbers of these.
struct Description {
    py::dict constants;
    py::dict values;
};

/// How a parameter of type T is taken from a value; `known` is false of a type that no value is.
template <class T>
struct FromValue {
    static constexpr bool known = false;
};

inline TensorView contiguous(const StridedView& value) {
    TensorView view;
    static_cast<TensorBase&>(view) = value;
    return view;
}

inline void require_contiguous(const StridedView& value, const char* name) {
    if (!value.is_contiguous()) throw ArgumentError(expected("a contiguous tensor", name, "strides with gaps", "copy it before"));
}

template <>
struct FromValue<TensorView> {
    static constexpr bool known = true;
    static void check(const StridedView& value, const char* name) { require_contiguous(value, name); }
    static TensorView read(const StridedView& value) { return contiguous(value); }
};

template <>
struct FromValue<OptionalView> {
    static constexpr bool known = true;
    static void check(const StridedView& value, const char* name) { require_contiguous(value, name); }
    static OptionalView read(const StridedView& value) { return contiguous(value); }
};

template <>
struct FromValue<StridedView> {
    static constexpr bool known = true;
    static void check(const StridedView&, const char*) {}
    static StridedView read(const StridedView& value) { return value; }
};

template <>
struct FromValue<Scalar> {
    static constexpr bool known = true;
    static void check(const StridedView& value, const char* name) {
        check_dtype(value, name, value.dtype == DType::Float32, "float32");
        check_numel(value, name, 1);
    }
    static Scalar read(const StridedView& value) { return Scalar{*value.as<const float>()}; }
};

/// A native function with the arguments of one call.
template <class ReadOnly, class R, class... A>
class Bound final : public Call {
    static constexpr std::size_t kCount = sizeof...(A);
    using Arguments = std::tuple<std::decay_t<A>...>;

  public:
    template <class... Named>
    Bound(R (*function)(A...), const Description& call, const std::vector<StridedView>& values, const Named&... named) : function_(function) {
        prepare(std::index_sequence_for<A...>{}, call, values, named...);
    }

    void run(const std::vector<StridedView>& values) const override {
        Arguments arguments = arguments_;
        fill(std::index_sequence_for<A...>{}, arguments, values);
        std::apply(function_, arguments);
    }

    std::vector<int> written() const override {
        std::vector<int> found;
        for (std::size_t i = 0; i < kCount; ++i)
            if (places_[i] >= 0 && !ReadOnly::has(static_cast<int>(i) + 1)) found.push_back(places_[i]);
        return found;
    }

  private:
    template <std::size_t... I, class... Named>
    void prepare(std::index_sequence<I...>, const Description& call, const std::vector<StridedView>& values, const Named&... named) {
        (prepare_one<I>(call, values, named), ...);
    }

    template <std::size_t I, class Named>
    void prepare_one(const Description& call, const std::vector<StridedView>& values, const Named& named) {
        using T = std::tuple_element_t<I, Arguments>;
        const py::str name(named.name);
        places_[I] = -1;
        if (call.values.contains(name)) {
            if constexpr (FromValue<T>::known) {
                places_[I] = call.values[name].cast<int>();
                FromValue<T>::check(values.at(static_cast<std::size_t>(places_[I])), named.name);
            } else {
                throw ArgumentError(expected("no tensor", named.name, "one", "pass what it takes"));
            }
        } else if (call.constants.contains(name)) {
            std::get<I>(arguments_) = constant<T>(call.constants[name], static_cast<int>(I) + 1, named.name);
        } else {
            std::get<I>(arguments_) = otherwise<T>(named, static_cast<int>(I) + 1);
        }
    }

    template <class T>
    static T constant(const py::object& value, int position, const char* name) {
        using Accepts = typename arg<T>::accepts;
        return arg<T>::from(py::cast<Accepts>(value), python::Argument{position, name});
    }

    template <class T>
    static T otherwise(const py::arg& named, int) {
        throw ArgumentError(expected("a value", named.name, "none", "pass one"));
    }

    template <class T>
    static T otherwise(const py::arg_v& named, int position) {
        return constant<T>(named.value, position, named.name);
    }

    template <std::size_t... I>
    void fill(std::index_sequence<I...>, Arguments& arguments, const std::vector<StridedView>& values) const {
        (fill_one<I>(arguments, values), ...);
    }

    template <std::size_t I>
    void fill_one(Arguments& arguments, const std::vector<StridedView>& values) const {
        using T = std::tuple_element_t<I, Arguments>;
        if constexpr (FromValue<T>::known)
            if (places_[I] >= 0) std::get<I>(arguments) = FromValue<T>::read(values[static_cast<std::size_t>(places_[I])]);
    }

    R (*function_)(A...);
    Arguments arguments_;
    std::array<int, kCount> places_;
};

using Maker = std::function<std::unique_ptr<Call>(const Description& call, const std::vector<StridedView>& values)>;

/// What this module offers to programs. Never destroyed: it has Python objects, the defaults of parameters, and outlives the interpreter.
inline std::map<std::string, Maker>& makers() {
    static auto* const of_module = new std::map<std::string, Maker>;
    return *of_module;
}

/// Lets programs call a native function.
template <class ReadOnly, class R, class... A, class... Named>
void offer(const char* name, R (*function)(A...), ReadOnly, const Named&... named) {
    if constexpr ((FromValue<std::decay_t<A>>::known || ...))
        makers()[name] = [function, named = std::make_tuple(named...)](const Description& call, const std::vector<StridedView>& values) {
            return std::apply(
                [&](const auto&... each) -> std::unique_ptr<Call> {
                    return std::make_unique<Bound<ReadOnly, R, A...>>(function, call, values, each...);
                },
                named);
        };
}

}  // namespace fusible::program
