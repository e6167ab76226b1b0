// The compiled extension `fusible.cpp_extensions._native`: one line a function.
#include "fusible/module.hpp"

#include "cast/cast.hpp"
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

}  // namespace

FUSIBLE_MODULE(_native, m) {
    using pybind11::arg;
    const auto none = pybind11::none();

    m.def("quantize", wrap(quantize), arg("src"), arg("dst"), arg("scale"), arg("fp8_dtype"), arg("dst_transposed") = none, arg("amax") = none,
          arg("accumulate_amax") = false, arg("bias_grad") = none, arg("noop") = none, arg("num_threads") = 0);
    m.def("dequantize", wrap(dequantize), arg("src"), arg("dst"), arg("scale_inv"), arg("fp8_dtype"), arg("num_threads") = 0);
    m.def("amax", wrap(amax), arg("src"), arg("out") = none, arg("num_threads") = 0);
    m.def("transpose_bytes", wrap(transpose_bytes), arg("src"), arg("dst"), arg("num_threads") = 0);

    m.def("set_level", wrap(set_level), arg("name"));
    m.def("get_level", wrap(get_level));
    m.def("usable_levels", wrap(usable_levels));
    m.def("compiled_levels", wrap(compiled_levels));
    m.def("cpu_features", wrap(cpu_features));
    m.def("set_num_threads", wrap(set_num_threads), arg("count"));
    m.def("get_num_threads", wrap(get_num_threads));
    m.def("has_openmp", wrap(has_openmp));
    m.def("compiler", wrap(compiler));
}

}  // namespace fusible
