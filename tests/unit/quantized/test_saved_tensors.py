"""Quantized tensors in checkpoints: ``torch.save``, safetensors, and what is refused."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from fusible.errors import CheckpointError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    flatten_state_dict,
    from_plain,
    to_plain,
    unflatten_state_dict,
)
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3
MAKERS: dict[str, Callable[[], Quantizer]] = {
    "delayed": lambda: Float8Quantizer(torch.tensor([16.0]), torch.tensor([2.5]), DType.kFloat8E5M2),
    "current": lambda: Float8CurrentScalingQuantizer(E4M3, "cpu", force_pow_2_scales=True, amax_epsilon=0.25),
    "block-1d": lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1, columnwise=False),
    "block-2d": lambda: Float8BlockQuantizer(E4M3, force_pow_2_scales=False),
    "mxfp8": lambda: MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=False),
    "nvfp4-rows": lambda: NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False),
    "nvfp4-4over6": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"),
    "hybrid": lambda: HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(), columnwise_quantizer=IdentityQuantizer(dtype=torch.float32), columnwise_source="rowwise_dequantized"
    ),
    "identity": IdentityQuantizer,
}
EVERY = pytest.mark.parametrize("name", MAKERS)


def made(name: str) -> Any:
    return MAKERS[name]()(torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).bfloat16())


def check_same(ours: Any, theirs: Any) -> None:
    """The same class, bytes, options, and a quantizer of the same options with state of its own."""
    (mine, header), (other, wanted) = to_plain(ours), to_plain(theirs)
    assert type(ours) is type(theirs) and header == wanted and mine.keys() == other.keys() and ours.dtype is theirs.dtype
    assert all(torch.equal(tensor, other[key]) and tensor.dtype is other[key].dtype for key, tensor in mine.items())
    assert type(ours._quantizer) is type(theirs._quantizer) and ours._quantizer.get_usages() == theirs._quantizer.get_usages()
    x = torch.linspace(-3, 3, 96 * 64).view(96, 64).bfloat16()
    again, wanted_again = ours.clone().quantize_(x), theirs.clone().quantize_(x)
    assert torch.equal(again.dequantize(), wanted_again.dequantize())


def reloaded(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@EVERY
def test_torch_save_and_load_of_weights_only(name: str) -> None:
    q = made(name)
    found = reloaded({"w": q, "plain": torch.ones(2)})
    check_same(found["w"], q)
    assert not found["w"].requires_grad and found["w"]._quantizer is not q._quantizer
    parameter = reloaded(torch.nn.Parameter(q))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    check_same(parameter.detach(), q)
    check_same(pickle.loads(pickle.dumps(q)), q)


@EVERY
def test_safetensors(name: str, tmp_path: Path) -> None:
    state = {"layer.weight": made(name), "layer.bias": torch.arange(3.0)}
    tensors, metadata = flatten_state_dict(state)
    save_file(tensors, tmp_path / "x.safetensors", metadata={**metadata, "format": "pt"})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        read = file.metadata()
    found = unflatten_state_dict(load_file(tmp_path / "x.safetensors"), read)
    assert found.keys() == state.keys() and torch.equal(found["layer.bias"], state["layer.bias"])
    check_same(found["layer.weight"], state["layer.weight"])


@EVERY
def test_bare_storages_are_saved_likewise(name: str) -> None:
    bare = made(name).storage_without_autograd()
    tensors, header = to_plain(bare)
    again = from_plain(tensors, json.loads(json.dumps(header)))
    assert type(again) is type(bare) and not isinstance(again, torch.Tensor) and torch.equal(again.dequantize(), bare.dequantize())


def test_tensors_of_one_memory_are_saved_apart(tmp_path: Path) -> None:
    q = made("nvfp4-4over6")
    q._amax_columnwise = q._amax_rowwise
    q._rowwise_scale_inv = q._rowwise_scale_inv.t().contiguous().t()
    tensors, metadata = flatten_state_dict({"w": q})
    save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
    check_same(unflatten_state_dict(load_file(tmp_path / "x.safetensors"), metadata)["w"], q)


def test_the_state_of_delayed_scaling_comes_back_as_its_own() -> None:
    history = torch.tensor([[2.5, 7.0]])
    quantizer = Float8Quantizer(torch.tensor([16.0]), history[0, :1], E4M3)
    tensors, _ = to_plain(quantizer(torch.ones(2, 2)))
    assert tensors["quantizer.amax"].untyped_storage().nbytes() == 4  # not the history around it
    found = reloaded(quantizer(torch.ones(2, 2)))
    assert found._quantizer.amax.item() == 2.5 and found._quantizer.scale.item() == 16.0
    found.fill_(20.0)
    assert found._quantizer.amax.item() == 20.0 and history[0, 0].item() == 2.5


def test_an_amax_reduction_is_not_saved() -> None:
    q = Float8CurrentScalingQuantizer(E4M3)(torch.ones(4, 4))
    q._quantizer.with_amax_reduction, q._quantizer.amax_reduction_group = True, object()
    assert not reloaded(q)._quantizer.with_amax_reduction and reloaded(q)._quantizer.amax_reduction_group is None


class Doubled(IdentityQuantizer):
    """A user's quantizer."""


