"""The model that a run trains: of a checkpoint or a configuration, whole or beneath adapters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from fusible.cli.devices import device_named
from fusible.cli.finetuning.options import AS_IS, FinetuneOptions
from fusible.cli.training.model import RECIPES_BY_NAME
from fusible.cli.weight_formats import recipe_of_format
from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.files import parse_json, read_file
from fusible.models import LanguageModel
from fusible.models.checkpoints import open_checkpoint
from fusible.models.pretrained import language_model_from, new_language_model
from fusible.models.text import Tokenizer
from fusible.models.training import add_adapters, fingerprint

__all__ = ["base_files", "check_model", "load_model", "new_model"]


def check_model(options: FinetuneOptions) -> None:
    """Raise ``ArgumentError`` where there is no model of that name."""
    if not os.path.exists(options.model):
        do = "name one that is there"
        raise ArgumentError(expected("a directory with weights, or a config.json", of=f"--model {options.model}", got="none", do=do))


def new_model(options: FinetuneOptions) -> LanguageModel:
    """The model as it is before the first step, with gradients for what is trained. Raises ``FusibleError`` where it cannot be loaded."""
    recipe, dtype = RECIPES_BY_NAME[options.recipe]
    device = device_named(options.device)
    if options.from_config:
        entries = parse_json(read_file(options.model, error=ArgumentError, missing=ArgumentError, do="name a config.json"), of=options.model)
        if not isinstance(entries, dict):
            got = f"a {type(entries).__name__}"
            raise CheckpointError(expected("an object", of=f"--model {options.model}", got=got, do="name a config.json"))
        return new_language_model(entries, recipe, dtype=dtype, device=device, seed=options.seed)
    if options.lora:
        base_recipe = recipe_of_format(options.model, None if options.base_format == AS_IS else options.base_format, "--base-format")
        model = language_model_from(options.model, base_recipe, dtype=dtype, device=device)
        model.recipe = recipe
        add_adapters(model, options.lora, options.alpha, options.lora_targets, seed=options.seed)
        return model
    return language_model_from(options.model, recipe, dtype=dtype, device=device, trainable=True)


def load_model(options: FinetuneOptions, tokenizer: Tokenizer) -> LanguageModel:
    """``new_model``, and torch's generator as a run begins with it. Raises ``FusibleError`` where the model does not go with windows and tokenizer,
    too."""
    model = new_model(options)
    if options.seq_len > model.context:
        wanted = f"at most {model.context}, the context of the model"
        raise ArgumentError(expected(wanted, of="--seq-len", got=options.seq_len, do="give a smaller one"))
    if tokenizer.vocabulary > model.vocabulary:
        wanted = f"a tokenizer of at most the model's {model.vocabulary} tokens"
        raise ArgumentError(expected(wanted, of="--tokenizer", got=f"one of {tokenizer.vocabulary}", do="name the one that belongs to the model"))
    torch.manual_seed(options.seed)
    return model


def base_files(options: FinetuneOptions) -> Mapping[str, str]:
    """The SHA-256 of the files that hold weights which stay as they are; none where all are trained."""
    if not options.lora:
        return {}
    files = sorted({entry.file for entry in open_checkpoint(options.model).shards.entries.values()})
    return {name: fingerprint(Path(options.model) / name) for name in files}
