"""Until an iteration has observed a weight under delayed scaling, its scale is that of what is written to it, in any way: nothing is clipped."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fusible
from fusible.compat import te_modules
from fusible.pytorch import ops
from fusible.pytorch.optimizer_batches import requantized
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from fusible.tex import DType

WIDTH, ROWS = 32, 48
DELAYED = fusible.DelayedScaling(amax_history_len=3)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "te.Linear": lambda: te_modules.Linear(WIDTH, ROWS, bias=False, params_dtype=torch.bfloat16),
    "Sequential": lambda: fusible.Sequential(fusible.Linear(WIDTH, ROWS, bias=False)),
    "ops.Linear": lambda: ops.Linear(WIDTH, ROWS, bias=False),
}
SIZES = {"larger": 0.5, "smaller": 2.0**-12}
"""Standard deviations of what is written; that of the first values is about 0.1."""


def made(kind: str, seed: int = 0, recipe: fusible.DelayedScaling = DELAYED) -> nn.Module:
    torch.manual_seed(seed)
    with fusible.quantized_model_init(recipe=recipe):
        return MODELS[kind]()


def weight(model: nn.Module) -> Any:
    (found,) = model.parameters()
    assert isinstance(found, Float8Tensor) and isinstance(found._quantizer, Float8Quantizer)
    return found


def step(model: nn.Module, recipe: fusible.DelayedScaling = DELAYED) -> None:
    p = weight(model)
    with fusible.autocast(recipe=recipe):
        model(torch.ones(ROWS, WIDTH, dtype=p.dtype)).float().sum().backward()
    model.zero_grad()


def loaded(model: nn.Module, values: Tensor) -> None:
    (name,) = dict(model.named_parameters())
    model.load_state_dict({name: values}, strict=False)


def _read(model: nn.Module, values: Tensor) -> None:
    (name,) = dict(model.named_parameters())
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({name: values}, checkpoint_id=folder, no_dist=True)
        state = {name: model.state_dict()[name]}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state, strict=False)


def _to_vector(model: nn.Module, values: Tensor) -> None:
    vector = parameters_to_vector(model.parameters())
    vector_to_parameters(values.reshape(vector.shape), model.parameters())


def _averaged(average: Any) -> Callable[[nn.Module, Tensor], nn.Module]:
    """The average goes on from what the model was: all of it is replaced by the last values."""

    def write(model: nn.Module, values: Tensor) -> Any:
        averaged = AveragedModel(model, multi_avg_fn=average)
        averaged.update_parameters(model)
        averaged.n_averaged.zero_() if average is None else None
        with torch.no_grad():
            weight(model).copy_(values)
        averaged.update_parameters(model)
        return averaged.module

    return write


def _stepped(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module, Tensor], None]:
    def write(model: nn.Module, values: Tensor) -> None:
        p = weight(model)
        p.data.zero_()
        p.grad = -values
        kind(model.parameters(), lr=1.0, **options).step()
        p.grad = None

    return write


def _stepped_by_signs(model: nn.Module, values: Tensor) -> None:
    """Adam's first step is of the size of its rate: to +-1, and from there by ``copy_``."""
    p = weight(model)
    p.grad = torch.randn(p.shape).to(p.dtype)
    fusible.FusedAdam(model.parameters(), lr=1.0, eps=0).step()
    held = p.detach().dequantize().float()
    assert ((held.abs() - 1).abs() < 0.5).all() and held.abs().max() > 0.9
    p.grad = None
    p.data.copy_(values)


def _of_bytes(model: nn.Module, values: Tensor) -> None:
    source = copy.deepcopy(model)
    weight(source).data.copy_(values)
    model.load_state_dict(source.state_dict())


def _swapped(model: nn.Module, values: Tensor) -> None:
    p = weight(model)
    torch.utils.swap_tensors(p, nn.Parameter(p._quantizer(values)))


def _assigned(model: nn.Module, values: Tensor) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), assign=True)
    weight(model).data.copy_(values)


def _saved_whole(model: nn.Module, values: Tensor) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other: nn.Module = torch.load(file, weights_only=False)
    weight(other).data.copy_(values)
    return other


def _copied(model: nn.Module, values: Tensor) -> nn.Module:
    before = weight(model).detach().dequantize()
    other = copy.deepcopy(model)
    weight(other).data.copy_(values)
    assert torch.equal(weight(model).detach().dequantize(), before)
    return other


def _cloned(model: nn.Module, values: Tensor) -> None:
    """What is written to a clone is nothing to the weight."""
    p, clone = weight(model), weight(model).detach().clone()
    before = p._quantizer.scale.clone(), p._quantizer.amax.clone()
    clone.copy_(values)
    assert torch.equal(p._quantizer.scale, before[0]) and torch.equal(p._quantizer.amax, before[1])
    assert_fresh(clone, values)
    p.data.copy_(clone)


