# ruff: noqa: F401, F403, F405, E501, A002, I001
"""Written by `make stub` from the declarations of fusible.tex.interface; their documentation is there."""

from collections.abc import Sequence
from typing import Any
from fusible.tex.interface.domains import AnyDType, BooleanNumber, Count, Decay, Epsilon, FP8DType, Finite, FloatingDType, GivenDType, GivenTensor, Indices, Lengths, Limit, Positive, Probability, Size

def add(
    a: Any,
    b: Any,
    dtype: AnyDType | None = None,
) -> Any: ...
def all_gather(
    x: Any,
    group: Any = None,
) -> Any: ...
def all_reduce(
    x: Any,
    group: Any = None,
    reduction: str = 'sum',
) -> Any: ...
def cast(
    x: Any,
    dtype: AnyDType,
) -> Any: ...
def concatenate(
    tensors: Sequence[Any],
    dim: int,
) -> Any: ...
def copy(
    x: Any,
) -> Any: ...
def dropout(
    x: Any,
    probability: Probability,
    seed: Any,
    offset: Size,
) -> tuple[Any, Any]: ...
def dropout_backward(
    dy: Any,
    mask: Any,
    probability: Probability,
) -> Any: ...
def empty(
    shape: Sequence[int],
    dtype: AnyDType,
    like: Any,
) -> Any: ...
def full(
    shape: Sequence[int],
    value: float,
    dtype: AnyDType,
    like: Any,
) -> Any: ...
def layernorm_bwd_add(
    dz: Any,
    x: Any,
    add: Any,
    mu: Any,
    rsigma: Any,
    gamma: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def pad_groups(
    x: Any,
    sizes: Any,
    multiple: Count,
) -> tuple[Any, Any]: ...
def permute(
    x: Any,
    dims: Sequence[int],
) -> Any: ...
def reduce_scatter(
    x: Any,
    group: Any = None,
) -> Any: ...
def reshape(
    x: Any,
    shape: Sequence[int],
) -> Any: ...
def rope_angles(
    positions: Size,
    width: Size,
    base: Positive,
    like: Any,
) -> Any: ...
def row_sum(
    x: Any,
    dtype: AnyDType | None = None,
) -> Any: ...
def scale(
    x: Any,
    factor: float,
    dtype: AnyDType | None = None,
) -> Any: ...
def split(
    x: Any,
    sizes: Sequence[int],
    dim: int,
) -> list[Any]: ...
def transpose(
    x: Any,
) -> Any: ...
def unpad_groups(
    x: Any,
    sizes: Any,
    multiple: Count,
    rows: Size,
) -> Any: ...
