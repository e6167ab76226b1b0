// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "gemm/kernels.hpp"

#include "gemm/amx.hpp"
#include "gemm/coded_rows.hpp"
#include "gemm/epilogue.hpp"
#include "gemm/few_rows.hpp"
#include "gemm/integers.hpp"
#include "gemm/pack.hpp"
#include "gemm/scaled_sums.hpp"
#include "gemm/tile.hpp"

namespace fusible::gemm::FUSIBLE_LEVEL {

namespace {

/// Units of K of a slab of a micro-panel of B, which is used again and again from the nearest caches: 64 KiB.
constexpr std::int64_t kSlab = 64 * 1024 / (kNR * 4);

/// Memory that is wanted soon, fetched a few cache lines at a time while tiles are computed: all at once they would wait for one another, and
/// without it they would come too late, even from the third cache.
class Ahead {
    static constexpr std::int64_t kLine = 64;

  public:
    /// `bytes` of it, within tiles that fetch `times` times.
    Ahead(const void* next, std::int64_t bytes, std::int64_t times)
        : next_(static_cast<const std::uint8_t*>(next)), lines_((bytes + kLine * times - 1) / (kLine * times)) {}

    /// How often a tile of `depth` units fetches.
    static std::int64_t times(std::int64_t depth) { return depth > 0 ? (depth + kFetchUnits - 1) / kFetchUnits : 1; }

    void operator()() {
        for (std::int64_t i = 0; i < lines_; ++i, next_ += kLine) __builtin_prefetch(next_, 0, 2);
    }

    /// What a tile of `depth` units has fetched, of its own copy of this.
    void skip(std::int64_t depth) { next_ += lines_ * kLine * times(depth); }

