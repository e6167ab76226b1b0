// The optimizer's passes over lists of tensors of several sizes and types.
#include "optimizer/optimizer.hpp"
#include "sanitized.hpp"

namespace fusible::optimizer {

namespace {

constexpr std::int64_t kCounts[] = {0, 1, 15, 16, 255, 257, 513, 16 * 1024 + 3};

struct List {
    explicit List(DType dtype) {
        for (const std::int64_t count : kCounts) {
            buffers.emplace_back(dtype, 1, count);
            views.push_back(buffers.back().view);
        }
    }

    std::vector<Buffer> buffers;
    TensorList views;
};

/// A scale, or none, for each tensor of a list.
struct Numbers {
    explicit Numbers(std::int64_t count) {
        for (std::size_t i = 0; i < std::size(kCounts); ++i) {
            buffers.emplace_back(DType::Float32, 1, count);
            views.push_back(buffers.back().view);
        }
    }

    std::vector<Buffer> buffers;
    TensorList views;
};

void exercise(DType a, DType b, bool decoupled) {
    const List g(a), p(b), m(a), v(b), master(DType::Float32);
    multi_tensor_adam(g.views, p.views, m.views, v.views, {}, 0.1, 0.9, 0.95, 1e-8, 0.5, 0.5, decoupled, 0.1, 2);
    multi_tensor_adam(g.views, p.views, m.views, v.views, master.views, 0.1, 0.9, 0.95, 1e-8, 0.5, 0.5, decoupled, 0.0, 2);
    const List first(DType::Byte), second(DType::Float16), half(DType::Float16), words(DType::Int16);
    const Numbers scales[] = {Numbers(1), Numbers(1), Numbers(1), Numbers(0)};
    multi_tensor_adam_scaled(g.views, p.views, first.views, second.views, scales[0].views, scales[1].views, {}, {}, 0.1, 0.9, 0.95, 1e-8, 0.5, 0.5,
                             decoupled, 0.1, 2);
    multi_tensor_adam_scaled(g.views, p.views, second.views, first.views, scales[0].views, scales[1].views, half.views, scales[2].views, 0.1, 0.9, 0.95,
                             1e-8, 0.5, 0.5, decoupled, 0.0, 2);
    if (b == DType::BFloat16)
        multi_tensor_adam_scaled(g.views, p.views, m.views, first.views, a == DType::Float16 ? scales[0].views : scales[3].views, scales[1].views,
                                 words.views, scales[3].views, 0.1, 0.9, 0.95, 1e-8, 0.5, 0.5, decoupled, 0.1, 2);
    multi_tensor_sgd(g.views, p.views, m.views, {}, 0.1, 0.0, 0.0, 0.1, 1.0, false, false, decoupled, 2);
    multi_tensor_sgd(g.views, p.views, m.views, v.views, 0.1, 0.9, 0.5, 0.1, 0.5, !decoupled, decoupled, decoupled, 2);
    multi_tensor_scale(g.views, p.views, 0.3, {}, 2);
    multi_tensor_l2norm(g.views, 2);
}

const Drive driver([] {
    for (const DType a : {DType::Float32, DType::Float16, DType::BFloat16})
        for (const DType b : {DType::Float32, DType::Float16, DType::BFloat16})
            for (const bool decoupled : {false, true}) exercise(a, b, decoupled);
});

}  // namespace

}  // namespace fusible::optimizer
