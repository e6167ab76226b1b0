"""Random weights for the examples, the same on every run."""

import math

import numpy as np

import fusible.lazy as tp


def seeded_weights(model: tp.Module, seed: int = 0) -> dict[str, np.ndarray]:
    """A value for every parameter of ``model``, of a size that keeps activations near one: for its ``load_state_dict``."""
    rng = np.random.default_rng(seed)

    def draw(name: str, parameter: tp.Tensor) -> np.ndarray:
        if parameter.ndim > 1:
            return rng.standard_normal(parameter.shape) / math.sqrt(math.prod(parameter.shape[1:]))
        if name.endswith(("bias", "mean")):
            return rng.standard_normal(parameter.shape) / 10
        return rng.uniform(0.5, 1.5, parameter.shape)  # the weight or the variance of a norm

    return {name: draw(name, parameter).astype(parameter.dtype.numpy) for name, parameter in model.state_dict().items()}