def _drawn(model: nn.Module, values: Tensor) -> None:
    torch.manual_seed(5)
    nn.init.normal_(weight(model), std=values.float().std().item())
    torch.manual_seed(5)
    values.copy_(torch.empty_like(values).normal_(0, values.float().std().item()))


def _evaluated(model: nn.Module, values: Tensor) -> None:
    """A call without gradients observes nothing."""
    with torch.no_grad(), fusible.autocast(recipe=DELAYED):
        model(torch.ones(ROWS, WIDTH, dtype=values.dtype))
    weight(model).data.copy_(values)


def _skipped(model: nn.Module, values: Tensor) -> None:
    """What is not written changes no scale."""
    p = weight(model)
    before = p._quantizer.scale.clone()
    p.quantize_(values * 2, noop_flag=torch.ones(1))
    assert torch.equal(p._quantizer.scale, before)
    p.quantize_(values, noop_flag=torch.zeros(1))


def _zeroed(model: nn.Module, values: Tensor) -> None:
    p = weight(model)
    before = p._quantizer.scale.clone()
    p.data.zero_()
    assert torch.equal(p._quantizer.scale, before) and not p.detach().dequantize().any()
    p.data.add_(values)


def each(write: Callable[[Any, Tensor], Any]) -> Callable[[nn.Module, Tensor], None]:
    def written(model: nn.Module, values: Tensor) -> None:
        with torch.no_grad():
            write(weight(model), values)

    return written


def _whole_slice(p: Any, values: Tensor) -> None:
    p.data[:] = values


def _all_data(p: Any, values: Tensor) -> None:
    p.data = values


WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "load_state_dict": loaded,
    "load_state_dict of bytes": _of_bytes,
    "dcp": _read,
    "copy_": each(lambda p, values: p.copy_(values)),
    "copy_ of float64": each(lambda p, values: p.copy_(values.double())),
    "data.copy_": each(lambda p, values: p.data.copy_(values)),
    "detach": each(lambda p, values: p.detach().copy_(values)),
    "data[:] =": each(_whole_slice),
    "data =": each(_all_data),
    "view": each(lambda p, values: p.view(2, -1, WIDTH).copy_(values.view(2, -1, WIDTH))),
    "quantize_": each(lambda p, values: p.quantize_(values)),
    "quantizer": each(lambda p, values: p._quantizer.quantize(values, out=p)),
    "update_quantized": each(lambda p, values: p._quantizer.update_quantized(values, p)),
    "lerp_": each(lambda p, values: p.lerp_(values, 1.0)),
    "sub_": each(lambda p, values: p.sub_(p.dequantize()).add_(values)),
    "foreach copy": each(lambda p, values: torch._foreach_copy_([p], [values])),
    "foreach lerp": each(lambda p, values: torch._foreach_lerp_([p], [values], 1.0)),
    "vector": _to_vector,
    "average": _averaged(None),
    "moving average": _averaged(get_ema_multi_avg_fn(0.0)),
    "SGD": _stepped(torch.optim.SGD, foreach=False),
    "SGD, foreach": _stepped(torch.optim.SGD, foreach=True),
    "FusedSGD": _stepped(fusible.FusedSGD),
    "FusedAdam": _stepped_by_signs,
    "swapped": _swapped,
    "assigned": _assigned,
    "saved whole": _saved_whole,
    "deepcopy": _copied,
    "clone": _cloned,
    "init": _drawn,
    "after a call": _evaluated,
    "noop": _skipped,
    "zeros": _zeroed,
}


def assert_fresh(p: Any, values: Tensor) -> None:
    """``p`` holds ``values`` as a quantization of them alone does: by 448 over the largest, which computing in the weight's type has rounded."""
    wanted = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)(values.to(p.dtype))
    rounded = 2 * torch.finfo(p.dtype).eps
    torch.testing.assert_close(p._scale_inv, wanted._scale_inv, rtol=rounded, atol=0)
    torch.testing.assert_close(p._quantizer.scale, 1 / wanted._scale_inv, rtol=rounded, atol=0)
    torch.testing.assert_close(p._quantizer.amax, values.float().abs().max().view(1), rtol=rounded, atol=0)
    held, exact = p.detach().dequantize().float(), values.float()
    bound = exact.abs() * (2**-4 + 2 * rounded) + wanted._scale_inv * 2.0**-10  # half a step of E4M3, normal or not
    assert ((held - exact).abs() <= bound).all(), (held - exact).abs().max()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_has_a_scale_of_its_own(way: str, kind: str, size: str) -> None:
    model = made(kind)
    p = weight(model)
    values = (torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * SIZES[size]).to(p.dtype)
    p = weight(WAYS[way](model, values) or model)
    assert_fresh(p, values)
    wanted = p.detach().dequantize()
    columns = p.storage_without_autograd()
    columns.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert torch.equal(columns.dequantize(), wanted)  # both copies


