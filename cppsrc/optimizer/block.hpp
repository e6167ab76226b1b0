// A block of an operand as fp32. Operands come in any mix of types: a block of each that is not fp32 passes through a buffer in the first-level
// cache, so that there is one kernel for all.
#pragma once

#include "cast/emit.hpp"
#include "optimizer/kernels.hpp"
#include "simd/each.hpp"

namespace fusible::optimizer::FUSIBLE_LEVEL {
namespace {

using namespace simd::FUSIBLE_LEVEL;
using namespace cast::FUSIBLE_LEVEL;

constexpr std::size_t kOperandBlock = 512;

/// Of the block that begins at `begin`, in a run of `count` elements.
inline std::int64_t block_length(std::size_t begin, std::size_t count) {
    return static_cast<std::int64_t>(count - begin < kOperandBlock ? count - begin : kOperandBlock);
}

/// Bytes of an element, by its kind.
constexpr std::size_t kSizes[kElementKinds] = {4, 2, 2, 1, 1};

/// A block of an operand as fp32: where it lies, or in a buffer.
class Block {
  public:
    Block(const Elements& run, std::size_t begin) : at_(static_cast<char*>(run.data) + begin * kSizes[table_index(run.kind)]), run_(run) {}

    float* values() { return run_.kind == ElementKind::Float32 ? reinterpret_cast<float*>(at_) : buffer_; }

    float* read(std::int64_t count) {
        if (run_.kind == ElementKind::Float16) read_scaled(reinterpret_cast<const f16*>(at_), count);
        if (run_.kind == ElementKind::BFloat16) load_run(reinterpret_cast<const bf16*>(at_), buffer_, count);
        if (run_.kind == ElementKind::E4M3)
            dequantize<E4M3, float>(reinterpret_cast<const std::uint8_t*>(at_), buffer_, static_cast<std::size_t>(count), run_.decode);
        return values();
    }

    void write(const float* values, std::int64_t count) {
        if (run_.kind == ElementKind::Float16) write_scaled(values, reinterpret_cast<f16*>(at_), count);
        if (run_.kind == ElementKind::BFloat16) store_run(values, reinterpret_cast<bf16*>(at_), count);
        if (run_.kind == ElementKind::E4M3)
            quantize<float, E4M3>(values, reinterpret_cast<std::uint8_t*>(at_), static_cast<std::size_t>(count), run_.encode);
        if (run_.kind == ElementKind::Float32 && values != reinterpret_cast<float*>(at_)) store_run(values, reinterpret_cast<float*>(at_), count);
    }

  private:
    void read_scaled(const f16* source, std::int64_t count) {
        const F32 factor = splat(run_.decode);
        each_vector(count, [=](std::int64_t i, auto lanes) { store(buffer_ + i, mul(load(source + i, lanes), factor), lanes); });
    }

    void write_scaled(const float* values, f16* out, std::int64_t count) {
        const F32 factor = splat(run_.encode);
        each_vector(count, [=](std::int64_t i, auto lanes) { store(out + i, mul(load(values + i, lanes), factor), lanes); });
    }

    char* at_;
    Elements run_;
    alignas(64) float buffer_[kOperandBlock];
};

}  // namespace
}  // namespace fusible::optimizer::FUSIBLE_LEVEL
