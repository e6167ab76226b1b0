"""``serve_transformers_fp8``: the one call after which transformers loads FP8 models on a CPU as they are."""

from __future__ import annotations

from typing import Any

from fusible.errors import NotServedError, check_switch, expected
from fusible.models.text.libraries import library

__all__ = ["serve_transformers_fp8"]


def serve_transformers_fp8(*, quantize_activations: bool = True, undo: bool = False) -> None:
    """Let transformers' FP8 models (``FineGrainedFP8Config``, ``quant_method: fp8``) be loaded and computed on machines without a GPU.

    From then on ``AutoModelForCausalLM.from_pretrained(directory)`` keeps the weights as the checkpoint has them, a byte each, instead of
    dequantizing them; its ``FP8Linear`` and ``FP8Experts`` modules call Fusible's products for tensors on a CPU. A plain checkpoint is quantized as
    it is loaded, with ``quantization_config=FineGrainedFP8Config()``. ``save_pretrained`` writes what was read. A layer's input has the gradient that
    transformers gives it, so that adapters train.

    ``quantize_activations``: activations are quantized as the checkpoint's ``activation_scheme`` says, which is what a GPU computes: ``static`` by
    the scales that it has; ``dynamic`` by their own largest magnitudes, for each 1x128 or, where a weight has one scale, for each token. False keeps
    them in their own precision: the result is that of the dequantized model. The latest call holds, for models that are loaded already, too.
    ``undo``: transformers computes by its own kernels again.

    Raises ``MissingModuleError`` without transformers, ``NotServedError`` for a version of it that has no place for such kernels. Loading raises
    ``CheckpointError`` for weights that no product takes (FP4, blocks of other widths), before anything is read of them.
    """
    check_switch(quantize_activations, "quantize_activations of serve_transformers_fp8")
    check_switch(undo, "undo of serve_transformers_fp8")
    loader = _loader()
    if undo:
        loader.uninstall()
    else:
        loader.install(quantize_activations)


def _loader() -> Any:
    transformers = library("transformers", extra="")
    try:
        return library("transformers", extra="", module="fusible.models.fine_grained_fp8.quantizer")
    except (AttributeError, ImportError) as error:
        do = "install transformers 5.24, or load the model by fusible.from_pretrained"
        wanted, got = "a version with a place for the kernels of FP8 modules", f"{transformers.__version__} ({error})"
        raise NotServedError(expected(wanted, of="transformers", got=got, do=do)) from error
