// `wrap(f)`: the native function f as Python calls it. Its arguments are read by `arg<T>`; the GIL is released while it runs.
#pragma once

#include <pybind11/pybind11.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "fusible/arguments.hpp"

namespace fusible {

namespace detail {

template <class T>
using converted = arg<std::decay_t<T>>;

template <class R, class... A, std::size_t... I>
R call_native(R (*function)(A...), std::index_sequence<I...>, const typename converted<A>::accepts&... values) {
    // Braces fix the order of evaluation, so that the first wrong argument is the one reported.
    std::tuple<std::decay_t<A>...> arguments{converted<A>::from(values, static_cast<int>(I) + 1)...};
    const pybind11::gil_scoped_release released;
    return std::apply(function, arguments);
}

}  // namespace detail

template <class R, class... A>
auto wrap(R (*function)(A...)) {
    static_assert(!std::is_base_of_v<pybind11::handle, std::decay_t<R>>, "a wrapped function runs without the GIL: return a C++ value");
    return [function](const typename detail::converted<A>::accepts&... values) -> R {
        return detail::call_native<R, A...>(function, std::index_sequence_for<A...>{}, values...);
    };
}

}  // namespace fusible
