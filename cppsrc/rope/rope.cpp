#include "rope/rope.hpp"

#include <algorithm>
#include <cstring>

#include "rope/kernels.hpp"
#include "rope/positions.hpp"
#include "rope/rotations.hpp"
#include "runtime/checks.hpp"
#include "runtime/indices.hpp"
#include "runtime/threads.hpp"

namespace fusible::rope {

namespace {

constexpr std::int64_t kRun = 16 * 1024;  // elements of a task

/// src as [outer, inner, heads, width]: tokens are outer x inner, and packed ones have one inner.
struct Shape {
    std::int64_t outer;
    std::int64_t inner;
    std::int64_t outer_stride;
    std::int64_t inner_stride;
    std::int64_t head_stride;
    int heads;
    int width;

    std::int64_t tokens() const { return outer * inner; }
};

Shape shape_of(const StridedView& src, bool packed) {
    const int rank = packed ? 3 : 4;
    if (src.ndim != rank)
        throw ShapeError(expected(std::to_string(rank) + " dimensions", "src", src.shape_text(), "reshape it"));
    const int heads = rank - 2;
    constexpr std::int64_t kMost = std::numeric_limits<int>::max();
    if (src.shape[heads] > kMost || src.shape[heads + 1] > kMost)
        throw ShapeError(expected("heads and widths below 2^31", "src", src.shape_text(), "reshape it"));
    return {src.shape[0], packed ? 1 : src.shape[1], src.strides[0], packed ? 0 : src.strides[1], src.strides[heads],
            static_cast<int>(src.shape[heads]), static_cast<int>(src.shape[heads + 1])};
}

void check_int32(const TensorView& tensor, const char* name) { check_dtype(tensor, name, tensor.dtype == DType::Int32, "int32"); }

/// Bounds of packed sequences are over all ranks, of which each has as many tokens.
void check_bounds(const TensorView& cu_seqlens, std::int64_t sequences, std::int64_t tokens) {
    const std::int32_t* bounds = cu_seqlens.as<const std::int32_t>();
    check_cumulative(bounds, sequences, "cu_seqlens");
    if (bounds[sequences] > tokens)
        throw ArgumentError(expected("sequences that end by token " + std::to_string(tokens), "cu_seqlens", std::to_string(bounds[sequences]),
                                     "pass the lengths of the tensors"));
}

void check(const StridedView& src, const TensorView& dst, const TensorView& freqs, const OptionalView& start, const OptionalView& cu_seqlens,
           std::int64_t sequences, int cp_size, int cp_rank, int num_threads) {
    check_threads(num_threads);
    check_rows_contiguous(src, "src");
    check_dtype(dst, "dst", dst.dtype == src.dtype, name_of(src.dtype));
    check_numel(dst, "dst", src.numel());
    check_dtype(freqs, "freqs", freqs.dtype == DType::Float32, "float32");
    const std::int64_t width = src.shape[src.ndim - 1];
    if (freqs.cols() % 2 != 0 || freqs.cols() > width)
        throw ShapeError(expected("an even width up to " + std::to_string(width), "freqs", freqs.shape_text(), "pass fewer frequencies"));
    if (cp_rank < 0 || cp_rank >= cp_size)
        throw ArgumentError(expected("0 <= cp_rank < cp_size", "rope", std::to_string(cp_rank) + " of " + std::to_string(cp_size),
                                     "pass a rank of the group"));
    if (cu_seqlens) check_int32(*cu_seqlens, "cu_seqlens");
    if (sequences < 0) throw ShapeError(expected("one bound more than sequences", "cu_seqlens", "none", "pass [0] for no sequence"));
    if (cu_seqlens) check_bounds(*cu_seqlens, sequences, product(src.shape[0], cp_size, "src"));
    if (!start) return;
    check_int32(*start, "start_positions");
    check_numel(*start, "start_positions", sequences);
}

void check_positions(const std::vector<std::int64_t>& positions, std::int64_t count) {
    for (const std::int64_t position : positions)
        if (position != kNowhere && (position < 0 || position >= count))
            throw ShapeError(expected("positions of every token", "freqs", std::to_string(count) + " and a token at " + std::to_string(position),
                                      "make more angles"));
}

void rotate(const StridedView& src, const TensorView& dst, const Shape& shape, int source, const Rotation& rotation,
            const std::vector<std::int64_t>& positions, int num_threads) {
    const Rotations rotations(rotation, positions, num_threads);
    const auto kernel = kernels().rotate[source][rotation.interleaved ? 1 : 0];
    const auto size = static_cast<std::int64_t>(size_of(src.dtype));
    const std::int64_t elements = std::int64_t{shape.heads} * shape.width;
    const std::int64_t run = std::max<std::int64_t>(1, kRun / std::max<std::int64_t>(elements, 1));
    const auto tasks = static_cast<std::size_t>((shape.tokens() + run - 1) / run);
    parallel_for(tasks, threads_for(num_threads, static_cast<std::size_t>(shape.tokens() * elements * size)), [&](std::size_t task) {
        const auto begin = static_cast<std::int64_t>(task) * run;
        for (std::int64_t token = begin; token < std::min(begin + run, shape.tokens()); ++token) {
            const std::int64_t position = positions[static_cast<std::size_t>(token)];
            auto* out = dst.as<std::uint8_t>() + token * elements * size;
            if (position == kNowhere) {
                std::memset(out, 0, static_cast<std::size_t>(elements * size));
                continue;
            }
            const std::int64_t at = token / shape.inner * shape.outer_stride + token % shape.inner * shape.inner_stride;
            const float* cosines = rotations.at(position);
            kernel({src.as<const std::uint8_t>() + at * size, shape.head_stride, out, shape.heads, shape.width, rotation.width, cosines,
                    cosines + rotation.width});
        }
    });
}

}  // namespace

void rope(const StridedView& src, const TensorView& dst, const TensorView& freqs, bool sequence_first, bool interleaved, bool backward,
          const OptionalView& start_positions, const OptionalView& cu_seqlens, int cp_size, int cp_rank, int num_threads) {
    const int source = table_index(wide_kind(src, "src"));
    const Shape shape = shape_of(src, cu_seqlens.has_value());
    const std::int64_t sequences = cu_seqlens ? cu_seqlens->numel() - 1 : sequence_first ? shape.inner : shape.outer;
    check(src, dst, freqs, start_positions, cu_seqlens, sequences, cp_size, cp_rank, num_threads);
    if (src.numel() == 0) return;
    const PositionRule rule{start_positions ? start_positions->as<const std::int32_t>() : nullptr, cp_size, cp_rank};
    const std::int64_t length = sequence_first ? shape.outer : shape.inner;
    const auto positions = cu_seqlens ? positions_of_packed(shape.tokens(), cu_seqlens->as<const std::int32_t>(), sequences, rule)
                                      : positions_of_grid(length, sequences, sequence_first, rule);
    check_positions(positions, freqs.rows());
    const Rotation rotation{static_cast<int>(freqs.cols()), interleaved, backward, freqs.as<const float>()};
    rotate(src, dst, shape, source, rotation, positions, num_threads);
}

}  // namespace fusible::rope
