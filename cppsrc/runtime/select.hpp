// The choice among the tables of a family.
#pragma once

#include "runtime/level.hpp"

namespace fusible {

/// The best table that the level in force can run. The levels of bf16 dot products and of tiles, which only products use, run that of AVX-512.
template <class Table>
const Table& select(const Table& generic, const Table& avx2, const Table& avx512) {
    switch (current_level()) {
        case Level::Amx:
        case Level::Avx512Bf16:
        case Level::Avx512:
            return avx512;
        case Level::Avx2:
            return avx2;
        case Level::Generic:
            break;
    }
    return generic;
}

}  // namespace fusible

#if defined(FUSIBLE_X86_KERNELS)
#define FUSIBLE_SELECT(name) ::fusible::select(generic::name, avx2::name, avx512::name)
#else
#define FUSIBLE_SELECT(name) generic::name
#endif