def test_a_step_that_is_not_finished_leaves_the_scale() -> None:
    p = weight(made("Sequential"))
    before = p._quantizer.scale.clone(), p._quantizer.amax.clone()
    writes = requantized(p, torch.randn(p.shape) * 8)
    assert torch.equal(p._quantizer.scale, before[0]) and torch.equal(p._quantizer.amax, before[1])
    for write in writes:
        write()
    assert p._quantizer.scale < before[0]


PARTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "rows": lambda p, values: [p.data.__setitem__(slice(i, i + 16), values[i : i + 16]) for i in range(0, ROWS, 16)],
    "columns": lambda p, values: [p.data.__setitem__((slice(None), slice(i, None, 2)), values[:, i::2]) for i in range(2)],
    "mask": lambda p, values: [p.data.__setitem__(mask, values[mask]) for mask in (values > 0, values <= 0)],
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", PARTS)
def test_what_is_written_in_parts_is_not_clipped(way: str, kind: str) -> None:
    p = weight(made(kind))
    values = (torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.5).to(p.dtype)
    PARTS[way](p, values)
    held, exact = p.detach().dequantize().float(), values.float()
    # By a power of two more than is needed at most, and rounded by two scales.
    assert ((held - exact).abs() <= exact.abs() * 2**-3 + exact.abs().max() / 448 * 2.0**-8).all()


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_the_first_scale_is_that_of_the_recipe_however_often_it_is_made(kind: str, margin: int) -> None:
    recipe = fusible.DelayedScaling(margin=margin)
    p = weight(made(kind, recipe=recipe))
    wanted = Float8CurrentScalingQuantizer(DType.kFloat8E4M3)
    for scale in (1, 30, 2**-6):
        values = (torch.randn(p.shape) * scale).to(p.dtype)
        p.data.copy_(values)
        assert torch.equal(p._scale_inv, wanted(values)._scale_inv * 2**margin)
        file = io.BytesIO()
        torch.save(p, file)
        file.seek(0)
        p = torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", MODELS)
def test_what_was_observed_rules_until_other_weights_are_loaded(kind: str) -> None:
    """What is copied to a weight that has been trained goes by its history, as in NVIDIA's package; a loaded one has none, nor has one whose states
    were reset."""
    model = made(kind)
    p = weight(model)
    step(model)
    largest = 448 / p._quantizer.scale.item()
    values = (torch.randn(p.shape) * 2).to(p.dtype)
    p.data.copy_(values)
    assert p.detach().dequantize().abs().max().item() == pytest.approx(largest, rel=0.01)
    step(model)  # which has seen the larger values
    p.data.copy_(values * 0.5)
    assert 448 / p._quantizer.scale.item() == pytest.approx(values.abs().max().item(), rel=0.01)
    loaded(model, values * 100)
    assert_fresh(p, values * 100)
    step(model)
    p.data.copy_(values * 1000)
    assert p.detach().dequantize().abs().max() < 110 * values.abs().max()
    reset = getattr(model, "reset_scaling_state", None)
    if reset is not None:
        reset()
        p.data.copy_(values * 1000)
        assert_fresh(p, values * 1000)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_began_on_meta_has_the_scale_of_what_it_is_given(kind: str) -> None:
    with torch.device("meta"), fusible.quantized_model_init(recipe=DELAYED):
        model = MODELS[kind]()
    if any(isinstance(p, Float8Tensor) for p in model.parameters()):
        model.to_empty(device="cpu")
    else:  # as a Linear of Transformer Engine does, which makes its weight when it is reset
        with fusible.quantized_model_init(recipe=DELAYED):
            for module in model.modules():
                getattr(module, "reset_parameters", lambda: None)()
    p = weight(model)
    values = (torch.randn(p.shape) * 0.5).to(p.dtype)
    loaded(model, values)
    assert_fresh(p, values)
    step(model)
    assert 448 / p._quantizer.scale.item() == pytest.approx(values.abs().max().item(), rel=0.01)


def test_an_average_of_a_trained_model_grows_with_it() -> None:
    """No iteration observes an average, so that no history could follow it."""
    model = made("Sequential")
    step(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    exact = weight(model).detach().dequantize()
    average.update_parameters(model)
    for _ in range(8):
        weight(model).data.mul_(1.5)
        step(model)
        weight(model).data.copy_(weight(model).detach().dequantize())
        average.update_parameters(model)
        exact = torch.lerp(exact, weight(model).detach().dequantize(), 0.5)
    held = weight(average.module).detach().dequantize()
    assert (held - exact).norm() < 0.1 * exact.norm()
