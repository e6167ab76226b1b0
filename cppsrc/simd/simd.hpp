// The vector vocabulary of the kernels, for the level that this translation unit is compiled for.
//
// Everything is in an unnamed namespace inside the level's own, which a family's kernels open by a using-directive: two units compiled with
// different flags share no symbol, so the linker cannot give a generic kernel an AVX-512 function. For the same reason kernels include no C++
// library header with code.
#pragma once

#if defined(FUSIBLE_SIMD_AVX512)
#include "simd/avx512.hpp"
#elif defined(FUSIBLE_SIMD_AVX2)
#include "simd/avx2.hpp"
#else
#include "simd/generic.hpp"
#endif
