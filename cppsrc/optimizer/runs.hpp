// The elements of a list of tensors as runs of bounded length, so that many small tensors and one large one split over threads alike.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/checks.hpp"
#include "runtime/threads.hpp"

namespace fusible::optimizer {

struct Run {
    std::size_t tensor;
    std::int64_t begin;
    std::size_t count;

    void* of(const std::vector<TensorView>& tensors) const {
        const TensorView& view = tensors[tensor];
        return view.as<char>() + begin * static_cast<std::int64_t>(size_of(view.dtype));
    }
};

inline std::vector<Run> runs_of(const std::vector<TensorView>& tensors) {
    constexpr std::int64_t kRun = 16 * 1024;
    std::vector<Run> runs;
    for (std::size_t i = 0; i < tensors.size(); ++i)
        for (std::int64_t begin = 0, count = tensors[i].numel(); begin < count; begin += kRun)
            runs.push_back({i, begin, static_cast<std::size_t>(std::min(kRun, count - begin))});
    return runs;
}

/// Calls body(index of the run, run) for each, on as many threads as the elements are worth.
template <class Body>
void each_run(const std::vector<Run>& runs, int num_threads, const Body& body) {
    std::size_t bytes = 0;
    for (const Run& run : runs) bytes += run.count * sizeof(float);
    parallel_for(runs.size(), threads_for(num_threads, bytes), [&](std::size_t i) { body(i, runs[i]); });
}

/// Raises unless `tensors` are float32, float16 or bfloat16 and pair up with `like`.
inline void check_list(const std::vector<TensorView>& tensors, const char* name, const std::vector<TensorView>& like) {
    if (tensors.size() != like.size())
        throw ShapeError(expected(std::to_string(like.size()) + " tensors", name, std::to_string(tensors.size()), "pass one per parameter"));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        wide_kind(tensors[i], name);
        check_numel(tensors[i], name, like[i].numel());
    }
}

}  // namespace fusible::optimizer
