"""Every scheme of checkpoints: what is read has the values that its formula gives in float64, and what is written again is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_checkpoints import CASES, stored_in, write

import fusible
from fusible.models.checkpoints import SCHEMES, open_checkpoint, write_checkpoint
from fusible.models.checkpoints.layouts import PackedNVFloat4
from fusible.quantized import QuantizedTensor


@pytest.fixture(params=[1, 2], ids=["one file", "two files"])
def shards(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_formula(name: str, shards: int, tmp_path: Path) -> None:
    """An element times its scales is rounded to fp32 once, or twice where there are two scales, and one of these was rounded: 3 halves of an ulp."""
    case = CASES[name]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model", shards))
    plain = {each for each, tensor in case.stored.items() if each in checkpoint.plain and each not in case.scales}
    assert set(checkpoint.names) == plain | set(case.values) and checkpoint.activation_scales == tuple(
        sorted(case.scales, key=list(checkpoint).index)
    )
    assert set(case.scales) == set(checkpoint.activation_scales) and len(checkpoint) == len(plain) + len(case.values) + len(case.scales)
    for each in plain | set(case.scales):
        assert torch.equal(checkpoint.tensor(each), case.stored[each]) and checkpoint.tensor(each).dtype is case.stored[each].dtype
    for each, values in case.values.items():
        tensor = checkpoint[each]
        assert isinstance(tensor, QuantizedTensor) and tuple(tensor.shape) == checkpoint.shape(each) == values.shape
        found = tensor.dequantize(dtype=torch.float32).to(torch.float64).numpy()
        assert np.count_nonzero(values) > values.size // 2
        np.testing.assert_allclose(found, values, rtol=1.5 * 2**-23, atol=2**-149)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_again_is_the_same_to_the_bit(name: str, shards: int, tmp_path: Path) -> None:
    case = CASES[name]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model", shards))
    write_checkpoint(tmp_path / "again", checkpoint.config, checkpoint, shard_size=10_000 if shards > 1 else 10**9)
    found = stored_in(tmp_path / "again")
    assert set(found) == set(case.stored)
    for each, tensor in case.stored.items():
        assert found[each].dtype is tensor.dtype and found[each].shape == tensor.shape, each
        assert torch.equal(found[each].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), each
    again = open_checkpoint(tmp_path / "again")
    assert again.quantization is checkpoint.quantization and again.weights.keys() == checkpoint.weights.keys()
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > shards - 1


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_without_the_checkpoint_that_it_was_read_from_values_are_kept(name: str, tmp_path: Path) -> None:
    """Scales come in the types and shapes that the scheme writes; the elements and the values are the same."""
    case = CASES[name]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model"))
    config = {**checkpoint.config, "quantization_config": checkpoint.quantization_config}
    write_checkpoint(tmp_path / "again", config, dict(checkpoint))
    again = open_checkpoint(tmp_path / "again")
    assert set(again) == set(checkpoint)
    for each in case.values:
        one, other = (of[each].dequantize(dtype=torch.float32) for of in (checkpoint, again))
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_elements_are_not_copied(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model"))
    held = []
    for each in case.values:
        for _ in range(2):
            held.append(checkpoint[each])
            data = next(tensor for tensor in held[-1].get_data_tensors() if tensor is not None)
            assert data.data_ptr() == checkpoint.parts(each)[checkpoint.weights[each].layout.suffixes[0]].data_ptr()


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_modules_compute_with_what_is_read(name: str, tmp_path: Path) -> None:
    """A linear layer takes each weight as it is. Values of fp32, and their products, are rounded to it, and sums have a term for each column."""
    case = CASES[name]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model"))
    for each, values in case.values.items():
        if values.ndim > 2:
            continue
        rows, columns = values.shape
        layer = fusible.Linear(columns, rows)
        layer.weight = torch.nn.Parameter(checkpoint[each], requires_grad=False)
        x = torch.randn(3, columns, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            y = layer(x).double().numpy() - layer.bias.double().detach().numpy()
        wanted = x.double().numpy() @ values.T
        terms = np.abs(x.double().numpy()) @ np.abs(values.T)
        assert bool((np.abs(y - wanted) <= (columns + 4) * 2.0**-24 * (terms + np.abs(layer.bias.double().detach().numpy()))).all())


@pytest.mark.parametrize("least", [1, 100, 30_000])
def test_files_are_mapped_in_parts(least: int, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is there while a tensor of it is: what was read of it is what the file has, whatever was dropped meanwhile."""
    monkeypatch.setattr("fusible.models.checkpoints.shards._LEAST_PART", least)
    monkeypatch.setattr("fusible.models.checkpoints.shards._PARTS", 10**9)
    case = CASES["plain"]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model", shards))
    for each in (*case.stored, *reversed(case.stored)):
        held = checkpoint[each]
        assert torch.equal(held, case.stored[each])
        assert len(checkpoint.shards._mapped) == 1
    held = dict(checkpoint)
    assert all(torch.equal(held[each], case.stored[each]) for each in case.stored)
    assert len(checkpoint.shards._mapped) == {1: 4, 100: 4 if shards == 2 else 3, 30_000: shards}[least]
    held.clear()
    assert not checkpoint.shards._mapped


