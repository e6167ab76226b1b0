"""Functions registered one by one, by the protocol of TransformerEngine-FL's plugins: ``registry.register_many([OpImpl(...), ...])``.

Its objects are known by their fields, so those of that package serve like the ones here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from fusible.errors import BackendError, expected
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Request, requires
from fusible.tex.selection.backend_checks import nearest

__all__ = ["BackendImplKind", "BackendPriority", "OpImpl", "by_backend"]

_NO_FUNCTIONS = frozenset(("create_comm_overlap", "create_comm_overlap_helper", "create_comm_overlap_p2p", "create_fp8_tensor_meta"))
"""Operations of TransformerEngine-FL that make a class, which tex asks no backend for."""

_HOOKS = frozenset(("get_attention_backend", "get_flash_attention_class"))
"""Those that are no functions of tex, and that NVIDIA's package is answered by (``fusible.plugin``)."""


class BackendImplKind(StrEnum):
    """What an implementation is: FlagGems', a vendor's, or a reference."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class BackendPriority:
    """The usual priorities of implementations."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


@dataclass(frozen=True)
class OpImpl:
    """One function of a backend: ``fn`` serves ``tex.<op_name>``. ``fn._is_available``, where it is there, says whether it can run here.

    The implementations of one ``impl_id`` are one backend, whose name is the vendor's id without ``vendor.``, in lower case.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: frozenset[str] | None = None
    min_arch: str | None = None


def by_backend(implementations: Sequence[Any]) -> list[type[TEXBackendBase]]:
    """A backend class per ``impl_id``. Raises ``BackendError`` for what is no implementation, or one of no function."""
    if not isinstance(implementations, Iterable) or isinstance(implementations, str):
        raise BackendError(expected("a list of OpImpl", of="register_many", got=repr(implementations), do="pass a list"))
    grouped: dict[str, list[Any]] = {}
    for one in implementations:
        _check(one)
        grouped.setdefault(one.impl_id, []).append(one)
    return [_backend(impl_id, several) for impl_id, several in grouped.items()]


def _check(one: Any) -> None:
    lacking = [name for name in ("op_name", "impl_id", "kind", "fn") if not hasattr(one, name)]
    if lacking:
        got = f"{one!r} without {', '.join(lacking)}"
        raise BackendError(expected("objects with op_name, impl_id, kind and fn", of="register_many", got=got, do="pass tex.OpImpl"))
    if not isinstance(one.impl_id, str) or not one.impl_id.removeprefix("vendor."):
        raise BackendError(expected("a text", of="impl_id of an implementation", got=repr(one.impl_id), do="pass one such as vendor.hygon"))
    of = f"the implementation {one.impl_id}"
    _check_options(one, of)
    if not callable(one.fn):
        raise BackendError(expected("a function", of=of, got=repr(one.fn), do="pass it as fn"))
    if not isinstance(one.op_name, str):
        raise BackendError(expected("a function's name", of=f"op_name of {of}", got=type(one.op_name).__qualname__, do="pass a text"))
    if not (one.op_name in DECLARATIONS or one.op_name in _NO_FUNCTIONS or one.op_name in _HOOKS):
        raise BackendError(expected("functions of tex", of=of, got=f"{one.op_name}{nearest(str(one.op_name))}", do="look the names up in dir(tex)"))
    if _kind(one) not in {kind.value for kind in BackendImplKind}:
        raise BackendError(expected("a kind of flagos, vendor or reference", of=of, got=repr(one.kind), do="pass a BackendImplKind"))
    if _kind(one) == "vendor" and not getattr(one, "vendor", None):
        raise BackendError(expected("a vendor", of=of, got="none", do="pass vendor"))


def _check_options(one: Any, of: str) -> None:
    """What an implementation may have beside: a vendor, a priority, and the calls that it takes."""
    vendor, priority, dtypes, arch = (getattr(one, name, None) for name in ("vendor", "priority", "supported_dtypes", "min_arch"))
    wrong = {
        ("vendor", "a text or None"): not isinstance(vendor, str | None),
        ("priority", "a number"): hasattr(one, "priority") and (isinstance(priority, bool) or not isinstance(priority, int | float)),
        ("supported_dtypes", "a set of dtypes' names, or None"): dtypes is not None and not _are_dtypes(dtypes),
        ("min_arch", 'a text such as "sm_90", or None'): not isinstance(arch, str | None),
    }
    for (name, what), found in wrong.items():
        if found:
            raise BackendError(expected(what, of=f"{name} of {of}", got=repr(getattr(one, name)), do="pass one"))


def _are_dtypes(value: Any) -> bool:
    is_list = isinstance(value, Iterable) and not isinstance(value, str | torch.Tensor)
    return is_list and all(isinstance(item, str | torch.dtype) for item in value)


def _kind(one: Any) -> str:
    return str(getattr(one.kind, "value", one.kind)).lower()


def _backend(impl_id: str, several: list[Any]) -> type[TEXBackendBase]:
    """The backend that the implementations of ``impl_id`` are."""
    first = several[0]
    for what, values in (
        ("kind", {_kind(one) for one in several}),
        ("vendor", {getattr(one, "vendor", None) for one in several}),
        ("priority", {getattr(one, "priority", 0) for one in several}),
        ("implementation of a function", {"several"} if len({one.op_name for one in several}) < len(several) else {"one"}),
    ):
        if len(values) > 1 or "several" in values:
            got = ", ".join(sorted(map(str, values)))
            raise BackendError(expected(f"one {what}", of=f"the implementations {impl_id}", got=got, do="give the others an impl_id of their own"))
    available = list({id(probe): probe for one in several if (probe := getattr(one.fn, "_is_available", None)) is not None}.values())

    def is_available(self: TEXBackendBase) -> bool:
        return all(probe() for probe in available)

    body = {
        "__doc__": f"What was registered under the impl_id {impl_id}.",
        "__module__": getattr(first.fn, "__module__", None) or __name__,
        "NAME": impl_id.removeprefix("vendor.").lower(),
        "VENDOR": getattr(first, "vendor", None) or impl_id,
        "PRIORITY": getattr(first, "priority", 0),
        "KIND": _kind(first),
        "IMPL_ID": impl_id,
        "is_available": is_available,
        **{one.op_name: staticmethod(_method(one)) for one in several if one.op_name not in _NO_FUNCTIONS},
    }
    return type(f"Implementations[{impl_id}]", (TEXBackendBase,), body)


def _method(one: Any) -> Callable[..., Any]:
    """What serves the function, refusing the calls that the implementation says it does not take."""
    dtypes, arch = getattr(one, "supported_dtypes", None), getattr(one, "min_arch", None)
    if not dtypes and not arch:
        return one.fn
    names = frozenset(str(dtype).removeprefix("torch.") for dtype in dtypes or ())

    def refusal(request: Request) -> str | None:
        for argument, kind in request.kinds:
            if names and isinstance(kind, tuple) and isinstance(kind[-1], torch.dtype) and str(kind[-1]).removeprefix("torch.") not in names:
                return f"serves {', '.join(sorted(names))}, and {argument} is {str(kind[-1]).removeprefix('torch.')}"
        return _older(arch) if arch else None

    @requires(refusal)
    @functools.wraps(one.fn)
    def method(*args: Any, **kwargs: Any) -> Any:
        return one.fn(*args, **kwargs)

    return method


def _older(arch: str) -> str | None:
    """Why this machine's GPU is not ``arch`` (``"sm_90"``) or later, or None."""
    number = arch.lower().removeprefix("sm_").rstrip("af")
    if not number.isdigit():
        return f"asks for the architecture {arch!r}, which is none of NVIDIA's"
    if not torch.cuda.is_available():
        return f"needs a GPU of {arch}, and torch has none"
    major, minor = torch.cuda.get_device_capability()
    return None if 10 * major + minor >= int(number) else f"needs {arch}, and the GPU is sm_{10 * major + minor}"
