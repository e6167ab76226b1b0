// A maximum that tasks on several threads raise: the bits of a non-negative float, which order as integers.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace fusible::cast {

class Maximum {
  public:
    void raise(std::int32_t candidate) {
        std::int32_t seen = bits_.load(std::memory_order_relaxed);
        while (candidate > seen && !bits_.compare_exchange_weak(seen, candidate, std::memory_order_relaxed)) {
        }
    }

    /// The maximum as a float; any NaN as the one canonical NaN.
    float value() const {
        std::int32_t bits = bits_.load(std::memory_order_relaxed);
        if (bits > 0x7f800000) bits = 0x7fc00000;
        float result;
        std::memcpy(&result, &bits, sizeof result);
        return result;
    }

    /// Sets `stored`; with `accumulate`, keeps it where it is larger, or NaN already.
    void write(float& stored, bool accumulate) const {
        const float found = value();
        if (accumulate && !std::isnan(found) && !(stored < found)) return;
        stored = found;
    }

  private:
    std::atomic<std::int32_t> bits_{0};
};

}  // namespace fusible::cast
