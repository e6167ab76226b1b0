// Attention forward and backward, dense, one after another and in pages, at the edges of its tiles; and the copies into a cache.
#include <cstdlib>
#include <limits>

#include "attention/attention.hpp"

#include "sanitized.hpp"

namespace fusible::attention {

namespace {

/// A tensor [b, s, heads, width] or, with b = 0, [s, heads, width], on a buffer of exactly its size.
struct Tokens {
    Tokens(DType dtype, std::int64_t b, std::int64_t s, std::int64_t heads, std::int64_t width)
        : buffer(dtype, (b == 0 ? 1 : b) * s * heads, width) {
        view.data = buffer.view.data;
        view.dtype = dtype;
        view.ndim = b == 0 ? 3 : 4;
        const std::int64_t shape[] = {b, s, heads, width};
        std::int64_t stride = 1;
        for (int i = view.ndim - 1; i >= 0; --i) {
            view.shape[i] = shape[i + 4 - view.ndim];
            view.strides[i] = stride;
            stride *= view.shape[i];
        }
    }

    Buffer buffer;
    StridedView view;
};

struct Integers {
    explicit Integers(std::initializer_list<std::int32_t> values) : buffer(DType::Int32, 1, static_cast<std::int64_t>(values.size())) {
        std::int64_t i = 0;
        for (const std::int32_t value : values) buffer.view.as<std::int32_t>()[i++] = value;
    }

