// Loops over a row by vectors, its end included.
#pragma once

#include "runtime/element_kind.hpp"
#include "simd/math.hpp"

namespace fusible::norm::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;

/// The lanes of a vector of which a row has all; and of its last one, which reads zeros beyond the row and writes nothing there.
struct Whole {
    template <class S>
    F32 read(const S* source) const {
        return load(source);
    }

    template <class S>
    void write(S* out, F32 value) const {
        store(out, value);
    }

    F32 kept(F32 value) const { return value; }
};

struct Part {
    std::size_t count;

    template <class S>
    F32 read(const S* source) const {
        return load_first(source, count);
    }

    template <class S>
    void write(S* out, F32 value) const {
        store_first(out, value, count);
    }

    /// `value` with zeros beyond the row.
    F32 kept(F32 value) const {
        float lanes[kLanes] = {};
        store_first(lanes, value, count);
        return load(lanes);
    }
};

/// Calls body(i, lanes) for every vector of [begin, end).
template <class Body>
inline void for_vectors(std::int64_t begin, std::int64_t end, const Body& body) {
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) body(i, Whole{});
    if (i < end) body(i, Part{static_cast<std::size_t>(end - i)});
}

/// Fetches what a later row reads, while this one is computed: a row is read from memory by its first pass alone, which cannot hide that.
inline void prefetch(const void* address) {
#if defined(__GNUC__)
    __builtin_prefetch(address, 0, 2);
#else
    static_cast<void>(address);
#endif
}

constexpr int kAccumulators = 4;
constexpr std::int64_t kSummed = 4096;

/// totals = sums over [0, count) of what term(i, lanes, sums) adds into its vectors `sums`.
///
/// Several vectors, so that additions do not wait for each other; and blocks, so that the error does not grow with a long row.
template <int Sums, class Term>
inline void sum_row(std::int64_t count, float (&totals)[Sums], const Term& term) {
    for (float& total : totals) total = 0.0f;
    for (std::int64_t i = 0; i < count;) {
        const std::int64_t end = count - i < kSummed ? count : i + kSummed;
        F32 sums[kAccumulators][Sums];
        for (auto& vectors : sums)
            for (F32& vector : vectors) vector = splat(0.0f);
        for (; i + kAccumulators * kLanes <= end; i += kAccumulators * kLanes)
            for (int a = 0; a < kAccumulators; ++a) term(i + a * kLanes, Whole{}, sums[a]);
        for (; i + kLanes <= end; i += kLanes) term(i, Whole{}, sums[0]);
        if (i < end) term(i, Part{static_cast<std::size_t>(end - i)}, sums[0]);
        i = end;
        for (int s = 0; s < Sums; ++s) totals[s] += sum_lanes(add(add(sums[0][s], sums[1][s]), add(sums[2][s], sums[3][s])));
    }
}

/// out[i] = source[i] + plus.
template <class S>
inline void widen_run(const S* source, std::int64_t count, float plus, float* out) {
    for_vectors(0, count, [&](std::int64_t i, auto lanes) { lanes.write(out + i, add(lanes.read(source + i), splat(plus))); });
}

inline void widen(ElementKind kind, const void* source, std::int64_t offset, std::int64_t count, float plus, float* out) {
    switch (kind) {
        case ElementKind::Float32:
            return widen_run(static_cast<const float*>(source) + offset, count, plus, out);
        case ElementKind::Float16:
            return widen_run(static_cast<const f16*>(source) + offset, count, plus, out);
        default:
            return widen_run(static_cast<const bf16*>(source) + offset, count, plus, out);
    }
}

}  // namespace
}  // namespace fusible::norm::FUSIBLE_LEVEL
