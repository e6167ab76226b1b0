"""``export_program``: a model as an ``ExportedProgram`` of torch's own functions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.models.convert.pipelines import ConvertedModule, quantizes
from fusible.models.pretrained_model import PretrainedModel
from fusible.nvte import is_quantized_type
from fusible.pytorch.engine.autocast import OUTSIDE, current_autocast
from fusible.pytorch.engine.lowered import exporting
from fusible.pytorch.modules.base import BaseModule

__all__ = ["checked_inputs", "export_program"]


def export_program(model: nn.Module, *inputs: torch.Tensor, dynamic_shapes: Sequence[Mapping[int, Any] | None] | None = None) -> Any:
    """The inference of ``model`` as a ``torch.export.ExportedProgram``, whose graph has torch's own functions alone: it runs, and is compiled, in
    processes that know nothing of Fusible. ``torch.export.save`` writes it; ``torch._inductor.aoti_compile_and_package`` compiles it.

    ``inputs``: examples, of at least two rows and two tokens. A model of ``from_pretrained`` has its own: tokens, int64 ``[batch, sequence]``, or
    pictures, or speech; one with a decoder takes the tokens of a text behind what is encoded. ``dynamic_shapes``: of each input its dynamic
    dimensions, as ``torch.export`` takes them; by default all that the model leaves open. A model of transformers gives its logits, and keeps no
    cache.

    Weights that are held in 8 or 4 bits stay so, as buffers with their scales. Under a recipe (the model's, that of ``fusible.convert``, or the
    ``autocast`` in force) weights become the constants that it quantizes them to, and delayed and current scaling quantize activations in the graph.
    Raises ``ArgumentError`` for a model in training mode, for operations that have no such form, and for activations in blocks.
    """
    examples = checked_inputs(model, inputs)
    called = model if not hasattr(getattr(model, "config", None), "use_cache") or isinstance(model, PretrainedModel) else _Logits(model)
    shapes: Any = _shapes(model, examples) if dynamic_shapes is None else tuple(dynamic_shapes)
    shapes = (shapes,) if isinstance(called, _Logits) else shapes
    with exporting(called, list(_unneeded(model))), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about its own code
        program = torch.export.export(called, examples, dynamic_shapes=shapes)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the lines of source that it came from: most of the file of a small model
    return program


def checked_inputs(model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The examples of a model's inputs. Raises ``DTypeError`` and ``ArgumentError`` for a model or inputs that cannot be exported."""
    if not isinstance(model, nn.Module):
        raise DTypeError(expected("an nn.Module", of="a model to export", got=f"a {type(model).__name__}", do="give the model itself"))
    wrong = next((one for one in inputs if not isinstance(one, torch.Tensor)), None)
    if wrong is not None:
        raise DTypeError(expected("tensors", of="the inputs of a model to export", got=f"a {type(wrong).__name__}", do="give examples"))
    if model.training:
        raise ArgumentError(expected("inference", of="a model to export", got="one in training mode", do="call model.eval() first"))
    if inputs:
        return tuple(inputs)
    if not isinstance(model, PretrainedModel):
        raise ArgumentError(expected("an example of each input", of="a model to export", got="none", do="give tensors such as it is called with"))
    return tuple(example.value for example in model.examples())


class _Logits(nn.Module):
    """What a model of transformers gives, as tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: torch.Tensor) -> Any:
        found = self.model(*inputs, use_cache=False)
        return found.logits if hasattr(found, "logits") else found.to_tuple()


def _shapes(model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[dict[int, Any], ...]:
    own = model.examples() if isinstance(model, PretrainedModel) else ()
    if len(own) == len(inputs):
        named = [{place: (name, most) for place, (name, most) in example.dimensions.items()} for example in own]
        dims = {name: Dim(name, max=most) for of_one in named for name, most in of_one.values()}
        return tuple({place: dims[name] for place, (name, _) in of_one.items()} for of_one in named)
    return tuple(dict.fromkeys(range(x.ndim), Dim.AUTO) for x in inputs)


def _unneeded(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parameters of which a recipe takes 8-bit values alone, with their modules."""
    in_force = current_autocast()
    whole = in_force.recipe if in_force is not OUTSIDE else getattr(model, "recipe", None)
    for module in model.modules():
        recipe = module._recipe if in_force is OUTSIDE and isinstance(module, ConvertedModule) else whole
        for bound in module._bound if isinstance(module, BaseModule) and quantizes(recipe) else ():
            holders = [bound.module] if isinstance(bound.module, nn.Module) else vars(bound.module).get("modules", ())
            asked = [own for name, own in zip(bound.op.arg_names, bound.parameters, strict=True) if is_quantized_type(bound.op.type_of(name))]
            yield from ((holder, name) for holder in holders for name in asked if holder._parameters.get(name) is not None)
