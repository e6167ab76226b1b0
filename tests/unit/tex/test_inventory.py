"""The inventories of NVIDIA's module: whole, typed, and what differs from them is found and explained."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fusible import tex
from fusible.cli import main
from fusible.conformance import compare_backend, compare_module, read_inventory, versions
from fusible.conformance.inventory.reading import REQUIRED
from fusible.errors import ArgumentError, BackendError
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

NEWEST = "2.20.2"


@pytest.mark.parametrize("version", versions())
def test_an_inventory_is_whole(version: str) -> None:
    found = read_inventory(version)
    assert found.version == version
    assert list(found.all) == sorted({*found.functions, *found.enumerations, *found.classes, *found.submodules})
    for function in found.functions.values():
        names = [p.name for p in function.parameters]
        assert len(set(names)) == len(names) and all(p.type for p in function.parameters)
        assert all(p.required or function.by_keyword for p in function.parameters), "a default needs a name"
    for name in found.functions.keys() & {"quantize", "gelu"}:
        assert found.functions[name].by_keyword


def test_the_newest_is_read_unless_another_is_named() -> None:
    assert versions() == ["2.20.0", NEWEST] and read_inventory() == read_inventory(NEWEST)
    parameter = read_inventory().functions["clamped_swiglu"].parameters[2]
    assert (parameter.name, parameter.type, parameter.default) == ("limit", "float", 7.0)
    assert read_inventory().functions["gelu"].parameters[0].default is REQUIRED
    with pytest.raises(ArgumentError, match="the version of an inventory: expected 2.20.0 or 2.20.2, got '1.0'; name one of these"):
        read_inventory("1.0")


def test_an_older_version_has_what_it_had() -> None:
    old, new = read_inventory("2.20.0"), read_inventory(NEWEST)
    assert set(new.all) - set(old.all) == {"NVTEScalingMode", "ep_prepare_and_dispatch", "group_scaled_clamped_swiglu", "group_scaled_swiglu"}
    assert len(old.functions["get_fused_attn_backend"].parameters) == 19 and len(new.functions["get_fused_attn_backend"].parameters) == 1
    assert new.enumerations["NVTE_QKV_Layout"].keys() - old.enumerations["NVTE_QKV_Layout"].keys() == {"NVTE_QKV_Layout_NOT_SET"}


@pytest.mark.parametrize("version", versions())
def test_the_module_as_it_is_served_has_all_of_it_and_says_what_is_more(version: str) -> None:
    rows = compare_module(tex, version)
    assert not [row for row in rows if row.wrong]
    assert {row.kind for row in rows} <= {"extra", "signature"} and not [row for row in rows if row.kind == "signature" and version == NEWEST]
    assert "there since 2.20.2" in {row.why for row in rows if row.name == "group_scaled_swiglu"} or version == NEWEST


@pytest.mark.parametrize("name", [backend.NAME for backend in registry.ordered()])
def test_every_backend_differs_for_known_reasons(name: str) -> None:
    rows, backend = compare_backend(name), registry.find(name)
    assert not [row for row in rows if row.wrong]
    missing = {row.name: row.why for row in rows if row.kind == "missing"}
    assert missing == {function: backend.lacks(function) for function in read_inventory().functions if backend.lacks(function) is not None}
    extra = {row.name for row in rows if row.kind == "extra"}
    assert extra == {function for function in DECLARATIONS.keys() - read_inventory().functions.keys() if backend.lacks(function) is None}


class Numbers(enum.IntEnum):
    RS, AG = 0, 2


def other_order(quantizer: Any, input: Any) -> None: ...
def one_more(input: Any, quantizer: Any, how: Any) -> None: ...
def one_less(input: Any) -> None: ...
def by_position(input: Any, quantizer: Any, /) -> None: ...
def other_default(input: Any, quantizer: Any, limit: float = 6.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> None: ...
def no_default(input: Any, quantizer: Any, limit: float, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> None: ...
def anything(*arguments: Any, **named: Any) -> None: ...
def defaulted(input: Any, quantizer: Any = None, how: Any = None) -> None: ...


PLANTED: list[tuple[str, Any, set[tuple[str, str]]]] = [
    ("gelu", None, {("gelu", "missing")}),
    ("gelu", other_order, {("gelu", "signature")}),
    ("gelu", one_more, {("gelu", "signature")}),
    ("gelu", one_less, {("gelu", "signature")}),
    ("gelu", by_position, {("gelu", "signature")}),
    ("gelu", anything, set()),
    ("gelu", defaulted, set()),
    ("clamped_swiglu", other_default, {("clamped_swiglu", "default")}),
    ("clamped_swiglu", no_default, {("clamped_swiglu", "default")}),
    ("CommOverlapType", None, {("CommOverlapType", "missing")}),
    ("CommOverlapType", Numbers, {("CommOverlapType.AG", "value")}),
    ("CommOverlapType", enum.IntEnum("Less", {"RS": 0}), {("CommOverlapType.AG", "missing")}),
    ("CommOverlapType", enum.IntEnum("More", {"RS": 0, "AG": 1, "ALL": 2}), {("CommOverlapType.ALL", "extra")}),
    ("CommOverlap", None, {("CommOverlap", "missing")}),
    ("CommOverlap", type("CommOverlap", (), {}), {("CommOverlap", "signature")}),
    ("grouped_mlp_experimental", None, {("grouped_mlp_experimental", "missing")}),
    (
        "grouped_mlp_experimental",
        SimpleNamespace(),
        {("grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights", "missing")},
    ),
    ("hygon_gelu", anything, {("hygon_gelu", "extra")}),
]


@pytest.mark.parametrize(("name", "planted", "wrong"), PLANTED, ids=range(len(PLANTED)))
def test_what_is_otherwise_for_no_reason_is_found(name: str, planted: Any, wrong: set[tuple[str, str]]) -> None:
    module = ModuleType("vendor_tex")
    vars(module).update({public: getattr(tex, public) for public in tex.__all__})
    if planted is None:
        delattr(module, name)
    else:
        setattr(module, name, planted)
    module.__all__ = [public for public in vars(module) if not public.startswith("_")]  # type: ignore[attr-defined]
    assert {(row.name, row.kind) for row in compare_module(module) if row.wrong} == wrong


def test_what_a_star_does_not_bring_is_missing() -> None:
    module = ModuleType("vendor_tex")
    vars(module).update({public: getattr(tex, public) for public in tex.__all__})
    module.__all__ = [public for public in tex.__all__ if public != "gelu"]  # type: ignore[attr-defined]
    (row,) = (row for row in compare_module(module) if row.wrong)
    assert (row.name, row.kind, row.detail) == ("gelu", "missing", "not in __all__")


def answer(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(words.split())
    return code, capsys.readouterr().out


def test_the_command_compares_a_backend_and_the_module(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = answer("check-backend cpu --inventory --only gelu,bulk_allocate", capsys)
    assert code == 0 and "not implemented by it" in said and "1 missing; 0 for no known reason" in said
    code, said = answer("check-backend tex --inventory --json", capsys)
    found = json.loads(said)
    assert code == 0 and found["agrees"] and found["version"] == NEWEST and {row["kind"] for row in found["rows"]} == {"extra"}
    code, said = answer("check-backend tex --inventory --te-version 2.20.0 --only thd_out_correction --json", capsys)
    assert code == 0 and "told from those of 2.20.2" in json.loads(said)["rows"][0]["why"]


@pytest.mark.parametrize("names", [["gelu"], ["gelu", "relu"], ["gelu", "gelu"], None], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "tex"])
def test_the_command_counts_the_names_that_it_was_asked_for(backend: str, names: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    asked = len(read_inventory().all) if names is None else len({*names})
    _, said = answer(f"check-backend {backend} --inventory" + (f" --only {','.join(names)}" if names else ""), capsys)
    assert said.splitlines()[-1].startswith(f"{asked} name: no difference" if asked == 1 else f"{asked} names: ")


def test_the_command_fails_where_no_reason_is_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tex, "gelu", one_more)
    code, said = answer("check-backend tex --inventory --only gelu", capsys)
    assert code == 1 and "asks for how, which NVIDIA's has not" in said and "no known reason" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nobody --inventory", "Backend 'nobody' not found"),
        ("cpu --inventory --only gelo", "--only: expected names of transformer_engine_torch 2.20.2 or of tex, got gelo"),
        ("cpu --inventory --te-version 3", "the version of an inventory: expected 2.20.0 or 2.20.2, got '3'"),
        ("cpu --te-version 2.20.2", "--te-version: expected --inventory, got none"),
    ],
)
def test_the_command_refuses_in_a_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-backend", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="not found"):
        compare_backend("nobody")
    compare: Callable[..., Any] = compare_module
    with pytest.raises(ArgumentError, match="name one of these"):
        compare(tex, "2.9")
