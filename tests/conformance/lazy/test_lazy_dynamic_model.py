"""A transformer with dynamic batch and length: one trace for all sizes, in this process and from a file, as compiled for each size alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fusible import lazy

_HEADS, _WIDTH, _WORDS, _LENGTH = 2, 16, 30, 32


def _weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> lazy.Tensor:
        return lazy.Tensor((rng.standard_normal(shape) * 0.1).astype(np.float32))

    w = _WIDTH
    layers = [{"qkv": weight(w, 3 * w), "out": weight(w, w), "up": weight(w, 4 * w), "down": weight(4 * w, w)} for _ in range(2)]
    mask = lazy.Tensor(np.triu(np.full((_LENGTH, _LENGTH), -1e9, np.float32), 1))
    return {"words": weight(_WORDS, w), "places": weight(_LENGTH, w), "mask": mask, "layers": layers}


def _normalized(x: lazy.Tensor) -> lazy.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * lazy.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)


def _transformer(tokens: lazy.Tensor, weights: dict[str, Any]) -> lazy.Tensor:
    batch, length = tokens.shape

    def heads(t: lazy.Tensor) -> lazy.Tensor:
        return t.reshape((batch, length, _HEADS, -1)).permute((0, 2, 1, 3))

    x = weights["words"].gather(0, tokens) + weights["places"][:length]
    for layer in weights["layers"]:
        q, k, v = map(heads, (_normalized(x) @ layer["qkv"]).split(3, 2))
        scores = q @ k.transpose(2, 3) * (_WIDTH // _HEADS) ** -0.5 + weights["mask"][:length, :length]
        x = x + (lazy.softmax(scores, 3) @ v).permute((0, 2, 1, 3)).flatten(2) @ layer["out"]
        x = x + lazy.maximum(_normalized(x) @ layer["up"], 0.0) @ layer["down"]
    return _normalized(x) @ weights["words"].transpose(0, 1)


def test_one_dynamic_transformer_is_every_static_one(tmp_path: Path) -> None:
    weights = _weights()
    executable = lazy.compile(_transformer, args=[lazy.InputInfo(((1, 2, 4), (1, 8, _LENGTH)), lazy.int32), weights])
    assert executable.output_infos == [lazy.InputInfo(((1, 2, 4), (1, 8, _LENGTH), _WORDS), lazy.float32)]
    executable.save(tmp_path / "model")
    loaded = lazy.Executable.load(tmp_path / "model")
    rng = np.random.default_rng(1)
    for shape in ((1, 1), (3, _LENGTH)):
        tokens = rng.integers(0, _WORDS, shape, np.int32)
        want = lazy.compile(_transformer, args=[lazy.InputInfo(shape, lazy.int32), weights])(tokens).numpy()
        # The same operations of the same sizes, so the same program: not a bit differs.
        np.testing.assert_array_equal(executable(tokens).numpy(), want)
        np.testing.assert_array_equal(loaded(tokens).numpy(), want)
