// The norms, at the edges of rows, vectors and tiles.
#include "norm/norm.hpp"
#include "sanitized.hpp"

namespace fusible::norm {

namespace {

constexpr Scalar kEps{1e-5f};

void exercise(std::int64_t rows, std::int64_t cols, DType wide, DType other) {
    constexpr int kThreads = 2;
    const Buffer x(wide, rows, cols), y(other, rows, cols), dz(other, rows, cols), dx(wide, rows, cols);
    const Buffer weight(wide, 1, cols), bias(other, 1, cols), amax(DType::Float32, 1, 1);
    const Buffer mu(DType::Float32, 1, rows), rsigma(DType::Float32, 1, rows);
    const Buffer codes(DType::Byte, rows, cols), turned(DType::Byte, cols, rows), dgamma(wide, 1, cols), dbeta(other, 1, cols);
    const Scalar scale{2.0f};
    norm_fwd(x.view, weight.view, bias.view, mu.view, rsigma.view, kEps, true, y.view, other, {}, scale, {}, false, kThreads);
    norm_fwd(x.view, weight.view, {}, {}, rsigma.view, kEps, false, codes.view, DType::Float8E4M3, {}, scale, amax.view, true, kThreads);
    norm_fwd(x.view, weight.view, {}, mu.view, rsigma.view, kEps, false, codes.view, DType::Float8E5M2, turned.view, scale, amax.view, false,
             kThreads);
    norm_fwd(x.view, weight.view, {}, {}, rsigma.view, kEps, true, {}, DType::Float8E4M3, turned.view, scale, {}, false, kThreads);
    norm_bwd(dz.view, x.view, mu.view, rsigma.view, weight.view, true, dx.view, dgamma.view, dbeta.view, {}, kThreads);
    norm_bwd(dz.view, x.view, {}, rsigma.view, weight.view, false, dx.view, dgamma.view, {}, y.view, kThreads);
}

const Drive driver([] {
    for (const DType wide : {DType::Float32, DType::Float16, DType::BFloat16})
        for (const DType other : {DType::Float32, DType::Float16, DType::BFloat16}) {
            for (const std::int64_t rows : {0, 1, 3, 4, 64, 67})
                for (const std::int64_t cols : {0, 1, 15, 33, 64, 127, 321}) exercise(rows, cols, wide, other);
            exercise(2, 5003, wide, other);
            exercise(4500, 3, wide, other);
        }
});

}  // namespace

}  // namespace fusible::norm
