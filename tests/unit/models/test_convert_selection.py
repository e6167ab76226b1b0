"""Which layers ``convert`` looks at, what it keeps in high precision, what it says of them, and that it does all or nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ArgumentError, DTypeError
from fusible.models.convert import planning

RECIPE = fusible.Float8CurrentScaling()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.norm = nn.Linear(16, 4), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.up(x) * self.gate(x).sum(-1, keepdim=True))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_nothing_of_transformers_is_loaded_for_a_model_of_torchs_own() -> None:
    program = """
import sys, torch, fusible
model = fusible.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), fusible.DelayedScaling())
model(torch.ones(2, 8)).sum().backward()
fusible.convert(model, undo=True)
print([name for name in sys.modules if name.partition(".")[0] in ("transformers", "peft")], type(model).__name__)
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["[]", "Sequential"]


def names(layers: Any) -> set[str]:
    return {layer.name for layer in layers}


def linears(**options: Any) -> set[str]:
    report = fusible.conversion_report(fusible.convert(Model(), RECIPE, **options))
    return {layer.name for layer in report.converted if layer.kind == "linear"}


UP = {f"blocks.{i}.up" for i in range(3)}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, UP),
        ({"keep_high_precision": ()}, UP | {f"blocks.{i}.gate" for i in range(3)} | {"patches", "head"}),
        ({"keep_high_precision": None}, UP | {f"blocks.{i}.gate" for i in range(3)} | {"patches", "head"}),
        ({"include": None, "exclude": None}, UP),
        ({"keep_high_precision": "router"}, UP | {"patches", "head"}),
        ({"keep_high_precision": ["first", "router"]}, UP | {"head"}),
        ({"keep_high_precision": ["last", "gate", "up"]}, {"patches"}),
        ({"include": "blocks.1"}, {"blocks.1.up"}),
        ({"include": ["blocks.[12]", "head"]}, {"blocks.1.up", "blocks.2.up"}),
        ({"exclude": "up"}, set()),
        ({"exclude": lambda name, module: name.startswith("blocks.0")}, UP - {"blocks.0.up"}),
        ({"include": "blocks", "exclude": ["blocks.0", "blocks.*.norm"]}, UP - {"blocks.0.up"}),
    ],
)
def test_layers_are_chosen_by_name_and_by_place(options: dict[str, Any], wanted: set[str]) -> None:
    assert linears(**options) == wanted


def test_of_a_model_without_blocks_the_first_and_the_last_layer_are_kept() -> None:
    deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    assert names(fusible.conversion_report(fusible.convert(deep, RECIPE)).kept) == {"0", "3"}
    shallow = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert not fusible.conversion_report(fusible.convert(shallow, RECIPE)).kept


@torch.no_grad()
@pytest.mark.parametrize("options", [{"include": "blocks.1"}, {"exclude": ["blocks.0", "blocks.2"]}], ids=str)
def test_what_a_second_conversion_leaves_alone_keeps_its_recipe(options: dict[str, Any]) -> None:
    other, x = fusible.NVFP4BlockScaling(), torch.randn(16, 16)
    model = fusible.convert(Model(), RECIPE)
    first = [block.up(x) for block in model.blocks]
    report = fusible.conversion_report(fusible.convert(model, other, **options))
    second = [block.up(x) for block in model.blocks]
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True]
    assert torch.equal(second[1], fusible.convert(model, other).blocks[1].up(x))
    kept = {layer.name for layer in report.converted if "keeps its recipe" in layer.text}
    assert kept == {f"blocks.{i}.{name}" for i in (0, 2) for name in ("up", "norm")}


def test_the_report_reads_as_text() -> None:
    model = fusible.convert(Model(), RECIPE, exclude="blocks.2.norm")
    assert str(fusible.conversion_report(model)).splitlines() == [
        "converted to Fusible: 3 linears, 2 norms; recipe: Float8CurrentScaling()",
        "",
        "converted",
        "  blocks.*.up    3x  linear  Linear 16 -> 16",
        "  blocks.*.norm  2x  norm    LayerNorm as LayerNorm",
        "",
        "kept in high precision",
        "  patches        1x  linear  it comes before the repeated blocks",
        "  blocks.*.gate  3x  linear  it routes",
        "  head           1x  linear  it comes behind the repeated blocks",
        "",
        "left as they are",
        "  blocks.2.norm  1x  norm  excluded",
    ]


def test_undo_gives_classes_and_attributes_back() -> None:
    model = Model()
    before = {name: (module, type(module), dict(vars(module))) for name, module in model.named_modules()}
    fusible.convert(model, RECIPE, keep_high_precision=())
    model(torch.randn(4, 8)).sum().backward()
    assert sum(type(module) is not before[name][1] for name, module in model.named_modules()) == 11
    assert fusible.convert(model, undo=True) is model
    for name, module in model.named_modules():
        was, cls, attributes = before[name]
        assert module is was and type(module) is cls and vars(module) == attributes
    with pytest.raises(ArgumentError, match="converted"):
        fusible.conversion_report(model)


def test_an_error_on_the_way_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = Model(), []
    classes = [type(module) for module in model.modules()]

    def fails(*args: Any) -> Any:
        made.append(args)
        if len(made) == 3:
            raise RuntimeError("no memory")
        return original(*args)

    original = planning.linear_swap
    monkeypatch.setattr(planning, "linear_swap", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        fusible.convert(model, RECIPE)
    assert len(made) == 3 and [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: fusible.convert(3), DTypeError, "expected an nn.Module, got a int"),  # type: ignore[type-var]  # pyright: ignore
        (lambda: fusible.convert(Model(), "fp8"), DTypeError, "expected a recipe, got a str"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: fusible.convert(Model(), include=3), DTypeError, "include of convert"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: fusible.convert(Model(), exclude="blocks.7"), ArgumentError, "got 'blocks.7'"),
        (lambda: fusible.convert(Model(), keep_high_precision=("head", "tail")), ArgumentError, "got 'tail'"),
        (lambda: fusible.convert(Model(), RECIPE, undo=True), ArgumentError, "expected no recipe"),
        (lambda: fusible.convert(Model(), undo=True, include="blocks.0"), ArgumentError, "expected no include, got 'blocks.0'; undo the part"),
        (lambda: fusible.convert(Model(), undo=True, exclude=["up"]), ArgumentError, r"expected no exclude, got \['up'\]"),
        (lambda: fusible.convert(Model(), undo=True, keep_high_precision=()), ArgumentError, r"expected no keep_high_precision, got \(\)"),
        (lambda: fusible.convert(Model(), include=[None]), DTypeError, "include of convert: expected names, .*, got None; give"),  # type: ignore[list-item]  # pyright: ignore
        (lambda: fusible.convert(Model(), exclude=["up", None]), DTypeError, "exclude of convert: .*, got None; give"),  # type: ignore[list-item]  # pyright: ignore
        (lambda: fusible.convert(Model(), keep_high_precision=(None,)), DTypeError, "keep_high_precision of convert: .*, got None; give"),  # type: ignore[arg-type]  # pyright: ignore
        (lambda: fusible.convert(Model(), undo=1), DTypeError, "True or False"),  # type: ignore[arg-type]  # pyright: ignore
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
