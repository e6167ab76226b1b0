"""What a config says of a model's tensors, whatever its family, against those that are there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fusible.errors import CheckpointError, expected
from fusible.models.checkpoints.checkpoint import Checkpoint

__all__ = ["BLOCK", "check_agreement"]

BLOCK = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
"""How the names of what belongs to a block begin, and the block's number."""

_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte)\.weight$")


def check_agreement(checkpoint: Checkpoint) -> None:
    """Raise ``CheckpointError`` where the config names no architecture, or speaks of another vocabulary, width or number of blocks than the tensors
    are of. What is told of one family alone is checked where its models are made."""
    config = checkpoint.config
    if not isinstance(config.get("model_type"), str):
        do = "use the config that the model was saved with"
        raise CheckpointError(expected("a model_type", of=f"config.json of {checkpoint.directory}", got=repr(config.get("model_type")), do=do))
    text = config.get("text_config")
    told: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    _check_embedding(checkpoint, told)
    _check_blocks(checkpoint, told)


def _check_embedding(checkpoint: Checkpoint, told: Mapping[str, Any]) -> None:
    width = told.get("word_embed_proj_dim", told.get("hidden_size", told.get("n_embd")))
    for name in checkpoint.names:
        if _EMBEDDING.search(name) and width is not None and told.get("vocab_size") is not None:
            _check(name, "shape", [told["vocab_size"], width], list(checkpoint.shape(name)))


def _check_blocks(checkpoint: Checkpoint, told: Mapping[str, Any]) -> None:
    count = told.get("num_hidden_layers", told.get("n_layer"))
    found = {int(match[1]) for name in checkpoint.names if (match := BLOCK.search(name))}
    alone = "vision_config" not in told and not told.get("is_encoder_decoder")  # else there are several stacks of blocks, each of its own height
    if isinstance(count, int) and found and alone:
        following = told.get("num_nextn_predict_layers") or 0  # DeepSeek's blocks that predict further tokens may lie behind the others
        wanted = f"{count} blocks" + (f", and {following} more" if following else "")
        if not set(range(count)) <= found <= set(range(count + following)):
            do = "use the config and the weights of one model"
            got = f"blocks {min(found)} to {max(found)}, {len(found)} in all"
            raise CheckpointError(expected(wanted, of=str(checkpoint.directory), got=got, do=do))


def _check(name: str, what: str, wanted: list[Any], got: list[int]) -> None:
    if wanted != got:
        do = "use the config and the weights of one model"
        raise CheckpointError(expected(f"{what} {wanted}, as the config has it", of=name, got=got, do=do))
