// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "attention/kernels.hpp"

#include "attention/differentiate.hpp"
#include "gemm/pack.hpp"

namespace fusible::attention::FUSIBLE_LEVEL {

namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace gemm::FUSIBLE_LEVEL;

template <class S>
float dot_of(const void* left, const void* right, std::int64_t count) {
    const S* a = static_cast<const S*>(left);
    const S* b = static_cast<const S*>(right);
    F32 sum = splat(0.0f);
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sum = fma(load(a + i), load(b + i), sum);
    const auto rest = static_cast<std::size_t>(count - i);
    if (rest > 0) sum = fma(load_first(a + i, rest), load_first(b + i, rest), sum);
    return sum_lanes(sum);
}

template <class S>
void write(const float* values, float factor, std::int64_t count, void* untyped) {
    S* out = static_cast<S*>(untyped);
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, mul(load(values + i), splat(factor)));
    const auto rest = static_cast<std::size_t>(count - i);
    if (rest > 0) store_first(out + i, mul(load_first(values + i, rest), splat(factor)), rest);
}

}  // namespace

extern const Kernels kernels;

#if defined(__AVX512BF16__)

// Two bf16 hold neither a float32 nor a float16: attention on those runs at the level below.
#define FUSIBLE_PACKERS(pack) {nullptr, nullptr, pack<bf16>}
#define FUSIBLE_TAKES {false, false, true}

#else

#define FUSIBLE_PACKERS(pack) {pack<float>, pack<f16>, pack<bf16>}
#define FUSIBLE_TAKES {true, true, true}

#endif

const Kernels kernels = {
    kDepth,
    kLanes,
    kNR,
    FUSIBLE_TAKES,
    FUSIBLE_PACKERS(pack_rows),
    FUSIBLE_PACKERS(pack_across),
    FUSIBLE_PACKERS(pack_turned),
    attend,
    differentiate,
    {dot_of<float>, dot_of<f16>, dot_of<bf16>},
    {write<float>, write<f16>, write<bf16>},
};

}  // namespace fusible::attention::FUSIBLE_LEVEL
