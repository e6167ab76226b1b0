// The kinds of elements that kernels read and write, in the order of their tables. Plain: read by units with different flags.
#pragma once

namespace fusible {

/// The wide floats, then the codes of FP8.
enum class ElementKind : int { Float32, Float16, BFloat16, E4M3, E5M2 };

/// How many kinds there are: of wide floats, of codes, of both.
constexpr int kWideKinds = 3;
constexpr int kFormats = 2;
constexpr int kElementKinds = kWideKinds + kFormats;

/// Where a table by kind has it, and where one by formats alone has it. Static as what follows, so that each level has its own.
[[maybe_unused]] static constexpr int table_index(ElementKind kind) { return static_cast<int>(kind); }
[[maybe_unused]] static constexpr int format_index(ElementKind code) { return table_index(code) - kWideKinds; }

[[maybe_unused]] static constexpr bool is_wide(ElementKind kind) { return table_index(kind) < kWideKinds; }

}  // namespace fusible
