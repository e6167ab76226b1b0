// A loop over a run of elements, vector by vector, whose last vector may be partial: one body serves both.
#pragma once

#include "simd/math.hpp"

namespace fusible::simd::FUSIBLE_LEVEL {
namespace {

/// How many lanes of a vector are elements; a whole vector is told by its type.
struct Whole {
    static constexpr int count() { return kLanes; }
};

struct Part {
    int lanes;
    int count() const { return lanes; }
};

/// Calls step(index of the first element, Whole or Part).
template <class Step>
inline void each_vector(std::int64_t count, Step step) {
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) step(i, Whole{});
    if (i < count) step(i, Part{static_cast<int>(count - i)});
}

template <class S>
inline F32 load(const S* source, Whole) {
    return load(source);
}

template <class S>
inline F32 load(const S* source, Part part) {
    return load_first(source, static_cast<std::size_t>(part.lanes));
}

template <class S>
inline void store(S* out, F32 value, Whole) {
    store(out, value);
}

template <class S>
inline void store(S* out, F32 value, Part part) {
    store_first(out, value, static_cast<std::size_t>(part.lanes));
}

/// A run of elements as fp32.
template <class S>
inline void load_run(const S* source, float* values, std::int64_t count) {
    each_vector(count, [=](std::int64_t i, auto lanes) { store(values + i, load(source + i, lanes), lanes); });
}

}  // namespace
}  // namespace fusible::simd::FUSIBLE_LEVEL
