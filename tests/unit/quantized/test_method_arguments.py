"""What a method of a quantizer or a quantized tensor may be given is said by its annotations, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible.errors import DTypeError, ShapeError
from fusible.quantized import MXFP8Quantizer
from fusible.quantized.arguments import (
    NoopFlag,
    QuantizerLike,
    Sizes,
    SomeSizes,
    Source,
    check_methods,
)


class Methods:
    def source(self, whatever: Source) -> Any:
        return whatever

    def named_like_another(self, shape: Source, tensor: bool | None = None) -> Any:
        return shape, tensor

    def open(self, tensor: Any, shape: dict[str, Any], *device: int, **dtype: int) -> Any:
        return tensor, shape, device, dtype

    def sizes(self, of: Sizes, some: SomeSizes | None = None, *, flag: NoopFlag | None = None) -> Any:
        return of, some, flag

    @classmethod
    def of_class(cls, quantizer: QuantizerLike) -> Any:
        return cls, quantizer

    @staticmethod
    def of_nobody(x: torch.dtype) -> Any:
        return x


ONE = torch.zeros(1)
CASES = [
    (lambda x: x.source(3), DTypeError, "whatever of Methods.source: expected a dense tensor, got 3; pass one."),
    (lambda x: x.source(whatever="a"), DTypeError, "whatever of Methods.source: expected a dense tensor, got 'a'; pass one."),
    (lambda x: x.named_like_another(3), DTypeError, "shape of Methods.named_like_another: expected a dense tensor, got 3; pass one."),
    (lambda x: x.named_like_another(ONE, 3), DTypeError, "tensor of Methods.named_like_another: expected a bool or None, got 3; pass one."),
    (lambda x: x.sizes([1, -1]), ShapeError, "of[1] of Methods.sizes: expected an integer of at least 0, got -1; pass one."),
    (lambda x: x.sizes([1], []), DTypeError, "some of Methods.sizes: expected a list of at least one size or None, got a list of 0; pass one."),
    (lambda x: x.sizes([], flag=3), DTypeError, "flag of Methods.sizes: expected a tensor [1] or None, got 3; pass one."),
    (lambda x: x.of_class(3), DTypeError, "quantizer of Methods.of_class: expected a quantizer, got 3; pass one."),
    (lambda x: x.open(1, 3), DTypeError, "shape of Methods.open: expected a mapping, got 3; pass one."),
    (lambda x: x.of_nobody(3), DTypeError, "x of Methods.of_nobody: expected a torch.dtype, got 3; pass one."),
]


@pytest.fixture
def checked() -> Any:
    own = type("Methods", (), {**vars(Methods), "__module__": "fusible.quantized.own"})
    check_methods(own)
    return own()


@pytest.mark.parametrize(("call", "error", "text"), CASES, ids=[text for _, _, text in CASES])
def test_what_an_annotation_does_not_say_is_refused(checked: Any, call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call(checked)
    assert str(caught.value) == text


def test_what_it_says_is_handed_on_as_it_came(checked: Any) -> None:
    quantizer = MXFP8Quantizer(7)
    assert checked.of_class(quantizer=quantizer) == (type(checked), quantizer) == type(checked).of_class(quantizer)
    assert checked.of_nobody(torch.int8) is type(checked).of_nobody(x=torch.int8) is torch.int8
    assert checked.source(ONE) is ONE and checked.named_like_another(ONE, False) == (ONE, False)
    assert checked.sizes((), (3,), flag=ONE) == ((), (3,), ONE) and checked.sizes(range(2)) == (range(2), None, None)


def test_any_and_gathered_parameters_allow_anything(checked: Any) -> None:
    assert checked.open("a", {3: 4}, None, dtype="b") == ("a", {3: 4}, (None,), {"dtype": "b"})


def test_a_users_own_class_is_left_alone() -> None:
    own = type("Own", (), {**vars(Methods), "__module__": "elsewhere"})
    check_methods(own)
    assert own().source(3) == 3 and own.of_nobody(3) == 3  # type: ignore[attr-defined]
