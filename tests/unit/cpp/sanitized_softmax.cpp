// Softmax and its gradient, rows around a vector's width, with every mask.
#include "sanitized.hpp"
#include "softmax/softmax.hpp"

namespace fusible::softmax {

namespace {

TensorView reshaped(const Buffer& buffer, std::initializer_list<std::int64_t> shape) {
    TensorView view = buffer.view;
    view.ndim = 0;
    for (const std::int64_t size : shape) view.shape[view.ndim++] = size;
    return view;
}

void exercise(std::int64_t queries, std::int64_t keys, DType wide) {
    constexpr std::int64_t kBatch = 2, kHeads = 3;
    const Buffer x(wide, kBatch * kHeads * queries, keys), y(wide, kBatch * kHeads * queries, keys), mask(DType::Byte, kBatch * queries, keys);
    const Buffer dx(wide, kBatch * kHeads * queries, keys);
    const TensorView scores = reshaped(x, {kBatch, kHeads, queries, keys});
    softmax_forward(scores, y.view, 0.5, reshaped(mask, {kBatch, 1, queries, keys}), false, 2);
    for (const bool causal : {false, true}) {
        softmax_forward(scores, y.view, 0.5, {}, causal, 2);
        softmax_backward(scores, y.view, dx.view, 0.5, causal, 2);
    }
}

const Drive driver([] {
    for (const std::int64_t queries : {0, 1, 20})
        for (const std::int64_t keys : {0, 1, 7, 8, 15, 16, 17, 65})
            for (const DType wide : {DType::Float32, DType::Float16, DType::BFloat16}) exercise(queries, keys, wide);
});

}  // namespace

}  // namespace fusible::softmax
