"""Modules by NVIDIA's names among Fusible's own: in pipelines, copies, files and compiled programs."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import fusible
from fusible.compat import operations_to_nvidia, te_modules
from fusible.errors import CheckpointError, DTypeError
from fusible.pytorch import ops
from fusible.quantized import MXFP8Tensor

MODULES: dict[str, Any] = {
    "Linear": lambda: te_modules.Linear(64, 64),
    "Linear in parts": lambda: te_modules.Linear(64, 64, parameters_split=("a", "b")),
    "LayerNormLinear": lambda: te_modules.LayerNormLinear(64, 64, normalization="RMSNorm"),
    "LayerNormMLP": lambda: te_modules.LayerNormMLP(64, 96, activation="swiglu"),
}


def results(module: torch.nn.Module, recipe: fusible.Recipe | None, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients of the second of two calls."""
    for _ in range(2):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(leaf)
        y.square().sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(parameter.grad for parameter in module.parameters() if parameter.grad is not None)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_they_join_the_pipeline_of_a_sequential(name: str) -> None:
    module = MODULES[name]()
    model = fusible.Sequential(fusible.Linear(64, 64), module, fusible.GELU())
    assert len(model._pipelines()) == 1
    x = torch.randn(32, 64)
    apart = torch.nn.Sequential(*copy.deepcopy(list(model.children())))
    for found, wanted in zip(results(model, None, x), results(apart, None, x), strict=True):
        # fp32 sums of at most 96 products in another order.
        torch.testing.assert_close(found, wanted, rtol=0, atol=96 * 2.0**-23 * float(wanted.abs().max()))
    assert "MMT" in model.explain(x)