  private:
    const std::uint8_t* next_;
    std::int64_t lines_;  // each time
};

/// The tiles of a slab: `depth` units from the u-th on, of a panel of kWidth vectors that begins at `panel`.
template <int kWidth>
void multiply_slab(const Block& block, std::int64_t u, std::int64_t depth, const std::int32_t* panel, float* sums, Ahead& ahead) {
    const std::int32_t* const b = panel + u * kNR;
    constexpr int kHeight = mr_of(kWidth);
    for (int r = 0; r < block.rows; r += kHeight) {
        const PackedRows a{block.a + r * block.row_stride + u * block.unit_stride, block.row_stride, block.unit_stride};
        const int height = block.rows - r < kHeight ? block.rows - r : kHeight;
        multiply_last<kHeight, kWidth>(height, a, b, depth, sums + r * block.sums_stride, block.sums_stride, block.add_to || u > 0, ahead);
        ahead.skip(depth);
    }
}

/// As multiply_slab, of the first `vectors` vectors of the panel.
template <int kWidth = kVectors>
void multiply_slab(int vectors, const Block& block, std::int64_t u, std::int64_t depth, const std::int32_t* panel, float* sums, Ahead& ahead) {
    if (vectors == kWidth) return multiply_slab<kWidth>(block, u, depth, panel, sums, ahead);
    if constexpr (kWidth > 1) multiply_slab<kWidth - 1>(vectors, block, u, depth, panel, sums, ahead);
}

[[maybe_unused]] void multiply(const Block& block) {
    const int panels = (block.cols + kNR - 1) / kNR;
    const std::int64_t tiles = (block.rows + kMR - 1) / kMR;
    Ahead ahead(block.ahead, block.ahead_bytes, panels * tiles * Ahead::times(block.kc));
    for (int p = 0; p < panels; ++p) {
        const int cols = block.cols - p * kNR;
        const int vectors = cols < kNR ? (cols + kLanes - 1) / kLanes : kVectors;
        const std::int32_t* const panel = block.b + p * block.panel_stride;
        for (std::int64_t u = 0; u == 0 || u < block.kc; u += kSlab) {
            const std::int64_t depth = block.kc - u < kSlab ? block.kc - u : kSlab;
            if (block.ahead == nullptr) {  // the slab that follows
                const std::int64_t units = depth * kNR;
                ahead = Ahead(panel + u * kNR + units, units * static_cast<std::int64_t>(sizeof(*panel)), tiles * Ahead::times(depth));
            }
            multiply_slab(vectors, block, u, depth, panel, block.sums + p * kNR, ahead);
        }
    }
}

/// out[c][r] = sums[r][c], in whole squares of vectors: both reach to the next one.
void turn(const float* sums, std::ptrdiff_t stride, int rows, int cols, float* out, std::ptrdiff_t out_stride) {
    for (int r = 0; r < rows; r += kLanes)
        for (int c = 0; c < cols; c += kLanes) {
            Units square[kLanes];
            for (int i = 0; i < kLanes; ++i) square[i] = load_units(reinterpret_cast<const std::int32_t*>(sums + (r + i) * stride + c));
            transpose_units(square);
            for (int i = 0; i < kLanes; ++i) store_units(reinterpret_cast<std::int32_t*>(out + (c + i) * out_stride + r), square[i]);
        }
}

}  // namespace

extern const Kernels kernels;

#if defined(__AVX512BF16__)

// Two bf16 hold neither a float32 nor a float16: products of those run at the level below.
#define FUSIBLE_PACKERS(pack) {nullptr, nullptr, pack<bf16>, pack<code<E4M3>>, pack<code<E5M2>>}
#define FUSIBLE_TAKES {false, false, true, true, true}
constexpr ElementKind kUnitsKind = ElementKind::BFloat16;

#if defined(__AMX_BF16__)
constexpr bool kReadsTiles = true;
constexpr auto kMultiply = multiply_by_tiles;
#else
constexpr bool kReadsTiles = false;
constexpr auto kMultiply = multiply;
#endif

#else

#define FUSIBLE_PACKERS(pack) {pack<float>, pack<f16>, pack<bf16>, pack<code<E4M3>>, pack<code<E5M2>>}
#define FUSIBLE_TAKES {true, true, true, true, true}
constexpr ElementKind kUnitsKind = ElementKind::Float32;
constexpr bool kReadsTiles = false;
constexpr auto kMultiply = multiply;

#endif

// In the order of codes::Coding.
#define FUSIBLE_CODED_PACKERS(pack)                                                                                                 \
    {                                                                                                                               \
        nullptr, nullptr, pack<CodedEights<E4M3, ScaleBytes>>, pack<CodedEights<E5M2, ScaleBytes>>,                                 \
            pack<CodedEights<E4M3, ScaleFloats>>, pack<CodedEights<E5M2, ScaleFloats>>, pack<CodedFours<SmallScales>>,              \
            pack<CodedFours<ScaleBytes>>                                                                                            \
    }

#define FUSIBLE_CODED_COLUMN_PACKERS(pack) {nullptr, nullptr, pack<E4M3>, pack<E5M2>, nullptr, nullptr, nullptr, nullptr}

constexpr Kernels kernels = {
    kDepth,
    kLanes,
    kNR,
    1,
    FUSIBLE_TAKES,
    kUnitsKind,
    kReadsTiles,
    FUSIBLE_PACKERS(pack_rows),
    FUSIBLE_PACKERS(pack_across),
    FUSIBLE_PACKERS(pack_turned),
    FUSIBLE_CODED_PACKERS(pack_coded_rows),
    FUSIBLE_CODED_PACKERS(pack_coded_turned),
    FUSIBLE_CODED_COLUMN_PACKERS(pack_coded_across),
    FUSIBLE_PACKERS(pack_tiles),
    FUSIBLE_PACKERS(pack_tiles_down),
    FUSIBLE_CODED_PACKERS(pack_coded_tiles),
    FUSIBLE_CODED_COLUMN_PACKERS(pack_coded_tiles_down),
    kMultiply,
    turn,
    FUSIBLE_PACKERS(multiply_few_rows),
    finish_block,
};

#if defined(FUSIBLE_GEMM_SCALES_SUMS)

extern const Kernels kernels_of_sums;
extern const Kernels kernels_of_integers;

namespace {

constexpr Kernels with_sums_scaled() {
    constexpr decltype(Kernels::pack_turned) kTurned = FUSIBLE_PACKERS(pack_narrow);
    constexpr decltype(Kernels::pack_coded_turned) kCodedTurned = FUSIBLE_CODED_PACKERS(pack_coded_narrow);
    Kernels sums = kernels;
    sums.nr = kScaledCols;
    for (int i = 0; i < kElementKinds; ++i) sums.pack_turned[i] = kTurned[i];
    for (int i = 0; i < codes::kCodings; ++i) sums.pack_coded_turned[i] = kCodedTurned[i];
    sums.multiply = multiply_scaled<DotsOfBf16>;
    return sums;
}

constexpr Kernels with_integers() {
    constexpr int kFp4 = static_cast<int>(codes::Coding::Fp4);
    constexpr int kMxFp4 = static_cast<int>(codes::Coding::MxFp4);
    Kernels integers{};
    integers.depth = kBytesOfUnit;
    integers.lanes = kLanes;
    integers.nr = kScaledCols;
    integers.factor_rows = 2;
    integers.pack_coded_rows[kFp4] = pack_integers<SmallScales>;
    integers.pack_coded_rows[kMxFp4] = pack_integers<ScaleBytes>;
    integers.pack_coded_turned[kFp4] = pack_turned_integers<SmallScales>;
    integers.pack_coded_turned[kMxFp4] = pack_turned_integers<ScaleBytes>;
    integers.multiply = multiply_integers;
    integers.turn = turn;
    integers.finish = finish_block;
    return integers;
}

}  // namespace

constexpr Kernels kernels_of_sums = with_sums_scaled();
constexpr Kernels kernels_of_integers = with_integers();

#endif

}  // namespace fusible::gemm::FUSIBLE_LEVEL
