// Native functions as calls of a program that XLA has compiled: what `define` offers to Python, the handler offers to programs, with the same checks.
//
// A call names its function by the attribute "function". Every other attribute is a parameter by its name: a number, a text, or of a tensor its place,
// from 0 among the operands and from -1 downwards among the results. A parameter without one has its default. Where programs have no type for what the
// bytes of a tensor stand for, the parameter's name with "_bytes_are" behind it says which it is. A function may write to an operand, if
// that is memory which the program's caller wants written; what reads that memory afterwards waits for the result "done", an int32 that becomes 0.
// "zeroed" has a bit for each result that is zero before the call, for functions that leave a part of it as it is.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "fusible/default_arithmetic.hpp"
#include "fusible/strided_view.hpp"
#include "fusible/xla_interface.hpp"

namespace fusible::compiled {

inline DType dtype_of(xla::Type type) {
    switch (type) {
        case xla::Type::Bool:
        case xla::Type::UInt8:
            return DType::Byte;
        case xla::Type::Int32:
            return DType::Int32;
        case xla::Type::Int64:
            return DType::Int64;
        case xla::Type::Float16:
            return DType::Float16;
        case xla::Type::Float32:
            return DType::Float32;
        case xla::Type::BFloat16:
            return DType::BFloat16;
        case xla::Type::Float8E4M3:
            return DType::Float8E4M3;
        case xla::Type::Float8E5M2:
            return DType::Float8E5M2;
        default:
            throw DTypeError(expected("a type that native functions take", "an operand of a compiled call",
                                      "number " + std::to_string(static_cast<int>(type)) + " of XLA's", "cast it"));
    }
}

/// The arguments of one call.
class Arguments {
  public:
    explicit Arguments(const xla::Frame& frame) : frame_(frame) {}

    bool has(const char* name) const { return find(name) >= 0; }

    std::string text(const char* name) const {
        const auto* const value = static_cast<const xla::Text*>(attribute(name, xla::kTextAttribute));
        return std::string(value->data, value->length);
    }

    /// Whether a parameter is given as a number that is no place of a tensor.
    bool is_float(const char* name) const { return number(name).dtype == xla::Type::Float64; }

    double floating(const char* name) const { return read<double>(name, xla::Type::Float64); }
    std::int64_t integer(const char* name) const { return read<std::int64_t>(name, xla::Type::Int64); }
    bool boolean(const char* name) const { return read<std::uint8_t>(name, xla::Type::Bool) != 0; }

    TensorView tensor(const char* name) const {
        const std::int64_t place = integer(name);
        const xla::Buffers& buffers = place >= 0 ? frame_.operands : frame_.results;
        const std::int64_t index = place >= 0 ? place : -1 - place;
        if (index >= buffers.count) throw ArgumentError(expected("the place of a tensor", name, std::to_string(place), "record the call again"));
        const xla::Buffer& buffer = *buffers.values[index];
        if (buffer.rank > kMaxDims)
            throw ShapeError(expected("at most " + std::to_string(kMaxDims) + " dimensions", name, std::to_string(buffer.rank), "reshape it"));
        TensorView view;
        view.data = buffer.data;
        view.dtype = dtype_of(buffer.dtype);
        if (find(name, "_bytes_are") >= 0) view.dtype = told_dtype(name, view.dtype);
        view.ndim = static_cast<int>(buffer.rank);
        for (int i = 0; i < view.ndim; ++i) view.shape[i] = buffer.dims[i];
        return view;
    }

  private:
    /// The place of the attribute of that name, with what may be behind it; -1 where there is none.
    int find(const char* name, const char* behind = "") const {
        const std::size_t length = std::strlen(name), more = std::strlen(behind);
        for (int i = 0; i < frame_.attributes.count; ++i) {
            const xla::Text& found = *frame_.attributes.names[i];
            if (found.length == length + more && std::memcmp(found.data, name, length) == 0 && std::memcmp(found.data + length, behind, more) == 0) return i;
        }
        return -1;
    }

