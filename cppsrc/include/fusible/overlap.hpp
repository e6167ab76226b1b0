// The memory of a call's tensors: what is written may share it with nothing else, or else be the whole of one tensor that is read (in place).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "fusible/strided_view.hpp"

namespace fusible {

/// Where a tensor of a call lies.
struct Span {
    std::uintptr_t begin;
    std::uintptr_t end;
    bool written;
    int argument;                // from 0
    std::size_t item;            // in a list
    const StridedView* strided;  // of one whose elements may lie apart, or null
};

namespace overlap {

inline std::int64_t width(const Span& span) { return static_cast<std::int64_t>(size_of(span.strided->dtype)); }

/// Whether some element of `a` in the dimensions from `dim` on lies within `distance` (in bytes) of one of `b`, which has the same strides.
inline bool meet(const Span& a, const Span& b, int dim, std::int64_t distance) {
    if (dim == a.strided->ndim) return distance < width(b) && -distance < width(a);
    const std::int64_t step = a.strided->strides[dim] * width(a);
    const std::int64_t most_a = a.strided->shape[dim] - 1;
    const std::int64_t most_b = b.strided->shape[dim] - 1;
    if (step == 0) return meet(a, b, dim + 1, distance);
    // Strides nest: what is left after whole steps is less than one, from below or from above.
    const std::int64_t whole = distance >= 0 ? distance / step : -((-distance + step - 1) / step);
    for (const std::int64_t steps : {whole, whole + 1})
        if (-most_b <= steps && steps <= most_a && meet(a, b, dim + 1, distance - steps * step)) return true;
    return false;
}

inline bool same_strides(const Span& a, const Span& b) {
    if (a.strided->ndim != b.strided->ndim || width(a) != width(b)) return false;
    for (int i = 0; i < a.strided->ndim; ++i)
        if (a.strided->strides[i] != b.strided->strides[i]) return false;
    return true;
}

inline bool same_shape(const Span& a, const Span& b) { return std::equal(a.strided->shape, a.strided->shape + a.strided->ndim, b.strided->shape); }

/// Whether two tensors whose extents meet share memory otherwise than as one tensor that is read and written in place. Of tensors with gaps, whether
/// they lie between one another, is told where their strides are equal, as those of the parts of a packed tensor are.
inline bool conflict(const Span& a, const Span& b) {
    if (!a.written && !b.written) return false;
    const bool apart = a.strided != nullptr && b.strided != nullptr && same_strides(a, b);
    const bool one = a.begin == b.begin && a.end == b.end && (apart ? same_shape(a, b) : a.strided == nullptr && b.strided == nullptr);
    // What stands at one place of several lists is read and written together; of another place it may be read too late.
    if (one) return (a.written && b.written) || a.item != b.item;
    return !apart || meet(a, b, 0, static_cast<std::int64_t>(b.begin) - static_cast<std::int64_t>(a.begin));
}

}  // namespace overlap

/// What `find_overlap` looks through; a call's tensors are put into it in the order of its arguments.
class Spans {
  public:
    Spans() { spans_.clear(); }

    void add(const TensorView& view, bool written, int argument) { add(view, view.numel(), written, argument, nullptr); }

    void add(const StridedView& view, bool written, int argument) {
        add(view, view.extent(), written, argument, view.is_contiguous() ? nullptr : &view);
    }

    template <class View>
    void add(const std::optional<View>& view, bool written, int argument) {
        if (view) add(*view, written, argument);
    }

    void add(const std::vector<TensorView>& views, bool written, int argument) {
        for (std::size_t i = 0; i < views.size(); ++i) add(views[i], views[i].numel(), written, argument, nullptr, i);
    }

    template <class Other>
    void add(const Other&, bool, int) {}

    /// Two spans that share memory though one of them is written, the written one first.
    std::optional<std::pair<Span, Span>> find_overlap() {
        if (!any_written_ || spans_.size() < 2) return std::nullopt;
        std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
        for (std::size_t i = 0; i < spans_.size(); ++i)
            for (std::size_t j = i + 1; j < spans_.size() && spans_[j].begin < spans_[i].end; ++j)
                if (overlap::conflict(spans_[i], spans_[j]))
                    return spans_[i].written ? std::pair(spans_[i], spans_[j]) : std::pair(spans_[j], spans_[i]);
        return std::nullopt;
    }

  private:
    void add(const TensorBase& view, std::int64_t elements, bool written, int argument, const StridedView* strided, std::size_t item = 0) {
        if (elements == 0) return;
        const auto begin = reinterpret_cast<std::uintptr_t>(view.data);
        spans_.push_back({begin, begin + static_cast<std::uintptr_t>(elements) * size_of(view.dtype), written, argument, item, strided});
        any_written_ = any_written_ || written;
    }

    // One to a thread, for a call makes room for it once.
    inline static thread_local std::vector<Span> spans_;
    bool any_written_ = false;
};

}  // namespace fusible
