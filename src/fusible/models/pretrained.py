"""``from_pretrained``, ``from_config`` and ``save_pretrained``: models in their fastest form, from and to what Hugging Face's libraries read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from fusible.errors import ArgumentError, CheckpointError, DTypeError, expected
from fusible.models.assembly import Read, Seeded, assembled
from fusible.models.checkpoints import Checkpoint, open_checkpoint, write_checkpoint
from fusible.models.checkpoints.checkpoint import read_config
from fusible.models.families import Config, blueprint_of, check_causal
from fusible.models.language_model import LanguageModel
from fusible.models.older_names import with_older_names
from fusible.models.pretrained_model import PretrainedModel
from fusible.models.stored_formats import StoredFormats, stored_formats
from fusible.models.transformer_engine import OfTransformerEngine, is_of_transformer_engine
from fusible.models.weight_formats import format_of_recipe
from fusible.pytorch import Recipe
from fusible.quantized import QuantizedTensor

__all__ = ["from_config", "from_pretrained", "language_model_from", "new_language_model", "save_pretrained", "stored_formats_in"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_QUANTIZATION = "quantization_config"


def from_pretrained(
    directory: str | PathLike[str],
    recipe: Recipe | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    trainable: bool = False,
) -> PretrainedModel:
    """The model of ``directory``, which has a ``config.json`` and weights in safetensors: a ``LanguageModel``, ``EncoderModel`` or
    ``EncoderDecoderModel``, as its family has it.

    ``dtype``: of activations, and of parameters that are not quantized; None for the checkpoint's. ``recipe``: the weights of the blocks' products
    and experts are held as its number format alone, and activations stay in ``dtype``; heads, norms and routers stay as they are. Weights that the
    checkpoint has quantized stay what they are, but for those of experts by which no layer multiplies at once, which become ``dtype``; where all are
    in another format than the recipe's, it is refused. ``trainable``: parameters are of ``dtype``, get gradients, and the model computes under
    ``recipe``. Decoder layers may be those of ``te.TransformerLayer`` (``from_transformer_engine``).

    Raises ``CheckpointError`` for a family that is not known, for entries of the configuration that it is not made with, and for parameters that are
    missing or of other shapes; ``ArgumentError`` for a recipe that no weight would take; ``FileError`` for what cannot be read.
    """
    checkpoint = open_checkpoint(directory)
    config = {name: value for name, value in checkpoint.config.items() if not (trainable and name == _QUANTIZATION)}
    blueprint = blueprint_of(Config(config))
    asked = dtype or _dtype_of(config, checkpoint, blueprint.embedding)
    theirs = OfTransformerEngine.of(checkpoint, config) if is_of_transformer_engine(checkpoint.names) else None
    stored = theirs or with_older_names(checkpoint, blueprint.older)
    source = Read(stored, _checked(asked), torch.device(device), None if trainable else recipe, trainable)
    if source.recipe is not None and checkpoint.weights:
        do = "leave it out, or load the model that was quantized"
        stored_formats(blueprint, source).check(format_of_recipe(source.recipe), of="recipe of from_pretrained", do=do)
    model = assembled(config, blueprint, source, recipe if trainable else None)
    if theirs is not None:
        theirs.check_read()
    return model


def stored_formats_in(directory: str | PathLike[str]) -> StoredFormats:
    """In which number formats ``directory`` has the weights that the recipe of ``from_pretrained`` is for. Raises ``CheckpointError`` for a family
    that is not known, and for what is wrong with the files."""
    checkpoint = open_checkpoint(directory)
    blueprint = blueprint_of(Config(checkpoint.config))
    return stored_formats(blueprint, Read(with_older_names(checkpoint, blueprint.older), torch.bfloat16, torch.device("cpu"), None, False))


def from_config(
    config: Mapping[str, Any] | str | PathLike[str],
    recipe: Recipe | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PretrainedModel:
    """A new model to be trained, which computes under ``recipe``. ``config``: its entries, or a ``config.json``, or the directory of one.

    Matrices are normal with the deviation ``initializer_range``, or Whisper's ``init_std`` (default: 0.02), by ``seed`` alone; norms change nothing,
    and biases are 0. Raises what ``from_pretrained`` raises of a configuration.
    """
    if not isinstance(config, Mapping | str | PathLike):
        do = "pass config.to_dict()" if hasattr(config, "to_dict") else "pass a dict, or a path"
        raise DTypeError(expected("entries, or the path of a config.json", of="config of from_config", got=f"a {type(config).__qualname__}", do=do))
    entries = dict(config) if isinstance(config, Mapping) else _entries(Path(config))
    asked = Config(entries)
    deviation = asked.number("initializer_range", asked.number("init_std", 0.02))
    source = Seeded(_checked(dtype), torch.device(device), seed, deviation)
    return assembled(entries, blueprint_of(asked), source, recipe)


def language_model_from(directory: str | PathLike[str], recipe: Recipe | None = None, **options: Any) -> LanguageModel:
    """``from_pretrained`` of a causal language model. Raises ``CheckpointError`` for another kind, before its weights are read."""
    check_causal(read_config(Path(directory)), f"DIR {directory}")
    return _causal(from_pretrained(directory, recipe, **options))


def new_language_model(config: Mapping[str, Any], recipe: Recipe | None = None, **options: Any) -> LanguageModel:
    """``from_config`` of a causal language model. Raises ``CheckpointError`` for another kind."""
    check_causal(config, "config.json")
    return _causal(from_config(config, recipe, **options))


def _causal(model: PretrainedModel) -> LanguageModel:
    assert isinstance(model, LanguageModel)
    return model


def save_pretrained(model: PretrainedModel, directory: str | PathLike[str], *, files: Mapping[str, Path] | None = None) -> None:
    """Write ``config.json`` and the parameters, by the names of the family, as transformers reads them; ``files``: others to copy, by name.

    The directory appears when all of it is on the disk. Raises ``FileError`` where there is one already, and ``ArgumentError`` for a model whose
    weights are held in 8 or 4 bits, which ``fusible quantize`` writes; ``DTypeError`` for one that is none of Fusible's.
    """
    if not isinstance(model, PretrainedModel):
        wanted, do = "a model of from_pretrained or from_config", "call save_pretrained of its own"
        raise DTypeError(expected(wanted, of="model of save_pretrained", got=f"a {type(model).__qualname__}", do=do))
    quantized = next((type(p).__name__ for p in model.parameters() if isinstance(p, QuantizedTensor)), None)
    if quantized is not None:
        do = "save the model that it was made from, and convert that by fusible quantize"
        raise ArgumentError(expected("plain parameters", of="a model to save", got=f"a {quantized}", do=do))
    name = next(name for name, dtype in _DTYPES.items() if dtype is model.dtype)
    config = {**{key: value for key, value in model.config.items() if key != "torch_dtype"}, "dtype": name}
    write_checkpoint(directory, config, _plain(model), files=files)


def _plain(model: PretrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.detach().contiguous()) for name, parameter in model.stored_parameters())


def _entries(path: Path) -> dict[str, Any]:
    return read_config(path.parent if path.is_file() and path.name == "config.json" else path)


def _dtype_of(config: Mapping[str, Any], checkpoint: Checkpoint, embedding: str) -> torch.dtype:
    """What the config says; where it says nothing, what the embedding is stored in."""
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None and embedding in checkpoint:
        return checkpoint.tensor(embedding).dtype
    name = name or "bfloat16"
    if name not in _DTYPES:
        raise CheckpointError(expected(f"one of {', '.join(_DTYPES)}", of="dtype of config.json", got=repr(name), do="pass dtype"))
    return _DTYPES[name]


def _checked(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _DTYPES.values():
        raise ArgumentError(expected("float32, bfloat16 or float16", of="dtype of a model", got=dtype, do="pass one of these"))
    return dtype
