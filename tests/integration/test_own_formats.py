"""Block formats of a user's own, whatever their lengths and types: beside those of the package, in products, passes and files."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import own_formats
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusible
from fusible import quantized
from fusible.errors import ArgumentError, NotServedError
from fusible.pytorch import ops
from fusible.tex import DType
from fusible.tex.formats import Scheme
from fusible.tex.formats.format import _FORMATS_BY_NAME, _SCHEMES_BY_NAME

Makes = Callable[[], Any]

EIGHT = DType.kFloat8E4M3
FORMATS: dict[str, tuple[Makes, int]] = {
    "mxfp8": (lambda: quantized.MXFP8Quantizer(EIGHT), 32),
    "nvfp4": (quantized.NVFP4Quantizer, 16),
    "own of 48": (own_formats.quantizer_class("Own48", 48), 48),
}
"""What quantizes, and the number of elements in a block, which has to be whole."""
BYTES = own_formats.quantizer_class("OwnBytes24", 24, DType.kByte)
OF_SCALES = {name: own_formats.quantizer_class(f"OwnScales{name}", 16, EIGHT, scale) for name, scale in own_formats.SCALES.items()}


def recipe_of(**makes: Makes) -> fusible.CustomRecipe:
    """A recipe of a quantizer for each ``tensor_type``."""
    return fusible.CustomRecipe(qfactory=lambda role: makes[role.tensor_type]() if role.tensor_type in makes else None)


def values(x: Tensor, make: Makes, block: int, way: str) -> Tensor:
    """What a copy of ``x`` with zeros behind it stands for, of the shape of x, in float64."""
    quantizer = make()
    quantizer.set_usage(rowwise=way == "rowwise", columnwise=way == "columnwise")
    held = quantizer(F.pad(x.detach(), (0, -x.shape[1] % block, 0, -x.shape[0] % block)))
    return held.dequantize()[: x.shape[0], : x.shape[1]].double()


@pytest.mark.parametrize(("rows", "width", "out"), [(20, 64, 48), (1, 80, 100)], ids=str)
@pytest.mark.parametrize(("x_name", "weight_name", "dy_name"), [*itertools.product(FORMATS, repeat=3)])
def test_products_of_unlike_formats_take_every_shape(x_name: str, weight_name: str, dy_name: str, rows: int, width: int, out: int) -> None:
    """All three products are those of the operands' values; dx of those that forward had of the weight, where dy has another format."""
    torch.manual_seed(3)
    layer, x, dy = fusible.Linear(width, out, bias=False), torch.randn(rows, width, requires_grad=True), torch.randn(rows, out)
    (x_makes, _), (weight_makes, _), (dy_makes, _) = (FORMATS[name] for name in (x_name, weight_name, dy_name))
    with fusible.autocast(recipe=recipe_of(input=x_makes, weight=weight_makes, grad_output=dy_makes)):
        y = layer(x)
    y.backward(dy)
    of = {"x": (x, FORMATS[x_name]), "w": (layer.weight, FORMATS[weight_name]), "dy": (dy, FORMATS[dy_name])}
    along = {(name, way): values(t, make, block, way) for name, (t, (make, block)) in of.items() for way in ("rowwise", "columnwise")}
    for got, left, right in (
        (y, along["x", "rowwise"], along["w", "rowwise"].t()),
        (x.grad, along["dy", "rowwise"], along["w", "columnwise" if weight_name == dy_name else "rowwise"]),
        (layer.weight.grad, along["dy", "columnwise"].t(), along["x", "columnwise"]),
    ):
        assert got is not None
        bound = (left.shape[1] + 4) * torch.finfo(torch.float32).eps * (left.abs() @ right.abs())
        assert ((got.detach().double() - left @ right).abs() <= bound).all()


class Own(quantized.Quantizer):
    """One whose products are its own, of which nothing is asked here."""

    custom = True  # type: ignore[assignment]


APPLIED: dict[str, Makes] = {
    "hybrid": lambda: quantized.HybridQuantizer(
        rowwise_quantizer=quantized.MXFP8Quantizer(EIGHT), columnwise_quantizer=quantized.Float8CurrentScalingQuantizer(EIGHT)
    ),
    "identity": lambda: quantized.IdentityQuantizer(dtype=torch.bfloat16),
    "own": Own,
}


@pytest.mark.parametrize(
    ("name", "tensor_type"),
    [(name, of) for name in APPLIED for of in ("input", "weight", "grad_output") if (name, of) != ("own", "weight")],  # that one would be called
)
def test_groups_refuse_what_quantizes_one_tensor_at_a_time(name: str, tensor_type: str) -> None:
    """It would be left out otherwise, and the products be those of unquantized operands."""
    torch.manual_seed(0)
    experts = fusible.Sequential(fusible.MixtureOfExperts(32, 64, experts=2, top_k=1)), torch.randn(16, 32), ()
    groups = ops.Sequential(ops.GroupedLinear(2, 32, 64)), torch.randn(64, 32), (torch.tensor([32, 32]),)
    for model, x, sizes in (experts, groups):
        with pytest.raises(NotServedError, match=r"what grouped products read.* expected a format that groups can have"):
            with fusible.autocast(recipe=recipe_of(**{tensor_type: APPLIED[name]})):
                model(x, *sizes).sum().backward()


