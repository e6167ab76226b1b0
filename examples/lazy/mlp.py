"""A multilayer perceptron: a module, what it records, what is compiled of it, and what weights of 8 and 4 bits cost.

* ``python examples/lazy/mlp.py``
"""

from typing import Any

import numpy as np
from seeded_weights import seeded_weights

import fusible.lazy as tp

FEATURES, HIDDEN, CLASSES = 16, 64, 4


class MLP(tp.Module):
    def __init__(self, **quantization: Any) -> None:
        self.up = tp.Linear(FEATURES, HIDDEN, **quantization)
        self.down = tp.Linear(HIDDEN, CLASSES, **quantization)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        return self.down(tp.gelu(self.up(x)))


def make_model(seed: int = 0) -> MLP:
    model = MLP()
    model.load_state_dict(seeded_weights(model, seed))
    return model


def quantized(model: MLP, dtype: tp.dtype) -> MLP:
    """The same model, its weights quantized with one scale per output feature: the largest magnitude becomes the largest value of ``dtype``."""
    weights = model.state_dict()
    scales = {f"{name}_scale": (tp.max(tp.abs(t), dim=1) / dtype.max).eval() for name, t in weights.items() if name.endswith("weight")}
    narrow = MLP(quant_dtype=dtype, weight_quant_dim=0)
    narrow.load_state_dict({**weights, **scales})
    return narrow


def main() -> None:
    model = make_model()
    print(model)

    x = tp.Tensor(np.random.default_rng(1).standard_normal((3, FEATURES)).astype(np.float32))
    y = model(x)
    print("\nNothing is computed yet. The program so far:\n")
    print(tp.Trace([y]))
    print("\nPrinting a tensor computes it:\n")
    print(y)

    forward = tp.compile(model, args=[tp.InputInfo((3, FEATURES), tp.float32)])
    print("\nCompiled ahead of its calls, it gives the same:", np.array_equal(forward(x).numpy(), y.numpy()))

    print("\nWhat narrow weights cost, as the largest deviation relative to the largest output:")
    for dtype in (tp.int8, tp.float8, tp.int4):
        error = tp.max(tp.abs(quantized(model, dtype)(x) - y)) / tp.max(tp.abs(y))
        print(f"    {dtype!s:7} {float(error):7.2%}")


if __name__ == "__main__":
    main()
