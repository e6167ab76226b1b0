#include "softmax/softmax.hpp"

#include <algorithm>
#include <vector>

#include "runtime/checks.hpp"
#include "runtime/threads.hpp"
#include "softmax/kernels.hpp"

namespace fusible::softmax {

namespace {

/// Scores [*, queries, keys].
struct Scores {
    explicit Scores(const TensorView& view, bool is_causal) : causal(is_causal) {
        if (view.ndim < 2) throw ShapeError(expected("[*, queries, keys]", "src", view.shape_text(), "reshape it"));
        queries = view.shape[view.ndim - 2];
        keys = view.shape[view.ndim - 1];
        rows = keys == 0 ? 0 : view.numel() / keys;
    }

    /// How many keys the query of a row sees: with a causal mask, the last query sees all of them.
    std::int64_t visible(std::int64_t row) const {
        return causal ? std::clamp<std::int64_t>(row % queries + keys - queries + 1, 0, keys) : keys;
    }

    std::int64_t queries;
    std::int64_t keys;
    std::int64_t rows;
    bool causal;
};

/// Rows in a few tasks a thread. Tasks from the front and the back alternate: later rows of a causal mask are longer.
class RowTasks {
  public:
    RowTasks(const Scores& scores, int num_threads, std::size_t bytes) : rows_(scores.rows), threads_(threads_for(num_threads, bytes)) {
        constexpr std::int64_t kTasksPerThread = 8;
        tasks_ = std::min(rows_, kTasksPerThread * threads_);
    }

    std::size_t count() const { return static_cast<std::size_t>(tasks_); }

    /// Calls body(row, task) for every row.
    template <class Body>
    void run(const Body& body) const {
        parallel_for(count(), threads_, [&](std::size_t index) {
            const auto task = static_cast<std::int64_t>(index);
            const std::int64_t place = task % 2 == 0 ? task / 2 : tasks_ - 1 - task / 2;
            for (std::int64_t row = place * rows_ / tasks_; row < (place + 1) * rows_ / tasks_; ++row) body(row, index);
        });
    }

  private:
    std::int64_t rows_;
    std::int64_t tasks_;
    int threads_;
};

/// Rows of the mask [batch or 1, 1, queries, keys] for the rows of the scores [batch, heads, queries, keys].
class Mask {
  public:
    Mask(const std::optional<TensorView>& mask, const TensorView& src, const Scores& scores) : scores_(scores) {
        if (!mask) return;
        check_dtype(*mask, "mask", mask->dtype == DType::Byte, "uint8");
        if (src.ndim != 4) throw ShapeError(expected("4 dimensions", "src, with a mask", src.shape_text(), "reshape it"));
        const bool one = mask->ndim == 4 && mask->shape[0] == 1;
        check_numel(*mask, "mask", (one ? 1 : src.shape[0]) * scores.queries * scores.keys);
        data_ = mask->as<const std::uint8_t>();
        rows_of_batch_ = one ? 0 : src.shape[1] * scores.queries;
    }

    bool given() const { return data_ != nullptr; }

    const std::uint8_t* row(std::int64_t row) const {
        if (!given()) return nullptr;
        const std::int64_t batch = rows_of_batch_ == 0 ? 0 : row / rows_of_batch_;
        return data_ + (batch * scores_.queries + row % scores_.queries) * scores_.keys;
    }

  private:
    const Scores& scores_;
    const std::uint8_t* data_ = nullptr;
    std::int64_t rows_of_batch_ = 0;
};

void check_like(const TensorView& tensor, const char* name, const TensorView& like) {
    check_dtype(tensor, name, tensor.dtype == like.dtype, name_of(like.dtype));
    check_numel(tensor, name, like.numel());
}

std::size_t bytes_of(const TensorView& tensor) { return static_cast<std::size_t>(tensor.numel()) * size_of(tensor.dtype); }

}  // namespace

void softmax_forward(const TensorView& src, const TensorView& dst, double scale, const std::optional<TensorView>& mask, bool causal,
                     int num_threads) {
    const int source = table_index(wide_kind(src, "src"));
    check_threads(num_threads);
    check_like(dst, "dst", src);
    const Scores scores(src, causal);
    const Mask masked(mask, src, scores);
    const auto kernel = kernels().forward[source][masked.given() ? 1 : 0];
    const std::int64_t bytes = scores.keys * static_cast<std::int64_t>(size_of(src.dtype));
    const std::size_t padded = static_cast<std::size_t>(scores.keys) + kSoftmaxPadding;
    const RowTasks tasks(scores, num_threads, bytes_of(src));
    std::vector<float> scratch(tasks.count() * padded);
    tasks.run([&](std::int64_t row, std::size_t task) {
        kernel({src.as<const char>() + row * bytes, masked.row(row), dst.as<char>() + row * bytes, scratch.data() + task * padded,
                scores.visible(row), scores.keys, static_cast<float>(scale)});
    });
}

void softmax_backward(const TensorView& grads, const TensorView& results, const TensorView& dst, double scale, bool causal, int num_threads) {
    const int source = table_index(wide_kind(grads, "grads"));
    check_threads(num_threads);
    check_like(results, "results", grads);
    check_like(dst, "dst", grads);
    const Scores scores(grads, causal);
    const auto kernel = kernels().backward[source];
    const std::int64_t bytes = scores.keys * static_cast<std::int64_t>(size_of(grads.dtype));
    RowTasks(scores, num_threads, bytes_of(grads)).run([&](std::int64_t row, std::size_t) {
        kernel({grads.as<const char>() + row * bytes, results.as<const char>() + row * bytes, dst.as<char>() + row * bytes, scores.visible(row),
                scores.keys, static_cast<float>(scale)});
    });
}

}  // namespace fusible::softmax