    /// What the bytes of a tensor stand for, where the call says so.
    DType told_dtype(const char* name, DType bytes) const {
        const std::int64_t number = integer((std::string(name) + "_bytes_are").c_str());
        const bool known = number >= 0 && number < 256 && is_known(static_cast<int>(number));
        if (known && bytes == DType::Byte && size_of(static_cast<DType>(number)) == 1) return static_cast<DType>(number);
        throw DTypeError(expected("bytes, and a dtype of one byte", name, std::to_string(number), "record the call again"));
    }

    const void* attribute(const char* name, int type) const {
        const int i = find(name);
        if (i < 0 || frame_.attributes.types[i] != type)
            throw ArgumentError(expected("an attribute of the parameter's type", name, i < 0 ? "none" : "another", "record the call again"));
        return frame_.attributes.values[i];
    }

    const xla::Number& number(const char* name) const { return *static_cast<const xla::Number*>(attribute(name, xla::kNumberAttribute)); }

    template <class T>
    T read(const char* name, xla::Type type) const {
        const xla::Number& found = number(name);
        if (found.dtype != type)
            throw ArgumentError(expected("a number of the parameter's type", name, "another", "record the call again"));
        T value;
        std::memcpy(&value, found.value, sizeof value);
        return value;
    }

    const xla::Frame& frame_;
};

/// Fills the results of which `bits` has the bit with zeros.
inline void zero_results(const xla::Frame& frame, std::int64_t bits) {
    for (std::int64_t i = 0; i < frame.results.count; ++i) {
        const xla::Buffer& result = *frame.results.values[i];
        std::int64_t count = 1;
        for (std::int64_t d = 0; d < result.rank; ++d) count *= result.dims[d];
        if ((bits >> i & 1) != 0) std::memset(result.data, 0, static_cast<std::size_t>(count) * size_of(dtype_of(result.dtype)));
    }
}

/// How a parameter of type T is read from the arguments of a call; `known` is false of a type that compiled programs cannot pass.
template <class T>
struct Parameter {
    static constexpr bool known = std::is_arithmetic_v<T>;
    static T read(const Arguments& arguments, const char* name) {
        if constexpr (std::is_same_v<T, bool>)
            return arguments.boolean(name);
        else if constexpr (std::is_floating_point_v<T>)
            return static_cast<T>(arguments.floating(name));
        else
            return static_cast<T>(arguments.integer(name));
    }
};

template <>
struct Parameter<TensorView> {
    static constexpr bool known = true;
    static TensorView read(const Arguments& arguments, const char* name) { return arguments.tensor(name); }
};

template <>
struct Parameter<OptionalView> {
    static constexpr bool known = true;
    static OptionalView read(const Arguments& arguments, const char* name) {
        if (!arguments.has(name)) return std::nullopt;
        return arguments.tensor(name);
    }
};

template <>
struct Parameter<StridedView> {
    static constexpr bool known = true;
    static StridedView read(const Arguments& arguments, const char* name) {
        StridedView view;
        static_cast<TensorBase&>(view) = arguments.tensor(name);
        std::int64_t stride = 1;
        for (int i = view.ndim - 1; i >= 0; --i) {
            view.strides[i] = stride;
            stride *= view.shape[i];
        }
        return view;
    }
};

template <>
struct Parameter<Scalar> {
    static constexpr bool known = true;
    static Scalar read(const Arguments& arguments, const char* name) {
        if (arguments.is_float(name)) return Scalar{static_cast<float>(arguments.floating(name))};
        const TensorView view = arguments.tensor(name);
        check_dtype(view, name, view.dtype == DType::Float32, "float32");
        check_numel(view, name, 1);
        return Scalar{*view.as<const float>()};
    }
};

template <>
struct Parameter<DType> {
    static constexpr bool known = true;
    static DType read(const Arguments& arguments, const char* name) {
        const std::int64_t number = arguments.integer(name);
        if (number >= 0 && number < 256 && is_known(static_cast<int>(number))) return static_cast<DType>(number);
        throw DTypeError(expected("a dtype", name, std::to_string(number), "pass a value of tex's DType"));
    }
};

template <>
struct Parameter<std::string> {
    static constexpr bool known = true;
    static std::string read(const Arguments& arguments, const char* name) { return arguments.text(name); }
};

using Function = std::function<void(const Arguments&)>;

/// What this module offers to programs.
inline std::map<std::string, Function>& functions() {
    static std::map<std::string, Function> of_module;
    return of_module;
}

/// The default of a parameter, where it has one that is not None.
template <class T>
std::optional<T> default_of(const pybind11::arg&) {
    return std::nullopt;
}

template <class T>
std::optional<T> default_of(const pybind11::arg_v& named) {
    if constexpr (std::is_same_v<T, Scalar>)
        return Scalar{named.value.cast<float>()};
    else if constexpr (std::is_arithmetic_v<T>)
        return named.value.cast<T>();
    else
        return std::nullopt;
}

template <class T>
T read_or(const Arguments& arguments, const char* name, const std::optional<T>& otherwise) {
    return otherwise && !arguments.has(name) ? *otherwise : Parameter<T>::read(arguments, name);
}

template <class R, class... A, std::size_t... I, class... Named>
Function bound(R (*function)(A...), std::index_sequence<I...>, const Named&... named) {
    return [function, names = std::array<const char*, sizeof...(A)>{named.name...},
            defaults = std::make_tuple(default_of<std::decay_t<A>>(named)...)](const Arguments& arguments) {
        std::tuple<std::decay_t<A>...> values{read_or<std::decay_t<A>>(arguments, names[I], std::get<I>(defaults))...};
        std::apply(function, values);
    };
}

template <class T>
constexpr bool is_tensor = std::is_base_of_v<TensorBase, T> || std::is_same_v<T, OptionalView>;

/// Lets programs call a native function of tensors, if they can pass what it takes.
template <class R, class... A, class... Named>
void offer(const char* name, R (*function)(A...), const Named&... named) {
    if constexpr ((Parameter<std::decay_t<A>>::known && ...) && (is_tensor<std::decay_t<A>> || ...))
        functions()[name] = bound(function, std::index_sequence_for<A...>{}, named...);
}

inline xla::Error* refuse(const xla::Frame& frame, int code, const char* message) {
    xla::ErrorArguments arguments{sizeof(xla::ErrorArguments), nullptr, message, code};
    return frame.api->create_error(&arguments);
}

/// What a module does around its calls: runs the last argument. One call at a time: each has all the threads that kernels may use.
using Around = void (*)(const xla::Frame& frame, const std::function<void()>& call);

inline Around& around() {
    static Around of_module = [](const xla::Frame&, const std::function<void()>& call) {
        static std::mutex one_at_a_time;
        const std::lock_guard<std::mutex> alone(one_at_a_time);
        call();
    };
    return of_module;
}

/// Runs a call.
inline xla::Error* handle(xla::Frame* frame) {
    if (frame->extensions != nullptr && frame->extensions->type == xla::kMetadata) {
        // XLA asks what version of the interface is understood: any, of the parts that xla_interface.hpp lists.
        auto* const metadata = reinterpret_cast<xla::MetadataExtension*>(frame->extensions)->metadata;
        metadata->version.major = frame->api->version.major;
        metadata->version.minor = frame->api->version.minor;
        return nullptr;
    }
    try {
        const Arguments arguments(*frame);
        const std::string name = arguments.text("function");
        const auto found = functions().find(name);
        if (found == functions().end())
            throw ArgumentError(expected("a native function", "a compiled call", "'" + name + "'", "install the version that recorded the program"));
        const DefaultArithmetic as_without_xla;
        if (arguments.has("zeroed")) zero_results(*frame, arguments.integer("zeroed"));
        around()(*frame, [&] { found->second(arguments); });
        if (arguments.has("done")) *arguments.tensor("done").as<std::int32_t>() = 0;
        return nullptr;
    } catch (const Error& error) {
        return refuse(*frame, xla::kInvalidArgument, error.what());
    } catch (const std::bad_alloc&) {
        return refuse(*frame, xla::kResourceExhausted, "a native kernel: expected scratch memory, got none from the system; make the call smaller.");
    } catch (const std::exception& error) {
        return refuse(*frame, xla::kInternal, error.what());
    }
}

}  // namespace fusible::compiled
