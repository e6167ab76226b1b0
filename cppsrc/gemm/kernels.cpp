// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "gemm/kernels.hpp"

#include "gemm/epilogue.hpp"
#include "gemm/few_rows.hpp"
#include "gemm/pack.hpp"
#include "gemm/tile.hpp"

namespace fusible {
namespace FUSIBLE_LEVEL {

namespace {

/// Units of the right operand's panel that are used again and again from the nearest caches: 64 KiB.
constexpr std::int64_t kSlab = 64 * 1024 / (kPanel * 4);

/// Fetches the part [r, r + kRows) / rows of the slab that comes after this one: from the third cache it would come too late for the first tile.
inline void prefetch_part(const std::int32_t* next, std::int64_t units, int r, int rows) {
    constexpr int kLine = 64 / sizeof(std::int32_t);
    const std::int64_t count = units * kPanel;
    for (std::int64_t i = count * r / rows / kLine * kLine; i < count * (r + kRows) / rows; i += kLine) __builtin_prefetch(next + i, 0, 2);
}

void multiply(const Block& b) {
    for (int p = 0; p < b.panels; ++p) {
        std::int64_t u = 0;
        do {
            const std::int64_t depth = b.depth - u < kSlab ? b.depth - u : kSlab;
            const std::int32_t* right = b.right + p * b.panel_stride + u * kPanel;
            const bool add_to = b.add_to || u > 0;
            for (int r = 0; r < b.rows; r += kRows) {
                prefetch_part(right + depth * kPanel, depth, r, b.rows);
                const Left left{b.left + r * b.row_stride + u * b.unit_stride, b.row_stride, b.unit_stride};
                const int height = b.rows - r < kRows ? b.rows - r : kRows;
                multiply_last(height, left, right, depth, b.sums + r * b.sums_stride + p * kPanel, b.sums_stride, add_to);
            }
            u += kSlab;
        } while (u < b.depth);
    }
}

}  // namespace

extern const GemmKernels gemm_kernels;

#if defined(__AVX512BF16__)

// Two bf16 hold neither a float32 nor a float16: products of those run at the level below.
#define FUSIBLE_PACKERS(pack) {nullptr, nullptr, pack<bf16>, pack<code<E4M3>>, pack<code<E5M2>>}
#define FUSIBLE_TAKES {false, false, true, true, true}

#else

#define FUSIBLE_PACKERS(pack) {pack<float>, pack<f16>, pack<bf16>, pack<code<E4M3>>, pack<code<E5M2>>}
#define FUSIBLE_TAKES {true, true, true, true, true}

#endif

const GemmKernels gemm_kernels = {
    kDepth,   kLanes,       kPanel, FUSIBLE_TAKES, FUSIBLE_PACKERS(pack_rows), FUSIBLE_PACKERS(pack_across), FUSIBLE_PACKERS(pack_turned),
    multiply, FUSIBLE_PACKERS(multiply_few_rows), finish_block,
};

}  // namespace FUSIBLE_LEVEL
}  // namespace fusible
