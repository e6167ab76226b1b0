// The compiled extension `fusible.cpp_extensions._native`: one file a family of kernels, one line a function.
#include <functional>
#include <string>
#include <vector>

#include "fusible/module.hpp"

#include "bindings/families.hpp"
#include "runtime/level.hpp"
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

/// Offers a task to XLA's threads; run here where it has none.
void schedule(const void* owner, void (*run)(void* task), void* task) {
    const xla::Frame& frame = *static_cast<const xla::Frame*>(owner);
    xla::Scheduling arguments{sizeof(xla::Scheduling), nullptr, frame.context, run, task};
    xla::Error* const error = frame.api->schedule(&arguments);
    if (error == nullptr) return;
    xla::ErrorDestruction destruction{sizeof(xla::ErrorDestruction), nullptr, error};
    frame.api->destroy_error(&destruction);
    run(task);
}

/// Loops of a compiled call run on XLA's threads, one of which makes the call. OpenMP would start as many more for each of them, and then, having more
/// threads than the CPU, let all sleep between two loops, those of torch's too.
void on_xla_threads(const xla::Frame& frame, const std::function<void()>& call) {
    const Pool pool{schedule, &frame};
    const UsingPool using_pool(pool);
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

    compiled::around() = on_xla_threads;
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
    m.def("end_idle_threads", wrap(end_idle_threads));
    m.def("compiler", wrap(compiler));
}

}  // namespace fusible
