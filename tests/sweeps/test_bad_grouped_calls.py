"""Every public method of grouped tensors, and every operation of torch on one, refuses a bad call and changes nothing."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from grouped_calls import FORMATS, GROUPED, SHAPES, grouped, grouped_calls, members, quantizer_of
from quantized_calls import Right, methods_of, values
from scores import Scores, score
from test_bad_quantized_calls import ALIASES, RIGHT, unlike_the_values
from wrong_values import changed, others, state

from fusible.errors import ArgumentError
from fusible.quantized import GroupedTensor

TORCH = ("__torch_dispatch__", "over", "joined")
"""Methods that torch calls, or that give None for what has no rows."""
INTEGERS = {"of uint8", "of int8"}
OTHERS = {f"of {name}" for name in ("int64", "float64", "uint8", "bool", "complex64", "int8", "float32")}
LAYOUTS = {"0-d", "empty", "one rank more", "flat", "longer", "shorter", "wider", "meta", "sparse", "strided"}
ACCEPTED: dict[tuple[str, str], set[str]] = {
    ("", "device"): {"None"},
    ("", "dtype"): {"None"},
    ("", "quantizer"): {"None"},
    ("", "noop_flag"): {"None", "0-d", "flat", "strided", *OTHERS - {"of complex64"}},
    ("dequantize", "dtype"): {"None", "3"},
    ("make_grouped_tensor", "first_dims"): {"None", "flat", "longer", "wider", "strided", *INTEGERS},
    ("make_grouped_tensor", "logical_first_dim"): {"99"},
    ("make_grouped_tensor", "logical_last_dim"): {"99"},
    ("make_grouped_tensor_from_rowwise_data", "rowwise_data"): {*OTHERS, "one rank more", "flat", "meta", "strided"},
    ("make_grouped_tensor_with_shapes", "shapes"): {"first a list with a large number"},
    ("make_tensor_offsets", "split_dims"): {*INTEGERS, *LAYOUTS - {"0-d", "one rank more", "sparse"}},
    ("make_tensor_offsets", "common_dim"): {"99"},
    ("fsdp_assign_gathered", "gathered"): {"first strided"},
    ("fsdp_post_all_gather", "all_gather_outputs"): {"first strided"},
    ("of_stack", "values"): {"longer", "shorter", "wider", "meta", "strided"},
    ("update_usage", "rowwise_usage"): {"None"},
    ("quantize", "tensors"): {"first strided"},
    ("quantize_", "tensor"): {"strided"},
    ("restore_from_saved", "tensors"): {"longer list", "a list with None", *(f"first {what}" for what in (*OTHERS, *LAYOUTS))},
    ("size", "dim"): {"None", "-1"},
}
"""By method ("": any) and argument, wrong values that are none: other sizes that fit, room for more rows, data of any dtype."""


def _accepted(call: Right, argument: str, what: str) -> bool:
    return (call.name, argument) in RIGHT or what in ACCEPTED.get((call.name, argument), ()) or what in ACCEPTED.get(("", argument), ())


def _bad(calls: list[Right]) -> Iterator[tuple[Right, str, str]]:
    for call in calls:
        for argument, good in call.arguments().items():
            yield from ((call, argument, what) for what, _ in others(good))


@pytest.mark.parametrize("cls", dict.fromkeys(cls for cls, _ in GROUPED), ids=lambda cls: cls.__name__)
def test_every_method_with_arguments_is_swept(cls: type[Any]) -> None:
    swept = {call.name for call in grouped_calls() if call.kind.endswith(cls.__name__)}
    for name in methods_of(cls):
        takes = [p for p in inspect.signature(getattr(cls, name)).parameters if p != "self"]
        assert not takes or name in TORCH or name in swept, name


@pytest.mark.parametrize("share", [pytest.param(8, id="a sample"), pytest.param(1, id="every one", marks=pytest.mark.slow)])
def test_a_bad_call_of_a_method_is_refused_clearly(share: int) -> None:
    scores, calls = Scores(), list(_bad(grouped_calls()))
    for call, argument, what in random.Random(7).sample(calls, len(calls) // share):
        subject, arguments = call.make(), call.arguments()
        arguments[argument] = next(value for said, value in others(arguments[argument]) if said == what)
        before = list(state([vars(subject), arguments]))
        label = f"{call.kind}.{call.name}: {argument} {what}"
        try:
            call.call(subject, arguments)
        except Exception as error:
            wrote = changed(before, list(state([vars(subject), arguments])))
            scores.add(label, score(error, {call.name, *arguments, call.kind.split()[1], *ALIASES}, changed=wrote), error)
        else:
            scores.add(label, "accepted" if _accepted(call, argument, what) else "accepted without a reason")
    print(f"{len(calls) // share} bad calls: {dict(scores.counts)}")
    assert not scores.unclear, "\n".join(scores.unclear)
    assert scores.counts["clear"] > 3000 // share


@pytest.mark.parametrize(("cls", "name"), GROUPED)
def test_a_group_whose_last_source_is_wrong_is_left_as_it_was(cls: type[Any], name: str) -> None:
    """Members are written one after the other: all of them are looked at before the first."""
    first, last = members()
    subject, refused = grouped(cls, name), 0
    for what, wrong in others(last):
        before = list(state(vars(subject)))
        if what == "strided":
            continue
        with pytest.raises((TypeError, ValueError)) as caught:
            subject.quantize([first * 3, wrong])
        assert score(caught.value, {"tensors"}, changed=changed(before, list(state(vars(subject))))) == "clear", what
        refused += 1
    assert refused > 15


@pytest.mark.parametrize(("cls", "name"), GROUPED)
def test_what_has_been_cleared_says_so(cls: type[Any], name: str) -> None:
    for method in methods_of(cls):
        subject = grouped(cls, name)
        subject.clear()
        if [p for p in inspect.signature(getattr(subject, method)).parameters.values() if p.default is p.empty] or method in TORCH:
            continue
        try:
            getattr(subject, method)()
        except Exception as error:
            assert score(error, {method, cls.__name__, "grouped"}) == "clear", (method, error)
    assert subject.num_tensors == 0
    with pytest.raises(ArgumentError, match="before the grouped tensor is cleared"):
        subject.get_common_first_dim()


@pytest.mark.parametrize("name", FORMATS)
def test_a_group_is_no_shard(name: str) -> None:
    subject = grouped(GroupedTensor, name)
    before = list(state(vars(subject)))
    meta = ({"field_names": ()}, {"rowwise": True, "columnwise": True}, 0, 0, ())
    for call in (
        subject.fsdp_extract_buffers,
        lambda: subject.fsdp_pre_all_gather(None, None, None, None, None),
        lambda: subject.fsdp_pre_all_gather(type("Mesh", (), {"get_group": lambda self: None, "size": lambda self: 2})(), None, None, None, None),
        lambda: subject.fsdp_post_all_gather((), meta, torch.float32),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        wrote = changed(before, list(state(vars(subject))))
        assert score(caught.value, {"GroupedTensor", "fsdp_post_all_gather"}, changed=wrote) == "clear", caught.value
    assert subject.joined([subject, subject]) is None


@pytest.mark.parametrize("name", FORMATS)
def test_operations_of_torch_take_and_refuse_what_they_do_of_the_values(name: str) -> None:
    rows = [32, 96]

    def make() -> GroupedTensor:
        made = GroupedTensor.make_grouped_tensor_with_shapes(2, [(n, 64) for n in rows], quantizer_of(name), dtype=torch.float32)
        made.quantize(values().split(rows))
        return made  # type: ignore[return-value]

    counts, wrong = unlike_the_values(make)
    print(name, counts)
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] > 150


def test_a_tensor_without_buffers_is_not_made() -> None:
    with pytest.raises(ArgumentError, match="the buffers of a GroupedTensor: expected tensors, got none"):
        GroupedTensor((96, 128), torch.float32, num_tensors=len(SHAPES))
