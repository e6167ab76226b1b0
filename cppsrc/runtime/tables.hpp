// Kernels of a family as a table of functions, one table a level. Plain: read by units with different flags.
//
// A family has a namespace, and each level one inside it: `fusible::gemm::avx512::kernels`. What a family's units share lies in the first, what one
// level compiles in the second, unnamed but for its table. So no two families, and no two levels, define one name with external linkage:
// `make sanitize` links them all and lets the linker compare.
#pragma once

/// Declares `const Type name` in the namespace of each level.
#define FUSIBLE_DECLARE_TABLES(Type, name) \
    namespace generic {                    \
    extern const Type name;                \
    }                                      \
    namespace avx2 {                       \
    extern const Type name;                \
    }                                      \
    namespace avx512 {                     \
    extern const Type name;                \
    }
