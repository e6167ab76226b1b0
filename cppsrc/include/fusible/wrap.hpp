// `define(m, "f", f, arg("x"))`: the native function f as Python calls it. Its arguments are read by `arg<T>`; the GIL is released while it runs.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fusible/arguments.hpp"
#include "fusible/compiled_calls.hpp"
#include "fusible/native_program.hpp"
#include "fusible/overlap.hpp"

namespace fusible {

/// Positions, from 1, of tensors that a native function only reads: `define(m, "f", f, reads<1, 2>, ..)`. Of one that torch has negated without
/// touching its memory the function is given a copy; of any other argument such a tensor is refused.
template <int... Positions>
struct Reads {
    static bool has(int position) { return ((position == Positions) || ...); }
};

template <int... Positions>
inline constexpr Reads<Positions...> reads{};

namespace detail {

template <class T>
using converted = arg<std::decay_t<T>>;

using Kept = std::vector<pybind11::object>;  // copies, for the length of a call

inline pybind11::object resolved(const pybind11::handle& value) {
    if (!PySequence_Check(value.ptr()) || pybind11::hasattr(value, "resolve_neg")) return value.attr("resolve_neg")();
    pybind11::list items;
    for (const auto& item : value) items.append(item.attr("resolve_neg")());
    return items;
}

template <class T, class Accepts>
std::decay_t<T> read(const Accepts& value, const python::Argument& argument, [[maybe_unused]] bool only_read, [[maybe_unused]] Kept& kept) {
    if constexpr (!std::is_base_of_v<pybind11::object, Accepts>) {
        return converted<T>::from(value, argument);
    } else {
        try {
            return converted<T>::from(value, argument);
        } catch (const NegatedError&) {
            if (!only_read) throw;
        }
        kept.push_back(resolved(value));
        return converted<T>::from(pybind11::reinterpret_borrow<Accepts>(kept.back()), argument);
    }
}

template <class ReadOnly, class R, class... A, std::size_t... I>
R call_native(R (*function)(A...), const char* const* names, std::index_sequence<I...>, const typename converted<A>::accepts&... values) {
    Kept kept;
    // Braces fix the order of evaluation, so that the first wrong argument is the one reported.
    std::tuple<std::decay_t<A>...> arguments{
        read<A>(values, {static_cast<int>(I) + 1, names == nullptr ? nullptr : names[I]}, ReadOnly::has(static_cast<int>(I) + 1), kept)...};
    if (names != nullptr) {
        Spans spans;
        (spans.add(std::get<I>(arguments), !ReadOnly::has(static_cast<int>(I) + 1), static_cast<int>(I)), ...);
        if (const auto found = spans.find_overlap())
            throw ArgumentError(expected("memory of its own", names[found->first.argument], std::string("that of ") + names[found->second.argument],
                                         "pass a tensor that shares none"));
    }
    const pybind11::gil_scoped_release released;
    return std::apply(function, arguments);
}

}  // namespace detail

/// The native function without the names of its arguments, which a refusal then counts.
template <class R, class... A, class ReadOnly = Reads<>>
auto wrap(R (*function)(A...), ReadOnly = {}, const char* const* names = nullptr) {
    static_assert(!std::is_base_of_v<pybind11::handle, std::decay_t<R>>, "a wrapped function runs without the GIL: return a C++ value");
    return [function, names](const typename detail::converted<A>::accepts&... values) -> R {
        return detail::call_native<ReadOnly, R, A...>(function, names, std::index_sequence_for<A...>{}, values...);
    };
}

/// Binds `function` to `name` of a module, and offers it to programs, compiled ones and lists of calls; there is a `pybind11::arg` for each of its parameters, by whose name a
/// refusal calls it.
template <class R, class... A, int... Positions, class... Named>
void define(pybind11::module_& m, const char* name, R (*function)(A...), Reads<Positions...> read_only, const Named&... named) {
    static_assert(sizeof...(Named) == sizeof...(A), "a name for each parameter");
    // The texts are literals of the bindings; the table is kept, as the module is, for the life of the process.
    const auto* names = new std::array<const char*, sizeof...(A) + 1>{named.name...};
    m.def(name, wrap(function, read_only, names->data()), named...);
    compiled::offer(name, function, named...);
    program::offer(name, function, read_only, named...);
}

}  // namespace fusible