@pytest.mark.parametrize("pair", [*itertools.permutations(FORMATS, 2)], ids=str)
def test_groups_of_unlike_formats_take_rows_of_any_number(pair: tuple[str, str]) -> None:
    torch.manual_seed(0)
    (x_makes, _), (dy_makes, _) = (FORMATS[name] for name in pair)
    model, x = fusible.Sequential(fusible.MixtureOfExperts(96, 96, experts=3, top_k=2)), torch.randn(31, 96)
    with fusible.autocast(recipe=recipe_of(input=x_makes, grad_output=dy_makes)):
        y = model(x)
    y.sum().backward()
    wanted = model(x)
    assert (y - wanted).norm() <= 0.2 * wanted.norm()


@pytest.mark.parametrize("exponent", [-1, 1, 3])
@pytest.mark.parametrize("scales", OF_SCALES)
def test_a_factor_before_a_product_is_right_whatever_type_scales_have(scales: str, exponent: int) -> None:
    """A power of two may go into scales, where they have room for it."""
    torch.manual_seed(0)
    make = OF_SCALES[scales]
    product, x = ops.Linear(64, 64, bias=False), torch.randn(32, 64)
    with fusible.autocast(recipe=recipe_of(input=make, weight=make)):
        got = ops.Sequential(ops.GELU(), ops.ConstantScale(2.0**exponent), product)(x)
    factored = F.gelu(x, approximate="tanh") * 2.0**exponent
    wanted = values(factored, make, 16, "rowwise") @ values(product.weight, make, 16, "rowwise").t()
    assert (got.detach().double() - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize("make", [BYTES, *OF_SCALES.values()], ids=["bytes", *OF_SCALES])
def test_a_model_that_holds_its_weights_so_trains_and_is_read_again(make: Makes) -> None:
    torch.manual_seed(1)
    recipe = recipe_of(input=make, weight=make, grad_output=make)

    def model() -> fusible.Sequential:
        with fusible.quantized_model_init(recipe=recipe):
            return fusible.Sequential(fusible.Linear(96, 96), fusible.GELU(), fusible.Linear(96, 48))

    def train(model: fusible.Sequential, steps: int) -> list[float]:
        optimizer, losses = fusible.FusedAdam(model.parameters(), lr=1e-2), []
        for _ in range(steps):
            with fusible.autocast(recipe=recipe):
                loss = (model(x) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    x, first, second = torch.randn(20, 96), model(), model()
    losses = train(first, 3)
    assert losses[2] < losses[1] < losses[0]
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert train(second, 2) == train(first, 2)


@pytest.mark.parametrize("name", sorted(name for name, form in _FORMATS_BY_NAME.items() if type(form).__module__.startswith("fusible.")))
def test_a_name_of_a_format_is_its_own(name: str) -> None:
    known = _FORMATS_BY_NAME[name]
    with pytest.raises(ArgumentError, match=rf"expected a name of its own, got '{name}', which {type(known).__module__}\."):
        own_formats.format_of(name, 8, EIGHT, torch.float32)
    assert _FORMATS_BY_NAME[name] is known


@pytest.mark.parametrize("name", sorted(_SCHEMES_BY_NAME))
def test_a_name_of_a_scheme_is_its_own(name: str) -> None:
    known, other = (
        _SCHEMES_BY_NAME[name],
        next(scheme.format for scheme in _SCHEMES_BY_NAME.values() if scheme.format is not _SCHEMES_BY_NAME[name].format),
    )
    with pytest.raises(ArgumentError, match=f"a Scheme of {other}: expected a name of its own, got '{name}'"):
        Scheme(name, other)
    assert _SCHEMES_BY_NAME[name] is known


def test_a_class_may_be_defined_again() -> None:
    """As by a notebook, whose cell is run twice."""
    for _ in range(2):
        make = own_formats.quantizer_class("OwnTwice", 16)
        x = torch.randn(32, 32)
        assert (make()(x).dequantize() - x).norm() <= 2**-4 * x.norm()


def test_a_format_without_a_codec_says_so() -> None:
    make = own_formats.quantizer_class("OwnWithoutCodec", 16)
    make._SCHEME.format.codecs.clear()
    with pytest.raises(NotServedError, match="serves formats with a codec for 'torch', and quantizer is OwnWithoutCodec"):
        make()(torch.randn(16, 16))


def test_a_quantizer_that_was_not_registered_says_so() -> None:
    scheme = own_formats.quantizer_class("OwnUnregistered", 16)._SCHEME
    scheme.format.codecs.clear()

    class Unregistered(quantized.BlockScalingQuantizer):
        _SCHEME = scheme
        dtype = EIGHT

    with pytest.raises(NotServedError, match="the format OwnUnregistered of quantize: expected a codec for 'torch', got none"):
        Unregistered()(torch.randn(16, 16))