    Buffer buffer;
};

struct Mask {
    bool causal;
    bool bottom_right;
    int left;
    int right;
};

struct Sizes {
    std::int64_t b;
    std::int64_t queries;
    std::int64_t keys;
    std::int64_t heads;
    std::int64_t groups;
    std::int64_t width;
    std::int64_t value_width;
};

void exercise(DType dtype, const Sizes& z, const Mask& mask, double dropout, const OptionalView& lengths_q, const OptionalView& lengths_kv) {
    const Tokens q(dtype, z.b, z.queries, z.heads, z.width), k(dtype, z.b, z.keys, z.groups, z.width), v(dtype, z.b, z.keys, z.groups, z.value_width);
    const Tokens o(dtype, z.b, z.queries, z.heads, z.value_width), grad(dtype, z.b, z.queries, z.heads, z.value_width);
    const Tokens stats(DType::Float32, z.b, z.queries, z.heads, 1), largest(DType::Float32, z.b, z.queries, z.heads, 1);
    const Tokens dq(dtype, z.b, z.queries, z.heads, z.width), dk(dtype, z.b, z.keys, z.groups, z.width);
    const Tokens dv(dtype, z.b, z.keys, z.groups, z.value_width);
    const Buffer extra(DType::Float32, 1, z.heads), extra_gradient(DType::Float32, 1, z.heads), state(DType::Int64, 1, 2);
    attention_forward(q.view, k.view, v.view, o.view, stats.view, largest.view, 0.1f, mask.causal, mask.bottom_right, mask.left, mask.right,
                      mask.bottom_right, lengths_q, {}, lengths_kv, {}, {}, {}, extra.view, dropout, state.view, z.queries, z.keys, 2);
    attention_backward(q.view, k.view, v.view, o.view, grad.view, stats.view, dq.view, dk.view, dv.view, 0.1f, mask.causal, mask.bottom_right,
                       mask.left, mask.right, mask.bottom_right, lengths_q, {}, lengths_kv, {}, extra.view, extra_gradient.view, dropout, state.view,
                       z.queries, z.keys, 2);
}

void exercise_cache(DType dtype, std::int64_t page) {
    const std::int64_t groups = 2, width = 17;
    const Tokens q(dtype, 0, 4, 4, width), cache(dtype, 40 / page + 3, page, groups, width), o(dtype, 0, 4, 4, width);
    const Tokens stats(DType::Float32, 0, 4, 4, 1), largest(DType::Float32, 0, 4, 4, 1), tokens(dtype, 0, 4, groups, width);
    const Tokens values(dtype, 0, 4, groups, 3), value_cache(dtype, 40 / page + 3, page, groups, 3);
    const Integers added{0, 1, 4}, cached{0, 19, 40};
    const std::int64_t each = 21 / page + 1;
    const Buffer table(DType::Int32, 2, each);
    for (std::int64_t i = 0; i < 2 * each; ++i) table.view.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % (40 / page + 3));
    copy_to_cache(tokens.view, cache.view, values.view, value_cache.view, table.view, added.buffer.view, cached.buffer.view, true, 2);
    attention_forward(q.view, cache.view, cache.view, o.view, stats.view, largest.view, 0.1f, true, true, -1, -1, false, added.buffer.view, {},
                      cached.buffer.view, {}, table.view, {}, {}, 0.0, {}, 4, 21, 2);
    const Tokens dense(dtype, 3, 21, groups, width), dense_values(dtype, 3, 21, groups, width);
    const Integers rows{2, 0};
    copy_to_cache(tokens.view, dense.view, tokens.view, dense_values.view, rows.buffer.view, added.buffer.view, cached.buffer.view, false, 2);
}

/// Whether a call refuses its arguments; the sanitizer sees what it reads before it does.
template <class Call>
void refuses(const Call& call) {
    try {
        call();
    } catch (const Error&) {
        return;
    }
    std::abort();
}

/// Lengths and pages that point anywhere, in each place.
void exercise_indices() {
    const Tokens q(DType::Float32, 0, 4, 2, 8), k(DType::Float32, 6, 2, 2, 8), o(DType::Float32, 0, 4, 2, 8);
    const Tokens stats(DType::Float32, 0, 4, 2, 1), largest(DType::Float32, 0, 4, 2, 1);
    for (const std::int32_t wrong : {-1, std::numeric_limits<std::int32_t>::min(), 1 << 20, std::numeric_limits<std::int32_t>::max()})
        for (int place = 0; place < 10; ++place) {
            const Integers added{0, 2, 4}, cached{0, 4, 8};
            const Buffer table(DType::Int32, 2, 2);
            auto* pages = table.view.as<std::int32_t>();
            for (int i = 0; i < 4; ++i) pages[i] = i;
            (place < 3 ? added.buffer.view.as<std::int32_t>() + place
             : place < 6 ? cached.buffer.view.as<std::int32_t>() + place - 3
                         : pages + place - 6)[0] = wrong;
            refuses([&] { copy_to_cache(q.view, k.view, q.view, k.view, table.view, added.buffer.view, cached.buffer.view, true, 2); });
            refuses([&] {
                attention_forward(q.view, k.view, k.view, o.view, stats.view, largest.view, 0.1f, true, true, -1, -1, false, added.buffer.view, {},
                                  cached.buffer.view, {}, table.view, {}, {}, 0.0, {}, 4, 4, 2);
            });
        }
}

const Drive driver([] {
    exercise_indices();
    const Integers lengths_q{0, 3, 3, 70}, lengths_kv{0, 5, 5, 90};
    for (const DType dtype : {DType::Float32, DType::Float16, DType::BFloat16}) {
        for (const Mask& mask : {Mask{false, false, -1, -1}, Mask{true, true, -1, -1}, Mask{true, false, 9, 0}})
            for (const Sizes& sizes : {Sizes{1, 1, 1, 1, 1, 1, 1}, Sizes{2, 7, 300, 4, 2, 33, 65}, Sizes{1, 131, 67, 3, 1, 64, 31},
                                       Sizes{1, 97, 259, 1, 1, 65, 64}, Sizes{2, 0, 3, 1, 1, 4, 4}, Sizes{1, 3, 0, 1, 1, 4, 4}})
                for (const double dropout : {0.0, 0.4}) exercise(dtype, sizes, mask, dropout, {}, {});
        exercise(dtype, {0, 70, 90, 4, 2, 12, 20}, {true, true, -1, -1}, 0.0, lengths_q.buffer.view, lengths_kv.buffer.view);
        exercise(dtype, {3, 80, 95, 2, 2, 12, 20}, {true, false, -1, -1}, 0.0, lengths_q.buffer.view, lengths_kv.buffer.view);
        for (const std::int64_t page : {1, 8, 64}) exercise_cache(dtype, page);
    }
});

}  // namespace

}  // namespace fusible::attention
