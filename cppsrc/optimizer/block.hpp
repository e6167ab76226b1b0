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

/// Bytes of an element, by its kind.
constexpr std::size_t kSizes[kWideKinds] = {4, 2, 2};

/// A block of an operand as fp32: where it lies, or in a buffer.
class Block {
  public:
    Block(const void* data, ElementKind kind, std::size_t begin)
        : at_(const_cast<char*>(static_cast<const char*>(data)) + begin * kSizes[table_index(kind)]), kind_(kind) {}

    float* values() { return kind_ == ElementKind::Float32 ? reinterpret_cast<float*>(at_) : buffer_; }

    float* read(std::int64_t count) {
        if (kind_ == ElementKind::Float16) load_run(reinterpret_cast<const f16*>(at_), buffer_, count);
        if (kind_ == ElementKind::BFloat16) load_run(reinterpret_cast<const bf16*>(at_), buffer_, count);
        return values();
    }

    void write(const float* values, std::int64_t count) {
        if (kind_ == ElementKind::Float16) store_run(values, reinterpret_cast<f16*>(at_), count);
        if (kind_ == ElementKind::BFloat16) store_run(values, reinterpret_cast<bf16*>(at_), count);
        if (kind_ == ElementKind::Float32 && values != reinterpret_cast<float*>(at_)) store_run(values, reinterpret_cast<float*>(at_), count);
    }

  private:
    char* at_;
    ElementKind kind_;
    alignas(64) float buffer_[kOperandBlock];
};

}  // namespace
}  // namespace fusible::optimizer::FUSIBLE_LEVEL
