"""Weights that are held in 8 bits: what is written to them goes by their recipe's scale, is seen by the next call, and is loaded as saved."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from weight_writes import WIDTH, ByData, each, other, weights

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.quantized import Float8Quantizer, Float8Tensor, QuantizedTensor, Recipe

WINDOW = 3
DELAYED = fusible.DelayedScaling(amax_history_len=WINDOW)
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Sequential": lambda: fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.GELU(), fusible.Linear(WIDTH, WIDTH)),
    "ops": lambda: ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH)),
}
LARGEST = 448.0


def made(kind: str, recipe: Recipe) -> Any:
    torch.manual_seed(0)
    with quantized_model_init(recipe=recipe):
        model = MODELS[kind]()
    assert all(isinstance(p, QuantizedTensor) for _, _, p in weights(model))
    return model


def step(model: nn.Module, recipe: Recipe, seed: int) -> list[Tensor]:
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    with fusible.autocast(recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # type: ignore[list-item]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_under_delayed_scaling_goes_by_the_scale_of_what_was_seen_before(kind: str) -> None:
    """``q = cast(w * scale)`` with ``scale = 448 / max`` of the amaxes of the last writes, of which the newest is seen by the next iteration; as in
    NVIDIA's package, but that the first scale is the initial weight's own and not 1."""
    model = made(kind, DELAYED)
    (_, _, p), *_ = weights(model)
    assert isinstance(p, Float8Tensor) and isinstance(p._quantizer, Float8Quantizer)
    assert p._quantizer.amax is not None
    seen = [p._quantizer.amax.item()]
    generator = torch.Generator().manual_seed(0)
    for i in range(8):
        step(model, DELAYED, i)
        wanted = torch.tensor([LARGEST]) / max(seen[-WINDOW:])
        assert torch.equal(p._quantizer.scale, wanted)
        values = torch.randn(p.shape, generator=generator) * 0.1 * 1.5 ** (i % 3)
        with torch.no_grad():
            p.copy_(values)
        assert torch.equal(p._scale_inv, 1 / wanted)
        codes = (values * wanted).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(p._data, codes)
        seen.append(values.abs().max().item())


@pytest.mark.parametrize("kind", MODELS)
def test_training_goes_on_from_a_state_dict_as_if_it_had_not_stopped(kind: str) -> None:
    def run(model: nn.Module, optimizer: Any, seeds: range) -> list[list[Tensor]]:
        results = []
        for seed in seeds:
            results.append(step(model, DELAYED, seed))
            optimizer.step()
        return results

    model = made(kind, DELAYED)
    optimizer = fusible.FusedAdam(model.parameters(), lr=0.02)
    run(model, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    wanted = run(model, optimizer, range(4, 9))
    torch.manual_seed(5)
    with quantized_model_init(recipe=DELAYED):
        fresh = MODELS[kind]()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh.load_state_dict(saved["model"])
    fresh_optimizer = fusible.FusedAdam(fresh.parameters(), lr=0.02)
    fresh_optimizer.load_state_dict(saved["optimizer"])
    assert all(map(same, wanted, run(fresh, fresh_optimizer, range(4, 9))))


def _buffers(p: nn.Parameter) -> dict[str, Tensor]:
    assert isinstance(p, QuantizedTensor)
    return {name: value for name, value in p.get_metadata().items() if isinstance(value, Tensor)}


def _by_bytes(p: nn.Parameter) -> None:
    for into, source in zip(_buffers(p).values(), _buffers(nn.Parameter(p._quantizer(other(p)))).values(), strict=True):  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        into.copy_(source)


def _by_numpy(p: nn.Parameter) -> None:
    for name, buffer in _buffers(p).items():
        if "data" in name:
            buffer.numpy()[::2] ^= 0x80


def _quantized(p: nn.Parameter) -> None:
    p.quantize_(other(p))  # type: ignore[operator]  # pyright: ignore[reportCallIssue]


def _no_grad(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def _rebound(p: nn.Parameter) -> None:
    p.data = p._quantizer(other(p))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def _replaced(model: nn.Module) -> None:
    for module, name, p in weights(model):
        setattr(module, name, nn.Parameter(p._quantizer(other(p))))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def _swapped(model: nn.Module) -> None:
    for _, _, p in weights(model):
        torch.utils.swap_tensors(p, nn.Parameter(p._quantizer(other(p))))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


def _stepped(kind: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module], None]:
    def write(model: nn.Module) -> None:
        found = [p for _, _, p in weights(model)]
        for p in found:
            p.grad = other(p)
        kind(found).step()

    return write


def _no_transpose(p: nn.Parameter) -> None:
    """Of a tensor that has both copies the other one goes, and what is there is written."""
    p.update_usage(rowwise_usage=True)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    _quantized(p)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "bytes": each(_by_bytes),
    "numpy": each(_by_numpy),
    "quantize_": each(_quantized),
    "copy_": each(lambda p: p.detach().copy_(other(p))),
    "data.copy_": each(lambda p: p.data.copy_(other(p))),
    "no_grad": each(_no_grad),
    "data =": each(_rebound),
    "usage": each(_no_transpose),
    "replaced": _replaced,
    "swap_tensors": _swapped,
    "SGD": _stepped(lambda p: torch.optim.SGD(p, 0.1)),
    "by data": _stepped(ByData),
    "FusedAdam": _stepped(lambda p: fusible.FusedAdam(p, lr=0.1)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("write", WRITES)
def test_the_next_call_computes_with_what_was_written(write: str, recipe: str) -> None:
    model = made("Sequential", RECIPES[recipe])
    for seed in range(3):
        before = step(model, RECIPES[recipe], 9 if seed == 2 else seed)
    WRITES[write](model)
    fresh = made("Sequential", RECIPES[recipe])
    fresh.load_state_dict(model.state_dict())
    found = step(model, RECIPES[recipe], 9)
    assert same(found, step(fresh, RECIPES[recipe], 9)) and not same(found, before)


@pytest.mark.parametrize("delayed", [True, False])
def test_a_quantizer_that_is_asked_for_has_the_scale_of_the_next_call(delayed: bool) -> None:
    recipe = DELAYED if delayed else fusible.Float8CurrentScaling()
    torch.manual_seed(0)
    model = ops.Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Linear(WIDTH, WIDTH))
    fuser = model._arranged()[0]
    asked = [(i, op, mode, q) for i, op in enumerate(fuser.basic_ops) for mode in ("forward", "backward") for q in range(op.num_quantizers(mode))]
    assert len(asked) == 6
    for seed in range(4):
        step(model, recipe, seed)
        shown = {}
        for i, op, mode, index in asked:
            quantizer = op.get_quantizer(mode, index)
            if not delayed:
                assert not isinstance(quantizer, Float8Quantizer)
                continue
            assert isinstance(quantizer, Float8Quantizer)
            shown[f"{i}.{op.quantized_names(mode)[index]}"] = quantizer.scale
        if delayed:
            coming = fuser.scaling.snapshot(recipe, torch.device("cpu")).scales
            assert shown.keys() == coming.keys() and all(torch.equal(shown[slot], coming[slot]) for slot in shown)
            assert all(scale.item() != 1 for scale in shown.values())
            next(iter(shown.values())).zero_()  # a copy: whoever writes to it changes nothing
            assert fuser.scaling.snapshot(recipe, torch.device("cpu")).scales["0.x"].item() != 0


BETWEEN: dict[str, Callable[[nn.Parameter], Any]] = {
    "no_grad": _no_grad,
    "data": lambda p: p.data.mul_(0.5),
    "quantize_": _quantized,
    "bytes": _by_bytes,
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("write", BETWEEN)
def test_a_backward_whose_weights_were_written_to_raises(write: str, recipe: str) -> None:
    """As torch's own does for what it has saved, though kernels that it knows nothing of have written."""
    model = made("Sequential", RECIPES[recipe])
    with fusible.autocast(recipe=RECIPES[recipe]):
        y = model(torch.randn(WIDTH, WIDTH, requires_grad=True))
    each(BETWEEN[write])(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_backward_inside_torch_compile_raises_too() -> None:
    torch._dynamo.reset()
    model = made("Sequential", DELAYED)
    for _, _, p in weights(model):
        p.requires_grad_(False)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with fusible.autocast(recipe=DELAYED):
        y = compiled(torch.randn(WIDTH, WIDTH, requires_grad=True))
    each(_quantized)(model)
    with pytest.raises(ArgumentError, match="parameters as they were"):
        y.sum().backward()
    torch._dynamo.reset()


PASSES: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "xla": lambda model: model.compile("xla"),  # type: ignore[attr-defined, no-any-return]
    "torch.compile": lambda model: torch.compile(model, backend="aot_eager"),
    "torch.compile of what is around": lambda model: torch.compile(lambda x: model(2 * x / 2), backend="aot_eager"),
    "module.compile": lambda model: [nn.Module.compile(model, backend="aot_eager"), model][1],
    "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "functional_call": lambda model: lambda x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "DataParallel of none": lambda model: nn.DataParallel(model),
    "in a module": lambda model: nn.Sequential(model, nn.Identity()),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of what goes from piece to piece
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("way", PASSES)
def test_whoever_runs_the_passes_the_weights_have_their_gradients(way: str, recipe: str, kind: str) -> None:
    """And those that are frozen have none, one of them or all, until they are no more."""
    if way == "xla":
        pytest.importorskip("jaxlib")
    torch._dynamo.reset()
    results = []
    for call in (lambda model: model, PASSES[way]):
        model = made(kind, RECIPES[recipe])
        run = call(model)
        for frozen in (0, 1, 2, 0):
            for i, (_, _, p) in enumerate(weights(model)):
                p.requires_grad_(i >= frozen)
            x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
            model.zero_grad()
            torch.manual_seed(0)
            with fusible.autocast(recipe=RECIPES[recipe]):
                y = run(x)
            y.square().sum().backward()
            assert all((p.grad is not None) is p.requires_grad for p in model.parameters()), (way, frozen)
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    for wanted, found in zip(results[:4], results[4:], strict=True):
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=(0.1 * a.abs().max().item()) if way == "xla" else 0)  # type: ignore[union-attr]
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_computes_with_the_weights_that_forward_quantized(recipe: str) -> None:
    """Weights in high precision may be written to before it: the 8-bit copies are kept for it."""
    found = []
    for write in (lambda p: None, _no_grad, lambda p: p.data.mul_(0.5), lambda p: p.detach().numpy().fill(1.0)):
        torch.manual_seed(0)
        model = MODELS["Sequential"]()
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        with fusible.autocast(recipe=RECIPES[recipe]):
            y = model(x)
        each(write)(model)
        torch.manual_seed(0)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(same(found[0], grads) for grads in found[1:])


def test_copies_of_an_operation_have_run_nowhere() -> None:
    model = ops.Sequential(ops.Linear(WIDTH, WIDTH))
    step(model, DELAYED, 0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (linear,) = [op for op in copied[0].basic_operations() if op.num_quantizers("forward") == 2]
        assert vars(linear)["_ran_in"] is None and linear.get_quantizer("forward", 0) is not None
