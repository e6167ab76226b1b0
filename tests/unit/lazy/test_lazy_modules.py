"""Modules: which attributes are parameters, what may be assigned and loaded, and what an error names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fusible.lazy as tp
from fusible.errors import ArgumentError, CheckpointError, DTypeError, ShapeError


class Net(tp.Module):
    """Parameters and children in every place where they are looked for."""

    def __init__(self) -> None:
        self.scale = tp.Tensor([2.0])
        self.blocks = [tp.Linear(2, 3), tp.Linear(3, 2)]
        self.heads = {"a": tp.Sequential(tp.LayerNorm(2), tp.tanh), "b": [tp.Tensor(1)], 7: tp.zeros((1,))}
        self.sizes = [2, 3]
        self.pair = (tp.Tensor([0.0]), tp.Linear(1, 1))
        self.label = "net"

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) * self.scale


NAMES = [
    "scale",
    "heads.b.0",
    "heads.7",
    "blocks.0.weight",
    "blocks.0.bias",
    "blocks.1.weight",
    "blocks.1.bias",
    "heads.a.0.weight",
    "heads.a.0.bias",
]


def values_of(module: tp.Module) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(t.shape).astype(t.dtype.numpy) for name, t in module.state_dict().items()}


def test_parameters_and_children_are_found_in_attributes_lists_and_dicts() -> None:
    net = Net()
    assert list(net.state_dict()) == NAMES
    assert [name for name, _ in net.named_parameters()] == ["scale", "heads.b.0", "heads.7"]
    assert [name for name, _ in net.named_children()] == ["blocks.0", "blocks.1", "heads.a"]
    assert net.state_dict()["scale"] is net.scale
    assert dict(net.named_children())["blocks.1"] is net.blocks[1]


def test_loading_gives_every_parameter_its_value() -> None:
    net = Net()
    values = values_of(net)
    assert net.load_state_dict(values) == (set(), set())
    for name, loaded in net.state_dict().items():
        np.testing.assert_array_equal(loaded.numpy(), values[name])
    assert net.heads["b"][0].numpy() == values["heads.b.0"]
    again = Net()
    again.load_from_state_dict(net.state_dict())
    x = tp.Tensor([[1.0, -2.0]])
    assert again.blocks[0].weight is net.blocks[0].weight
    np.testing.assert_array_equal(again(x).numpy(), net(x).numpy())


def test_the_state_of_torchs_modules_is_shared_not_copied() -> None:
    theirs = torch.nn.Linear(64, 64)
    ours = tp.Linear(64, 64)
    ours.load_state_dict({name: t.detach() for name, t in theirs.state_dict().items()})
    assert ours.weight.numpy().__array_interface__["data"][0] == theirs.weight.data_ptr()


def test_without_strict_names_that_do_not_match_are_returned() -> None:
    linear = tp.Linear(2, 3)
    done = linear.load_state_dict({"weight": np.ones((3, 2), np.float32), "other": np.ones(1)}, strict=False)
    assert done.missing_keys == {"bias"} and done.unexpected_keys == {"other"}
    assert linear.weight.numpy().sum() == 6 and isinstance(linear.bias, tp.DefaultParameter)


_GOOD = {"weight": np.ones((3, 2), np.float32), "bias": np.ones(3, np.float32)}
_BAD: list[tuple[type[Exception], dict[str, Any], str]] = [
    (CheckpointError, {"weight": _GOOD["weight"]}, "a state dict for Linear: expected every parameter and no other, got missing: bias; "),
    (CheckpointError, {**_GOOD, "gain": np.ones(1), "b": np.ones(1)}, "got unexpected: b, gain; load the state dict of the same architecture"),
    (ShapeError, {**_GOOD, "bias": np.ones(2, np.float32)}, "the parameter 'bias' of Linear: expected float32 [3], got float32 [2]"),
    (DTypeError, {**_GOOD, "bias": np.ones(3, np.int32)}, "the parameter 'bias' of Linear: expected float32 [3], got int32 [3]"),
    (tp.UninitializedError, {**_GOOD, "bias": tp.DefaultParameter((3,), tp.float32)}, "a parameter: expected a value, got none"),
    (ArgumentError, {**_GOOD, "bias": "text"}, "expected numbers, lists of numbers"),
    (ArgumentError, {**_GOOD, "bias": torch.nn.Parameter(torch.ones(3))}, "detach it or copy it to the host first"),
]


@pytest.mark.parametrize("case", range(len(_BAD)))
def test_a_state_dict_that_does_not_fit_changes_nothing(case: int) -> None:
    kind, state, sentence = _BAD[case]
    linear = tp.Linear(2, 3)
    linear.load_state_dict({"weight": np.zeros((3, 2), np.float32), "bias": np.zeros(3, np.float32)})
    with pytest.raises(kind) as caught:
        linear.load_state_dict(state)
    assert str(caught.value).startswith(f"{__file__}:") and sentence in str(caught.value)
    assert not linear.weight.numpy().any() and linear.bias is not None and not linear.bias.numpy().any()


def test_a_parameter_keeps_its_shape_and_dtype() -> None:
    net = Net()
    linear = net.blocks[0]
    with pytest.raises(ShapeError, match=r"the parameter 'weight' of Linear: expected float32 \[3, 2\], got float32 \[2, 3\]"):
        linear.weight = tp.ones((2, 3))
    with pytest.raises(DTypeError, match=r"'weight' of Linear: expected .*, got float16 \[3, 2\]"):
        linear.weight = tp.ones((3, 2), tp.float16)
    with pytest.raises(DTypeError, match=r"the parameter 'weight' of Linear: expected a lazy tensor, got ndarray; wrap"):
        linear.weight = np.ones((3, 2), np.float32)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(linear.weight, tp.DefaultParameter)
    linear.weight = tp.ones((3, 2))
    with pytest.raises(ShapeError, match="'weight' of Linear"):
        linear.weight = tp.ones((2, 3))
    with pytest.raises(DTypeError, match="'weight' of Linear"):
        linear.weight = None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ShapeError, match="'scale' of Net"):
        net.scale = tp.ones((2,))
    assert linear.weight.numpy().all() and net.scale.tolist() == [2.0]
    del net.scale
    net.scale = tp.ones((2,))
    linear.weight = tp.DefaultParameter((1, 1), tp.float32)
    linear.weight = tp.ones((1, 1))


def test_a_plain_tensor_may_give_way_to_something_else() -> None:
    net = Net()
    net.scale = None  # pyright: ignore[reportAttributeAccessIssue]
    assert "scale" not in net.state_dict()


def test_using_a_parameter_without_a_value_names_it_as_the_state_dict_does() -> None:
    net = Net()
    x = tp.Tensor([[1.0, 2.0]])
    with pytest.raises(tp.UninitializedError) as caught:
        net(x)
    lines = str(caught.value).split("\n")
    assert lines[0].startswith(f"{__file__}:") and lines[0].endswith("in Net.forward") and lines[1].strip() == "x = block(x)"
    sentence = "got none, only its type float32 [3, 2]; load it by load_state_dict, or assign a tensor."
    assert lines[3] == f"the parameter 'blocks.0.weight' of Net: expected a value, {sentence}"
    weight = net.blocks[0].weight
    uses: list[Callable[[], Any]] = [
        lambda: weight + 1.0,
        lambda: tp.ones((1, 3)) @ weight,
        lambda: weight.numpy(),
        lambda: weight.eval(),
        lambda: weight.tanh(),
        lambda: float(weight.sum()),
        lambda: weight.assign_(tp.ones((3, 2))),
        lambda: torch.from_dlpack(weight),
    ]
    for use in uses:
        with pytest.raises(tp.UninitializedError, match=r"the parameter 'weight' of Linear: expected .*, got none"):
            use()


def test_what_is_known_of_a_parameter_without_a_value() -> None:
    weight = tp.Linear(2, 3, dtype=tp.bfloat16).weight
    assert (weight.shape, weight.dtype, weight.ndim, weight.rank, weight.size, weight.name) == ((3, 2), tp.bfloat16, 2, 2, 6, None)
    assert repr(weight) == "DefaultParameter(shape=(3, 2), dtype=bfloat16)"
    with pytest.raises(DTypeError):
        tp.DefaultParameter((2,), "float32")  # pyright: ignore[reportArgumentType]


def test_a_copy_of_a_module_has_parameters_of_its_own() -> None:
    net = Net()
    other = copy.deepcopy(net)
    assert list(other.state_dict()) == NAMES and other.blocks[0].weight is not net.blocks[0].weight
    other.load_state_dict(values_of(net))
    assert isinstance(net.blocks[0].weight, tp.DefaultParameter)
    third = copy.deepcopy(other)
    third.blocks[0].weight = tp.zeros((3, 2))
    assert other.blocks[0].weight.numpy().any() and third.blocks[1].weight.tolist() == other.blocks[1].weight.tolist()
    with pytest.raises(ShapeError):
        third.blocks[0].weight = tp.zeros((2, 2))
    with pytest.raises(tp.UninitializedError, match="'weight' of Linear"):
        copy.copy(net.blocks[0].weight).eval()


def test_dummy_values_are_ones_and_leave_what_is_there() -> None:
    net = Net()
    net.blocks[0].bias = tp.Tensor([5.0, 6.0, 7.0])
    quantized = tp.Linear(2, 2, quant_dtype=tp.int8)
    net.last = quantized  # pyright: ignore[reportAttributeAccessIssue]
    net.initialize_dummy_parameters()
    assert net.blocks[0].weight.tolist() == [[1, 1]] * 3 and net.blocks[0].bias.tolist() == [5, 6, 7] and net.scale.tolist() == [2.0]
    assert isinstance(quantized.input_scale, tp.DefaultParameter) and quantized.weight_scale is not None and quantized.weight_scale.item() == 1
    assert quantized(tp.Tensor([[3.0, 4.0]])).tolist() == [[8.0, 8.0]]


def test_an_optional_parameter_is_not_missed_and_can_be_taken_back() -> None:
    linear = tp.Linear(1, 1, False, quant_dtype=tp.int8)
    assert linear.load_state_dict({"weight": np.ones((1, 1), np.float32), "weight_scale": np.float32(0.5)}) == (set(), set())
    x = tp.Tensor([0.6])
    assert linear(x).tolist() == x.tolist()
    linear.input_scale = tp.Tensor(0.5)
    assert linear(x).tolist() == [0.5]
    linear.input_scale = None
    assert linear(x).tolist() == x.tolist()
    with pytest.raises(ShapeError, match=r"the parameter 'weight_scale' of Linear: expected float32 \[\] or float32 \[any, 1\]"):
        linear.weight_scale = tp.ones((1,))
    plain = tp.Linear(1, 1)
    assert plain.weight_scale is None and plain.input_scale is None and list(plain.state_dict()) == ["weight", "bias"]


def test_sequential_is_a_sequence_with_names() -> None:
    first, second = tp.Linear(2, 3, False), tp.Linear(3, 1, False)
    by_position, by_name = tp.Sequential(first, tp.tanh, second), tp.Sequential({"up": first, "f": tp.tanh, "down": second})
    assert list(by_position.state_dict()) == ["0.weight", "2.weight"] and list(by_name.state_dict()) == ["up.weight", "down.weight"]
    assert len(by_name) == 3 and list(by_name) == [first, tp.tanh, second]
    assert by_name[-1] is by_name["down"] is by_position["2"] is second and by_position[1] is tp.tanh
    by_name.initialize_dummy_parameters()
    x = tp.Tensor([[0.5, 0.25]])
    np.testing.assert_array_equal(by_name(x).numpy(), by_position(x).numpy())
    np.testing.assert_allclose(by_name(x).item(), 3 * np.tanh(0.75), rtol=1e-6)
    assert tp.Sequential()(x) is x and len(tp.Sequential()) == 0


def filled(module: tp.Module) -> tp.Module:
    module.initialize_dummy_parameters()
    return module


REFUSED: list[tuple[type[Exception], Callable[[], Any], str]] = [
    (ArgumentError, lambda: tp.Sequential(tp.tanh)[1], "a Sequential of 1 modules: expected a position from -1 to 0 or one of 0, got 1"),
    (ArgumentError, lambda: tp.Sequential({"a": tp.tanh})["b"], "got 'b'"),
    (DTypeError, lambda: tp.Sequential(tp.tanh, 3), "got '1': int"),  # pyright: ignore[reportArgumentType]
    (ShapeError, lambda: tp.Linear(2, 3)(tp.ones((2, 3))), "the input of Linear: expected shape [..., 2], got float32 [2, 3]"),
    (ShapeError, lambda: tp.Linear(2, 3)(tp.ones(())), "the input of Linear"),
    (DTypeError, lambda: tp.Linear(2, 3)(tp.ones((2, 2), tp.float16)), "the input of Linear: expected dtype float32, got float16"),
    (DTypeError, lambda: tp.Linear(2, 3)(np.ones((2, 2))), "the input of Linear: expected a lazy tensor, got ndarray"),
    (DTypeError, lambda: tp.Linear(2, 3, dtype=tp.int8), "dtype of Linear, got int8"),
    (DTypeError, lambda: tp.Linear(2, 3, quant_dtype=tp.int32), "quant_dtype of Linear, got int32"),
    (ArgumentError, lambda: tp.Linear(2, 3, weight_quant_dim=0), "weight_quant_dim of Linear: expected None, got 0; pass a quant_dtype"),
    (ArgumentError, lambda: tp.Linear(2, 3, quant_dtype=tp.int8, weight_quant_dim=2), "weight_quant_dim: expected 0, 1 or None"),
    (ShapeError, lambda: tp.LayerNorm((2, 3))(tp.ones((3, 2))), "the input of LayerNorm: expected shape [..., 2, 3]"),
    (ArgumentError, lambda: tp.GroupNorm(4, 6), "num_groups of GroupNorm: expected a divisor of 6, got 4"),
    (ShapeError, lambda: tp.GroupNorm(2, 6)(tp.ones((1, 4, 2))), "the input of GroupNorm: expected shape [N, 6, ...]"),
    (ShapeError, lambda: tp.InstanceNorm(3)(tp.ones((2, 3))), "the input of InstanceNorm: expected at least 3 dimensions"),
    (ShapeError, lambda: tp.BatchNorm(3)(tp.ones((3,))), "the input of BatchNorm"),
    (DTypeError, lambda: filled(tp.Embedding(3, 2))(tp.ones((3,))), "a dtype among int32, int64, uint32 of index of gather"),
    (ShapeError, lambda: tp.Conv(3, 2, (1, 1))(tp.ones((1, 3, 4))), "the input of Conv: expected shape [N, 3, D0, D1]"),
    (ArgumentError, lambda: tp.Conv(3, 2, (1, 1), groups=2), "groups of Conv: expected a divisor of 3 and 2, got 2"),
    (ArgumentError, lambda: tp.Conv(2, 2, (1, 1), stride=(1,)), "stride of Conv"),
    (ArgumentError, lambda: tp.ConvTranspose(2, 2, (1, 1), padding=(1, 1)), "padding of ConvTranspose"),  # pyright: ignore[reportArgumentType]
    (NotImplementedError, lambda: tp.Module()(1), "the module Module: expected a method forward"),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_does_not_fit_a_module_is_refused_when_recorded(case: int) -> None:
    kind, record, sentence = REFUSED[case]
    with pytest.raises(kind) as caught:
        record()
    assert sentence in str(caught.value)
    if kind is not NotImplementedError:
        assert str(caught.value).startswith(f"{__file__}:")


def test_a_module_prints_its_parameters_and_children() -> None:
    net = tp.Sequential({"up": tp.Linear(2, 3, False), "f": tp.tanh, "norm": tp.LayerNorm(3)})
    net["up"].weight = tp.ones((3, 2))  # pyright: ignore[reportFunctionMemberAccess]
    assert repr(net) == (
        "Sequential(\n"
        "    up: Linear(\n"
        "        weight: float32 [3, 2]\n"
        "    )\n"
        "    norm: LayerNorm(\n"
        "        weight: float32 [3], no value\n"
        "        bias: float32 [3], no value\n"
        "    )\n"
        ")"
    )
    assert repr(tp.Sequential(tp.tanh)) == "Sequential()"


def test_a_module_has_the_signature_of_its_forward() -> None:
    assert list(inspect.signature(tp.Linear(2, 3)).parameters) == ["x"]
    assert list(inspect.signature(tp.Linear).parameters)[:3] == ["in_features", "out_features", "bias"]
