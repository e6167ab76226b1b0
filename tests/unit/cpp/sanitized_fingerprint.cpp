// Fingerprints of tensors around the sizes of a block and of a chunk, alone and several at once.
#include "fingerprint/fingerprint.hpp"
#include "sanitized.hpp"

namespace fusible::fingerprint {

namespace {

const Drive driver([] {
    std::vector<TensorView> all;
    std::vector<std::unique_ptr<Buffer>> buffers;
    for (const std::int64_t size : {0, 1, 3, 255, 256, 257, 128 * 1024 - 1, 128 * 1024, 128 * 1024 + 1})
        for (const DType dtype : {DType::Byte, DType::Float32, DType::BFloat16}) {
            buffers.push_back(std::make_unique<Buffer>(dtype, 1, size));
            all.push_back(buffers.back()->view);
            if (fingerprints({all.back()}, 1).size() != 1) std::abort();
        }
    if (fingerprints(all, 1) != fingerprints(all, 3)) std::abort();
});

}  // namespace

}  // namespace fusible::fingerprint
