// Kernels of a family as a table of functions, one table a level. Plain: read by units with different flags.
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
