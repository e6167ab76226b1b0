// The rotary embedding: heads around a vector's width, with and without elements that are only copied, in every layout.
#include <cstdlib>
#include <cstring>
#include <limits>

#include "rope/rope.hpp"
#include "sanitized.hpp"

namespace fusible::rope {

namespace {

StridedView strided(const Buffer& buffer, std::initializer_list<std::int64_t> shape) {
    StridedView view;
    view.data = buffer.view.data;
    view.dtype = buffer.view.dtype;
    for (const std::int64_t size : shape) view.shape[view.ndim++] = size;
    std::int64_t stride = 1;
    for (int i = view.ndim - 1; i >= 0; stride *= view.shape[i--]) view.strides[i] = stride;
    return view;
}

void exercise(std::int64_t width, std::int64_t rotated, DType wide, bool interleaved, bool backward) {
    constexpr std::int64_t kLength = 4, kBatch = 2, kHeads = 3;
    const Buffer x(wide, kLength * kBatch * kHeads, width), y(wide, kLength * kBatch * kHeads, width), freqs(DType::Float32, 9, rotated);
    const Buffer start(DType::Int32, 1, kBatch), bounds(DType::Int32, 1, kBatch + 1);
    const std::int32_t starts[kBatch] = {3, 0}, ends[kBatch + 1] = {0, 3, 7};
    std::memcpy(start.view.data, starts, sizeof starts);
    std::memcpy(bounds.view.data, ends, sizeof ends);
    rope(strided(x, {kLength, kBatch, kHeads, width}), y.view, freqs.view, true, interleaved, backward, start.view, {}, 1, 0, 2);
    rope(strided(x, {kBatch, kLength, kHeads, width}), y.view, freqs.view, false, interleaved, backward, {}, {}, 2, 1, 2);
    rope(strided(x, {kLength * kBatch, kHeads, width}), y.view, freqs.view, false, interleaved, backward, start.view, bounds.view, 1, 0, 2);
}

template <class Call>
void expect_refusal(Call&& call) {
    try {
        call();
    } catch (const Error&) {
        return;
    }
    std::abort();
}

/// Bounds and starts that point anywhere.
void exercise_indices() {
    const Buffer x(DType::Float32, 6, 8), y(DType::Float32, 6, 8), freqs(DType::Float32, 9, 8);
    const StridedView packed = strided(x, {6, 1, 8}), apart = strided(x, {3, 2, 1, 8});
    for (const std::int32_t wrong : {-1, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()})
        for (int place = 0; place < 3; ++place) {
            const Buffer bounds(DType::Int32, 1, 3), start(DType::Int32, 1, 2);
            const std::int32_t ends[] = {0, 2, 5}, zeros[] = {0, 0};
            std::memcpy(bounds.view.data, ends, sizeof ends);
            std::memcpy(start.view.data, zeros, sizeof zeros);
            start.view.as<std::int32_t>()[place % 2] = wrong;
            expect_refusal([&] { rope(packed, y.view, freqs.view, false, false, false, start.view, bounds.view, 1, 0, 2); });
            expect_refusal([&] { rope(apart, y.view, freqs.view, true, false, false, start.view, {}, 1, 0, 2); });
            bounds.view.as<std::int32_t>()[place] = wrong;
            expect_refusal([&] { rope(packed, y.view, freqs.view, false, false, false, {}, bounds.view, 1, 0, 2); });
        }
}

const Drive driver([] {
    exercise_indices();
    for (const std::int64_t width : {0, 2, 14, 16, 34, 64, 130})
        for (const std::int64_t rest : {0, 2, 14})
            for (const DType wide : {DType::Float32, DType::Float16, DType::BFloat16})
                for (const bool interleaved : {false, true}) exercise(width + rest, width, wide, interleaved, rest == 2);
});

}  // namespace

}  // namespace fusible::rope
