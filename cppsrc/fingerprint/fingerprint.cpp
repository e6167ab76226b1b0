#include "fingerprint/fingerprint.hpp"

#include <algorithm>
#include <cstddef>

#include "fingerprint/kernels.hpp"
#include "runtime/threads.hpp"

namespace fusible::fingerprint {

namespace {

/// The bytes of a task. Each has its own fingerprint, and a tensor's is made of those of its chunks in their order.
constexpr std::size_t kChunk = 128 * 1024;

struct Chunk {
    std::size_t tensor;
    const char* begin;
    std::size_t count;
    Fingerprint found;
};

}  // namespace

std::vector<std::pair<std::uint64_t, std::uint64_t>> fingerprints(const std::vector<TensorView>& tensors, int num_threads) {
    std::vector<Chunk> chunks;
    std::vector<Fingerprint> totals;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const std::size_t size = static_cast<std::size_t>(tensors[i].numel()) * size_of(tensors[i].dtype);
        for (std::size_t begin = 0; begin < size; begin += kChunk)
            chunks.push_back({i, tensors[i].as<const char>() + begin, std::min(kChunk, size - begin), {}});
        totals.push_back({size, size});
        bytes += size;
    }
    const Kernels& table = kernels();
    // One thread reads a megabyte in the time that another takes to be there.
    parallel_for(chunks.size(), threads_for(num_threads, bytes / 16),
                 [&](std::size_t i) { chunks[i].found = table.of(chunks[i].begin, chunks[i].count); });
    for (const Chunk& chunk : chunks) take(totals[chunk.tensor], chunk.found.first, chunk.found.second);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> results;
    for (const Fingerprint& total : totals) results.emplace_back(total.first, total.second);
    return results;
}

}  // namespace fusible::fingerprint
