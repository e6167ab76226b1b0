// The arithmetic that kernels count on, on threads that have another: XLA's take subnormal numbers for zero.
#pragma once

#include <cfenv>

namespace fusible {

/// Rounding to nearest, subnormal numbers and masked exceptions on this thread, for as long as this lives.
class DefaultArithmetic {
  public:
    DefaultArithmetic() {
        std::fegetenv(&former_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&former_); }
    DefaultArithmetic(const DefaultArithmetic&) = delete;
    DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

  private:
    std::fenv_t former_;
};

}  // namespace fusible