def test_what_is_written_to_a_tensor_stays_in_the_process(tmp_path: Path) -> None:
    case = CASES["plain"]()
    folder = write(case, tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    open_checkpoint(folder)["model.norm.weight"].zero_()
    assert (folder / "model.safetensors").read_bytes() == before
    assert torch.equal(open_checkpoint(folder)["model.norm.weight"], case.stored["model.norm.weight"])


def test_static_scales_are_found_by_their_weights(tmp_path: Path) -> None:
    case = CASES["modelopt, nvfp4"]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model"))
    found = checkpoint.activation_scale("model.layers.0.self_attn.q_proj.weight")
    assert found is not None and torch.equal(found, case.stored["model.layers.0.self_attn.q_proj.input_scale"])
    assert checkpoint.activation_scale("lm_head.weight") is None


def test_changed_scales_are_written_as_they_are_now(tmp_path: Path) -> None:
    """Those of the checkpoint that was read are taken where a tensor still has them, and there alone."""
    case = CASES["deepseek"]()
    checkpoint = open_checkpoint(write(case, tmp_path / "model"))
    name = next(iter(case.values))
    changed = {each: checkpoint[each] for each in checkpoint}
    changed[name]._rowwise_scale_inv = changed[name]._rowwise_scale_inv * 2
    write_checkpoint(tmp_path / "again", checkpoint.config, changed, like=checkpoint)
    found = open_checkpoint(tmp_path / "again")[name].dequantize(dtype=torch.float32)
    assert torch.equal(found, checkpoint[name].dequantize(dtype=torch.float32) * 2)


@pytest.mark.parametrize("inverse", [False, True])
@given(bits=st.integers(0x1000, 0x6F7F))
def test_an_amax_of_bf16_comes_back(bits: int, inverse: bool) -> None:
    layout = PackedNVFloat4("", "_scale", "_scale_2", inverse)
    amax = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16).float()
    assert torch.equal(layout._amax(layout._whole(amax)), amax)


@pytest.mark.parametrize("inverse", [False, True])
@given(bits=st.integers(0x20000000, 0x5F000000))
def test_any_scale_of_a_tensor_is_met_within_an_ulp(bits: int, inverse: bool) -> None:
    layout = PackedNVFloat4("", "_scale", "_scale_2", inverse)
    whole = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert abs(float(layout._whole(layout._amax(whole)).double() / whole.double()) - 1) < 2**-22


def test_every_scheme_has_a_case(tmp_path: Path) -> None:
    """Fusible's own is in a file of its own."""
    found = {open_checkpoint(write(make(), tmp_path / str(place))).quantization for place, make in enumerate(CASES.values())}
    assert found == {None, *SCHEMES} - {scheme for scheme in SCHEMES if scheme.name == "Fusible"}
