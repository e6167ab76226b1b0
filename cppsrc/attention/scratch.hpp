// Arrays one after another in a workspace, each at a cache line's beginning.
#pragma once

#include "runtime/workspace.hpp"

namespace fusible::attention {

class Slices {
  public:
    /// Measures only, where `base` is null.
    explicit Slices(unsigned char* base) : base_(base) {}

    template <class T>
    T* take(std::int64_t count) {
        const std::size_t at = size_;
        size_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + at);
    }

    std::size_t size() const { return size_; }

  private:
    unsigned char* base_;
    std::size_t size_ = 0;
};

/// Lays out what `lay_out(slices)` takes.
template <class LayOut>
void carve(Workspace& workspace, const LayOut& lay_out) {
    Slices measured(nullptr);
    lay_out(measured);
    Slices slices(workspace.of<unsigned char>(measured.size()));
    lay_out(slices);
}

}  // namespace fusible::attention
