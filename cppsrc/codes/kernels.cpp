// The table of one level: compiled once a level, with that level's flags and FUSIBLE_LEVEL as its namespace.
#include "codes/kernels.hpp"

#include "codes/multiply.hpp"
#include "codes/tiles.hpp"

namespace fusible::codes::FUSIBLE_LEVEL {

extern const Kernels kernels;

// In the order of `Coding`.
#define FUSIBLE_CODINGS(of)                                                                                                             \
    {                                                                                                                                   \
        of<Decoder8<E4M3>, NoFactors>, of<Decoder8<E5M2>, NoFactors>, of<Decoder8<E4M3>, Exponents>, of<Decoder8<E5M2>, Exponents>,     \
            of<Decoder8<E4M3>, Floats>, of<Decoder8<E5M2>, Floats>, of<Decoder4, SmallFloats>, of<Decoder4, Exponents>                  \
    }

#if defined(__AMX_BF16__)

#define FUSIBLE_TILED(of)                                                                                                               \
    {                                                                                                                                   \
        of<TileDecoder8<E4M3>, NoFactors>, of<TileDecoder8<E5M2>, NoFactors>, of<TileDecoder8<E4M3>, Exponents>,                        \
            of<TileDecoder8<E5M2>, Exponents>, of<TileDecoder8<E4M3>, Floats>, of<TileDecoder8<E5M2>, Floats>,                          \
            of<TileDecoder4, SmallFloats>, of<TileDecoderOfFours, Exponents>                                                            \
    }

#define FUSIBLE_BY_HALVES FUSIBLE_TILED(pack_tiles), FUSIBLE_TILED(multiply_by_tiles), 3

#elif defined(FUSIBLE_CODES_AS_HALVES)

// Of codes with one scale, the products of gemm do it.
#define FUSIBLE_PAIRED(of)                                                                                                              \
    {                                                                                                                                   \
        nullptr, nullptr, of<PairsDecoder8<E4M3>, Exponents>, of<PairsDecoder8<E5M2>, Exponents>, of<PairsDecoder8<E4M3>, Floats>,      \
            of<PairsDecoder8<E5M2>, Floats>, of<PairsDecoder4, SmallFloats>, of<PairsDecoder4, Exponents>                               \
    }

#define FUSIBLE_BY_HALVES FUSIBLE_PAIRED(pack_pairs), FUSIBLE_PAIRED(multiply_pairs), 1

#else

#define FUSIBLE_BY_HALVES {}, {}, 0

#endif

const Kernels kernels = {FUSIBLE_CODINGS(multiply), FUSIBLE_CODINGS(reorder), FUSIBLE_BY_HALVES};

}  // namespace fusible::codes::FUSIBLE_LEVEL
