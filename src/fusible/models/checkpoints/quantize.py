"""A checkpoint in high precision becomes a quantized one, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.models.checkpoints.agreement import check_agreement
from fusible.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from fusible.models.checkpoints.targets import TARGETS, Target, high_precision
from fusible.models.checkpoints.writing import SHARD_SIZE, other_files, write_checkpoint

__all__ = ["FORMATS", "Summary", "quantize_checkpoint"]

FORMATS = tuple(TARGETS)
"""What ``quantize_checkpoint`` can write."""

_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
"""Linear layers of one input that servers compute as one product, whose weight has one scale of the tensor: so these are quantized with one."""


@dataclass(frozen=True)
class Summary:
    """``weights``: how many were quantized. ``kept``: the modules of linear layers and experts that were not. Bytes of all tensors, and of
    those before."""

    weights: int
    kept: tuple[str, ...]
    nbytes_before: int
    nbytes: int


def quantize_checkpoint(
    source: str | PathLike[str], out: str | PathLike[str], format: str, *, shard_size: int = SHARD_SIZE
) -> Summary:  # fmt: skip
    """Quantize the linear layers in the blocks of the model in ``source`` to ``format``, and write it to ``out``, with its other files.

    ``format``: ``"fp8"`` (E4M3, one scale a weight) and ``"mxfp8"``, ``"nvfp4"``, ``"mxfp4"`` as compressed-tensors stores them, ``"block"`` as
    DeepSeek does (E4M3, a scale of fp32 for each 128x128), ``"mxfp4"`` of gpt-oss as that is stored. Embeddings, the head, norms, routers and weights
    that are no whole blocks stay as they are. No more than a layer is in memory.

    Raises ``ArgumentError`` for another format, ``CheckpointError`` for a checkpoint that is damaged, disagrees with its config, is quantized already
    or has no weights that take the format, and ``FileError`` where ``out`` has files in it; nothing is written then.
    """
    if format not in TARGETS:
        *names, last = FORMATS
        raise ArgumentError(expected(f"{', '.join(names)} or {last}", of="format of quantize_checkpoint", got=repr(format), do="name one of these"))
    checkpoint = open_checkpoint(source)
    if checkpoint.quantization is not None:
        do = "quantize the model as it was before"
        raise CheckpointError(expected("a model in high precision", of=str(source), got=f"one quantized by {checkpoint.quantization}", do=do))
    check_agreement(checkpoint)
    target, weights = _chosen(checkpoint, format)
    kept = high_precision(checkpoint, weights)
    config = {**checkpoint.config, "quantization_config": target.scheme.written(target.layout, kept)}
    pairs, files = _quantized(checkpoint, target, weights), other_files(checkpoint.directory)
    write_checkpoint(out, config, pairs, shard_size=shard_size, files=files, count=len(checkpoint))
    return Summary(len(weights), tuple(kept), checkpoint.nbytes, open_checkpoint(out).nbytes)


def _chosen(checkpoint: Checkpoint, format: str) -> tuple[Target, list[str]]:
    """The target of ``format`` that has weights to quantize, and these."""
    for target in TARGETS[format]:
        weights = [name for name in target.weights(checkpoint) if target.fits(checkpoint.shape(name))]
        if weights:
            return target, weights
    rows, columns = TARGETS[format][-1].block
    wanted = f"weights of linear layers within the model's blocks, in multiples of {rows} x {columns}"
    got = f"none in this {checkpoint.config['model_type']}"
    raise CheckpointError(expected(wanted, of=f"a model to quantize to {format}", got=got, do="choose another format"))


def _quantized(checkpoint: Checkpoint, target: Target, weights: list[str]) -> Iterator[tuple[str, Any]]:
    """The tensors to write, by name."""
    left = dict.fromkeys(weights)
    for name in checkpoint:
        if name in left:
            together = [each for each in _partners(name) if each in left] if target.per_tensor else [name]
            yield from _quantized_together(checkpoint, target, together)
            for each in together:
                del left[each]
        elif name not in weights:
            yield name, checkpoint[name]


def _partners(name: str) -> list[str]:
    """The weights that ``name`` is computed together with, itself among them."""
    path, _, own = name.removesuffix(".weight").rpartition(".")
    group = next((group for group in _TOGETHER if own in group), (own,))
    return [f"{path}.{each}.weight" for each in group]


def _quantized_together(checkpoint: Checkpoint, target: Target, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Weights quantized as the one that their rows make up."""
    parts = [checkpoint[name] for name in names]
    if len({part.shape[-1] for part in parts}) > 1:  # no layers of one input, whatever their names
        for name in names:
            yield from _quantized_together(checkpoint, target, [name])
        return
    for name, part in zip(names, parts, strict=True):
        if not bool(torch.isfinite(part).all()):
            raise CheckpointError(expected("finite numbers", of=name, got="infinite ones, or NaN", do="use an intact checkpoint"))
    whole = torch.cat(parts) if len(parts) > 1 else parts[0].mT.contiguous() if target.transposed else parts[0]
    made = target.quantize(whole)
    first = 0
    for name, part in zip(names, parts, strict=True):
        yield name, made if len(parts) == 1 else made[first : first + len(part)]
        first += len(part)
