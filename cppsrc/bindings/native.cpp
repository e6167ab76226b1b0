// The compiled extension `fusible.cpp_extensions._native`: one file a family of kernels, one line a function.
#include <functional>
#include <string>
#include <vector>

#include <pybind11/typing.h>

#include "fusible/module.hpp"

#include "bindings/families.hpp"
#include "runtime/level.hpp"
#include "runtime/team.hpp"
#include "runtime/threads.hpp"

namespace fusible {

namespace {

std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

/// XLA's threads make the calls of a compiled program, several at once.
void in_turn(const xla::Frame&, const std::function<void()>& call) {
    const Turn turn;
    call();
}

}  // namespace

FUSIBLE_MODULE(_native, m) {
    bind_casts(m);
    bind_activations(m);
    bind_norms(m);
    bind_gemm(m);
    bind_attention(m);
    bind_rope(m);
    bind_softmax(m);
    bind_optimizers(m);
    bind_fingerprint(m);
    bind_call_key(m);
    bind_layouts(m);
    bind_programs(m);

    compiled::around() = in_turn;
    m.def("xla_handler", []() -> pybind11::object { return pybind11::capsule(reinterpret_cast<void*>(&compiled::handle)); });
    m.def("xla_functions", [] {
        std::vector<std::string> names;
        for (const auto& function : compiled::functions()) names.push_back(function.first);
        return names;
    });
    define(m, "set_level", set_level, reads<>, pybind11::arg("name"));
    m.def("get_level", wrap(get_level));
    m.def("usable_levels", wrap(usable_levels));
    m.def("compiled_levels", wrap(compiled_levels));
    m.def("cpu_features", wrap(cpu_features));
    define(m, "set_num_threads", set_num_threads, reads<>, pybind11::arg("count"));
    m.def("get_num_threads", wrap(get_num_threads));
    m.def("has_openmp", wrap(has_openmp));
    m.def(
        "run_with_team",
        [](const pybind11::typing::Callable<pybind11::object()>& body) {
            pybind11::object result;
            run_with_team([&] { result = body(); });
            return result;
        },
        pybind11::arg("body"));
    m.def("compiler", wrap(compiler));
}

}  // namespace fusible
