"""``Sequential`` as a list: what ``torch.nn.Sequential`` has, with its results and the classes of its errors; and both containers alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import FusibleError
from fusible.pytorch import ops

KINDS = [pytest.param(fusible.Sequential, id="Sequential"), pytest.param(ops.Sequential, id="ops.Sequential")]
SWEPT = {
    "append", "extend", "insert", "pop", "__add__", "__delitem__", "__dir__", "__getitem__", "__iadd__", "__imul__", "__iter__", "__len__",
    "__mul__", "__rmul__", "__setitem__",
}  # fmt: skip


class Named(nn.Identity):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.called = name


NEW = Named("new")
OTHERS = [Named("p"), Named("q")]


def plus(m: Any, other: Any) -> Any:
    m += other
    return m


def times(m: Any, number: Any) -> Any:
    m *= number
    return m


EDITS: dict[str, Callable[[Any], Any]] = {
    "append": lambda m: m.append(NEW),
    "append no module": lambda m: m.append(3),
    "extend": lambda m: m.extend(OTHERS),
    "extend by a Sequential": lambda m: m.extend(type(m)(*OTHERS)),
    "extend by nothing": lambda m: m.extend([]),
    **{f"insert {i}": lambda m, i=i: m.insert(i, NEW) for i in range(-5, 6)},
    "pop one": lambda m: m.pop(1),
    "pop the last": lambda m: m.pop(-1),
    "pop several": lambda m: m.pop(slice(1, 3)),
    "pop too far": lambda m: m.pop(4),
    **{f"get {i}": lambda m, i=i: m[i] for i in (0, 3, 4, -1, -4, -5, "a", 1.0, None, True)},
    "get a slice": lambda m: m[1:3],
    "get every second": lambda m: m[::2],
    "get an empty slice": lambda m: m[4:],
    **{f"set {i}": lambda m, i=i: m.__setitem__(i, NEW) for i in (0, 3, 4, -1, -5, "a", slice(0, 1))},
    "set no module": lambda m: m.__setitem__(0, 3),
    **{f"del {i}": lambda m, i=i: m.__delitem__(i) for i in (0, 3, 4, -4, -5, "a", slice(0, 2), slice(None), slice(0, 4, 2))},
    "+": lambda m: m + type(m)(*OTHERS),
    "+ torch's": lambda m: m + nn.Sequential(*OTHERS),
    "+ itself": lambda m: m + m,
    "+ a number": lambda m: m + 3,
    "+=": lambda m: plus(m, type(m)(*OTHERS)),
    "+= a number": lambda m: plus(m, 3),
    **{f"* {n}": lambda m, n=n: m * n for n in (1, 3, 0, -1, 1.5, "a")},
    "3 *": lambda m: 3 * m,
    **{f"*= {n}": lambda m, n=n: times(m, n) for n in (1, 3, 0, -1, 1.5, "a")},
    "len": len,
    "iter": lambda m: [module.called for module in m],
    "dir": lambda m: [name for name in dir(m) if name.isdigit()],
}


def seen(made: Any) -> Any:
    """The children of a Sequential by name; a module by its name."""
    if isinstance(made, (nn.Sequential, fusible.Sequential, ops.Sequential)):
        return [(name, child.called) for name, child in made._modules.items()]
    return made.called if isinstance(made, Named) else made


def tried(m: Any, edit: Callable[[Any], Any]) -> tuple[Any, Any]:
    """What an edit gives, or its error; and the children afterwards."""
    try:
        result = edit(m)
    except Exception as error:
        if not isinstance(m, nn.Sequential):
            assert isinstance(error, FusibleError) and ": expected " in str(error), error
        return error, seen(m)
    return ("itself" if result is m else seen(result)), seen(m)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_does_what_it_does_in_torch(name: str, kind: type) -> None:
    torchs, ours = (made(*map(Named, "abcd")) for made in (nn.Sequential, kind))
    (found, left), (wanted, left_by_torch) = tried(ours, EDITS[name]), tried(torchs, EDITS[name])
    assert left == left_by_torch
    if isinstance(wanted, Exception):
        assert isinstance(found, type(wanted)) and isinstance(found, IndexError) == isinstance(wanted, IndexError)
    else:
        assert found == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_of_torchs_sequential_is_there_and_swept(kind: type) -> None:
    own = {name for name, value in vars(nn.Sequential).items() if callable(value) and not name.startswith("_get")}
    assert own - {"__init__", "forward"} == SWEPT
    assert all(getattr(kind, name) is not getattr(nn.Module, name, None) for name in SWEPT)


@pytest.mark.parametrize("kind", KINDS)
def test_where_torch_fails_by_accident(kind: type) -> None:
    """``insert`` asserts in torch, ``+=`` of itself changes the dictionary that it walks, and edits of named children raise or lose their names."""
    model = kind(Named("a"), Named("b"))
    with pytest.raises(TypeError, match=r"^Sequential: expected modules, got int; give nn.Module instances\.$"):
        model.insert(0, 3)
    with pytest.raises(TypeError, match="expected modules"):
        model.extend([NEW, 3])
    assert [m.called for m in model] == ["a", "b"], "nothing is changed by a call that raises"
    model += model
    assert seen(model) == [("0", "a"), ("1", "b"), ("2", "a"), ("3", "b")]
    with pytest.raises(IndexError, match=r"^an index of a Sequential: expected a place among 4 modules, got 9; .*\.$"):
        model.pop(9)
    named = kind({"first": Named("a"), "second": Named("b")})
    named.insert(1, NEW)
    assert seen(named) == [("first", "a"), ("1", "new"), ("second", "b")]
    del named[0]
    assert seen(named) == [("0", "new"), ("second", "b")]
    named *= 2
    assert seen(named) == [("0", "new"), ("second", "b"), ("2", "new"), ("3", "b")]
    assert isinstance(model.pop(), Named) and len(model) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_after_an_edit_runs_the_new_list(kind: type) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    layers = [fusible.Linear(8, 8) for _ in range(4)]
    model = kind(*layers[:2])
    plain = nn.Sequential(*layers[:2])
    for edit in (
        lambda m: m.insert(1, layers[2]),
        lambda m: m.append(kind(layers[3], nn.Tanh())),
        lambda m: m[-1].insert(0, layers[0]),
        lambda m: m.__setitem__(0, layers[3]),
        lambda m: m.__delitem__(slice(1, 3)),
        lambda m: times(m, 2),
        lambda m: m.pop(0),
    ):
        model(x)
        edit(model)
        plain = nn.Sequential(*model)
        assert torch.equal(model(x), plain(x))