@pytest.mark.parametrize("recipe", [fusible.DelayedScaling(), fusible.MXFP8BlockScaling()], ids=["delayed", "mxfp8"])
@pytest.mark.parametrize("name", MODULES)
def test_copies_and_files_go_on_with_the_same_scales(name: str, recipe: fusible.Recipe) -> None:
    module, x = MODULES[name](), torch.randn(32, 64)
    results(module, recipe, x)
    copied = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = MODULES[name]()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    wanted = results(module, recipe, 3 * x)
    assert same(results(copied, recipe, 3 * x), wanted) and same(results(loaded, recipe, 3 * x), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch asks for itself after a break of the graph
@pytest.mark.parametrize("name", MODULES)
def test_torch_compile_takes_them(name: str) -> None:
    module, x = MODULES[name](), torch.randn(32, 64)
    compiled = torch.compile(module, backend="aot_eager", fullgraph="parts" not in name)
    assert same(results(compiled, None, x), results(module, None, x))  # type: ignore[arg-type]


def test_weights_are_made_quantized() -> None:
    with fusible.quantized_model_init(recipe=fusible.MXFP8BlockScaling()):
        module = te_modules.LayerNormMLP(64, 96)
        with pytest.raises(NotImplementedError, match="Linear within quantized_model_init: expected one weight"):
            te_modules.Linear(64, 64, parameters_split=("a", "b"))
    assert isinstance(module.fc1_weight, MXFP8Tensor) and isinstance(module.fc2_weight, MXFP8Tensor)
    y, *grads = results(module, fusible.MXFP8BlockScaling(), torch.randn(32, 64))
    assert y.isfinite().all() and all(grad.count_nonzero() for grad in grads)
    assert not [name for name in module.state_dict() if "scaling" in name]


def test_gradients_are_summed_up_where_the_weight_says() -> None:
    module = te_modules.Linear(64, 32, fuse_wgrad_accumulation=True)
    module.weight.main_grad = torch.ones(32, 64)
    x = torch.randn(8, 64)
    module(x).sum().backward()
    assert module.weight.grad is None
    torch.testing.assert_close(module.weight.main_grad, 1 + x.sum(0).expand(32, 64), rtol=0, atol=16 * 2.0**-23 * float(x.abs().sum(0).max()))


def _bytes(state: dict[str, Any]) -> dict[str, bytes]:
    return {name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, value in state.items() if value is not None}


STATES: dict[str, Any] = {
    **{name: (make, torch.nn.Module.state_dict) for name, make in MODULES.items()},
    "GroupedLinear": (lambda: te_modules.GroupedLinear(2, 64, 64), torch.nn.Module.state_dict),
    "Sequential": (lambda: fusible.Sequential(fusible.Linear(64, 64)), torch.nn.Module.state_dict),
    "operations": (lambda: ops.Sequential(ops.Linear(64, 64)), operations_to_nvidia),
}


@pytest.mark.parametrize("name", STATES)
def test_equal_states_are_saved_as_equal_bytes(name: str) -> None:
    """Wherever in memory they lie, and in a copy too: nothing of an address is in them."""
    make, state_of = STATES[name]
    module, x = make(), torch.randn(32, 64)
    for _ in range(2):
        with fusible.autocast(recipe=fusible.DelayedScaling(amax_history_len=4)):
            module(x, *([[16, 16]] if name == "GroupedLinear" else [])).square().sum().backward()
    first = state_of(module)
    second = state_of(module)  # while the first is there, so that its memory is not taken again
    third = state_of(copy.deepcopy(module))
    assert any(name.endswith(("_extra_state", "scaling_state.0")) and value.numel() for name, value in first.items())
    assert _bytes(first) == _bytes(second) == _bytes(third)


@pytest.mark.parametrize("splits", [torch.tensor([16.9, 15.1]), torch.tensor([True, True]), torch.tensor([16, 16], dtype=torch.complex64)], ids=str)
def test_rows_of_groups_are_whole_numbers(splits: torch.Tensor) -> None:
    module = te_modules.GroupedLinear(2, 64, 64)
    got = str(splits.dtype)
    with pytest.raises(DTypeError, match=rf"^m_splits of GroupedLinear: expected a tensor of integers, got {got}; pass whole numbers of rows\.$"):
        module(torch.randn(32, 64), splits)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        module(torch.randn(32, 64), torch.tensor([16, 16], dtype=dtype))


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_normalization_computes_in_the_precision_of_its_weight(kind: str, given: torch.dtype, params: torch.dtype) -> None:
    """As in NVIDIA's package; the gradient of the input is in the input's. Under ``torch.autocast`` that decides."""
    module = getattr(te_modules, kind)(64, params_dtype=params, device="cpu")
    x = torch.randn(8, 64, dtype=given, requires_grad=True)
    y, wanted = module(x), module(x.detach().to(params))
    assert y.dtype is params and torch.equal(y, wanted)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype is given
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype is torch.bfloat16


REPLACED: dict[str, Any] = {
    "assigned": lambda module, name, value: setattr(module, name, torch.nn.Parameter(value)),
    "registered": lambda module, name, value: module.register_parameter(name, torch.nn.Parameter(value)),
    "loaded": lambda module, name, value: module.load_state_dict({**module.state_dict(), name: value}, assign=True),
    "converted": lambda module, name, value: module.to(value.dtype),
}


@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize("name", MODULES)
def test_a_parameter_of_another_dtype_is_noticed_after_a_call(name: str, way: str) -> None:
    """As before the first call."""
    module, x = MODULES[name](), torch.randn(16, 64)
    module(x)
    parameter = next(key for key, value in module.named_parameters() if value.dim() == 2)
    REPLACED[way](module, parameter, getattr(module, parameter).detach().bfloat16())
    with pytest.raises(DTypeError, match="outside of torch.autocast: expected torch.bfloat16, got torch.float32"):
        module(x)


@pytest.mark.parametrize("name", MODULES)
def test_a_missing_state_has_the_name_that_a_file_gives_it(name: str) -> None:
    module = MODULES[name]()
    fresh = module.state_dict()
    with fusible.autocast(recipe=fusible.DelayedScaling()):
        module(torch.randn(16, 64)).sum().backward()
    with pytest.raises(CheckpointError, match="expected its scaling state, got one without '_extra_state'"):
        module.load_state_dict(fresh)
    assert module.load_state_dict(fresh, strict=False).missing_keys == ["_extra_state"]
    around = torch.nn.Sequential(module)
    assert around.load_state_dict({f"0.{key}": value for key, value in fresh.items()}, strict=False).missing_keys == ["0._extra_state"]
