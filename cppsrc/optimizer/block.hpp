// A block of an operand as fp32. Operands come in any mix of types: a block of each that is not fp32 passes through a buffer in the first-level
// cache, so that there is one kernel for all.
#pragma once

#include "cast/emit.hpp"
#include "optimizer/kernels.hpp"
#include "simd/each.hpp"

namespace fusible {
namespace FUSIBLE_LEVEL {
namespace {

constexpr std::size_t kOperandBlock = 512;

/// Sizes and conversions by the index of a type.
constexpr std::size_t kSizes[kSources] = {4, 2, 2};

/// A block of an operand as fp32: where it lies, or in a buffer.
class Block {
  public:
    Block(const void* data, int type, std::size_t begin)
        : at_(const_cast<char*>(static_cast<const char*>(data)) + begin * kSizes[type]), type_(type) {}

    float* values() { return type_ == 0 ? reinterpret_cast<float*>(at_) : buffer_; }

    float* read(std::int64_t count) {
        if (type_ == 1) load_run(reinterpret_cast<const f16*>(at_), buffer_, count);
        if (type_ == 2) load_run(reinterpret_cast<const bf16*>(at_), buffer_, count);
        return values();
    }

    void write(const float* values, std::int64_t count) {
        if (type_ == 1) store_run(values, reinterpret_cast<f16*>(at_), count);
        if (type_ == 2) store_run(values, reinterpret_cast<bf16*>(at_), count);
        if (type_ == 0 && values != reinterpret_cast<float*>(at_)) store_run(values, reinterpret_cast<float*>(at_), count);
    }

  private:
    char* at_;
    int type_;
    alignas(64) float buffer_[kOperandBlock];
};

}  // namespace
}  // namespace FUSIBLE_LEVEL
}  // namespace fusible
