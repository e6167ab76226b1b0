// What the drivers of the sanitized kernels share: buffers of exactly the right size, and a list that each driver adds itself to.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <vector>

#include "fusible/tensor_view.hpp"

namespace fusible {

/// A matrix on the heap, of random bytes: a sanitizer sees a byte too far.
struct Buffer {
    Buffer(DType dtype, std::int64_t rows, std::int64_t cols) : bytes(new unsigned char[static_cast<std::size_t>(rows * cols) * size_of(dtype)]) {
        view.data = bytes.get();
        view.dtype = dtype;
        view.ndim = 2;
        view.shape[0] = rows;
        view.shape[1] = cols;
        for (std::size_t i = 0; i < static_cast<std::size_t>(rows * cols) * size_of(dtype); ++i) bytes[i] = static_cast<unsigned char>(std::rand());
    }

    std::unique_ptr<unsigned char[]> bytes;
    TensorView view;
};

/// Runs the kernels of a family at the level in force: `static const Drive driver([] { ... });`.
struct Drive {
    using Function = void (*)();

    explicit Drive(Function function) { all().push_back(function); }

    static std::vector<Function>& all() {
        static std::vector<Function> functions;
        return functions;
    }
};

}  // namespace fusible