def test_what_cannot_be_told_is_refused() -> None:
    q, reason = Doubled()(torch.ones(2, 2)), "a quantized tensor to save: expected a quantizer of a registered class, got Doubled"
    with pytest.raises(CheckpointError, match=reason):
        torch.save(q, io.BytesIO())
    with pytest.raises(CheckpointError, match=reason):
        pickle.dumps(q)
    q = made("mxfp8")
    q.prepare_for_saving()
    with pytest.raises(CheckpointError, match="a MXFP8Tensor to save: expected data, got none"):
        to_plain(q)


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "another class": lambda tensors, header: header.update({"class": "Sequential"}),
    "a quantizer as the class": lambda tensors, header: header.update({"class": "MXFP8Quantizer"}),
    "a tensor as the quantizer": lambda tensors, header: header["quantizer"].update({"class": "MXFP8Tensor"}),
    "an unknown argument": lambda tensors, header: header["quantizer"]["arguments"].update({"evil": 1}),
    "an attribute": lambda tensors, header: header["quantizer"]["others"].update({"quantize": 1}),
    "a type that is none": lambda tensors, header: header.update({"dtype": {"dtype": "load"}}),
    "another shape": lambda tensors, header: header.update({"shape": [64, 96]}),
    "data of another type": lambda tensors, header: tensors.update({"rowwise_data": tensors["rowwise_data"].float()}),
    "data of another shape": lambda tensors, header: tensors.update({"columnwise_data": tensors["columnwise_data"][:32]}),
    "scales that are too few": lambda tensors, header: tensors.update({"rowwise_scale_inv": tensors["rowwise_scale_inv"][:96]}),
    "no scales": lambda tensors, header: tensors.pop("columnwise_scale_inv"),
    "no data": lambda tensors, header: tensors.clear(),
    "no options": lambda tensors, header: header.pop("options"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_was_altered_is_refused(change: str) -> None:
    tensors, header = to_plain(made("mxfp8"))
    header = json.loads(json.dumps(header))
    from_plain(tensors, header)
    CHANGES[change](tensors, header)
    with pytest.raises(CheckpointError, match=": expected "):
        from_plain(tensors, header)


def test_metadata_of_others_is_left_alone() -> None:
    tensors = {"w": torch.ones(2)}
    assert unflatten_state_dict(tensors, None) == tensors and unflatten_state_dict(tensors, {"format": "pt"}) == tensors
    flat, metadata = flatten_state_dict({"w": made("mxfp8")})
    with pytest.raises(CheckpointError, match="the metadata of w: expected JSON"):
        unflatten_state_dict(flat, {"w": metadata["w"][:-1]})


@EVERY
def test_safetensors_is_told_what_a_quantized_tensor_is(name: str, tmp_path: Path) -> None:
    """``save_file`` refuses what has no memory of its own; what is flattened is saved, and read as it was."""
    tensor = made(name)
    path = tmp_path / "model.safetensors"
    with pytest.raises(SafetensorError):
        save_file({"weight": tensor}, path)
    assert not path.exists()
    save_file({"weight": tensor.dequantize()}, path)
    assert torch.equal(load_file(path)["weight"], tensor.dequantize())
    flat, metadata = flatten_state_dict({"weight": tensor})
    save_file(flat, path, metadata=metadata)
    check_same(unflatten_state_dict(load_file(path), metadata)["weight"], tensor)
