"""Right calls of what a plugin, a vendor's backend or a researcher registers through, from which bad calls are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusible import tex
from fusible.fusions import register_fusion_backward, register_fusion_forward, register_fusion_inference, registered, unregister_fusion
from fusible.nvte import Tensor
from fusible.ops import GELU, Context, SiLU
from fusible.pytorch.engine import executors
from fusible.pytorch.ops import registration
from fusible.quantized import saving
from fusible.tex import classes, factories, operands, protocol
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

__all__ = ["OF_OPERATIONS", "REGISTRATIONS", "Quantizer", "Registration", "fused", "fused_backward", "put_back", "undeclared", "written"]


class Own(tex.TEXBackendBase):
    """A vendor's backend of one function."""

    NAME = "swept"
    VENDOR = "SWEEP"
    PRIORITY = -1

    def gelu(self, input: Any, quantizer: Any) -> Any:
        return input


class Quantizer:
    """Of a room of its own."""


def _gelu(input: Any, quantizer: Any) -> Any:
    return input


def _swept(input: Any, scale: float = 1.0) -> Any:
    """A function that tex lacks."""


def _implementation(backend: Any, input: Any, scale: float = 1.0) -> Any:
    return input


IMPL = tex.OpImpl("gelu", "vendor.swept", tex.BackendImplKind.VENDOR, _gelu, "SWEEP", 7, frozenset({"float32"}), "sm_90")


@dataclass(frozen=True)
class Registration:
    """``run(**arguments)`` registers; ``undo`` takes back what it may have registered. ``title``: the function, as a sentence names it."""

    title: str
    run: Callable[..., Any]
    arguments: Callable[[], dict[str, Any]]
    names: tuple[str, ...] = ()


def fused(first: GELU, second: SiLU, x: Tensor) -> Tensor:
    return x


def fused_backward(first: GELU, second: SiLU, first_ctx: Context, second_ctx: Context, dy: Tensor) -> Any:
    return dy, ([], [])


def undeclared() -> None:
    if _swept.__name__ in DECLARATIONS:
        tex.undeclare(_swept)


def _declared() -> Callable[..., Any]:
    undeclared()
    return tex.declare("input")(_swept)


def _listened(note: Any) -> None:
    with tex.listening(note):
        pass


def _implemented(function: Any, backend: Any, method: Any) -> None:
    tex.implement(function, backend=backend)(method)


def _with_attribute(name: str) -> Callable[..., Any]:
    def run(value: Any) -> None:
        tex.register_backend(type("Own", (Own,), {name: value}))

    return run


def _attributes() -> list[Registration]:
    good = {"NAME": "swept2", "VENDOR": "SWEEP", "PRIORITY": 3, "DEVICES": frozenset({"cpu"}), "KIND": "vendor"}
    given = lambda value: lambda: {"value": value}  # noqa: E731
    return [Registration(f"register_backend: {name}", _with_attribute(name), given(value), (name,)) for name, value in good.items()]


def _fields() -> list[Registration]:
    def run(field: str) -> Callable[..., Any]:
        return lambda value: registry.register_many([replace(IMPL, **{field: value})])

    names = ("op_name", "impl_id", "kind", "fn", "vendor", "priority", "supported_dtypes", "min_arch")
    value = lambda name: lambda: {"value": getattr(IMPL, name)}  # noqa: E731
    return [Registration(f"register_many: {name}", run(name), value(name), (name, "swept")) for name in names]


def _operations(ops: list[Any], *, recipe: Any) -> list[Any]:
    return ops


def _fused_operations(kind: str) -> Callable[..., Any]:
    return getattr(registration, f"register_{kind}_fusion")


OF_OPERATIONS = ("forward", "backward", "forward_backward")
KEPT: tuple[Any, ...] = (executors._EXECUTORS, protocol._OF_FRAMEWORKS, saving._CLASSES, registration._entries)
"""Where else registering writes."""
_FORMER = [type(one)(one) for one in KEPT]
POLICY = {
    "forced": "torch", "fallback": None, "strict": False, "debug": False, "per_function": {"gelu": "torch"}, "prefer": "vendor",
    "allow_vendors": frozenset({"NVIDIA"}), "deny_vendors": frozenset({"NVIDIA"}),
}  # fmt: skip
REGISTRATIONS = [
    Registration("register_backend", tex.register_backend, lambda: {"cls": Own, "replace": False}, ("backend",)),
    *_attributes(),
    Registration("register_impl", registry.register_impl, lambda: {"implementation": IMPL}, ("register_many",)),
    Registration("register_many", registry.register_many, lambda: {"implementations": [IMPL]}),
    *_fields(),
    Registration("unregister_backend", registry.unregister_backend, lambda: {"name": tex.register_backend(Own).NAME}, ("Backend",)),
    Registration("set_backend", tex.set_backend, lambda: {"name": "torch", "strict": False}, ("policy", "Backend")),
    Registration("set_policy", tex.set_policy, lambda: {"policy": tex.Policy(), "gelu": "torch"}, ("policy", "Backend")),
    Registration("Policy", tex.Policy, lambda: dict(POLICY), ("policy",)),
    Registration("declare", lambda asks, function: tex.declare(asks)(function), lambda: {"asks": "input", "function": _swept}, ("_swept",)),
    Registration("implement", _implemented, lambda: {"function": _declared(), "backend": "torch", "method": _implementation}, ("Backend", "swept")),
    Registration("undeclare", tex.undeclare, lambda: {"function": _declared()}),
    Registration("register_factory", tex.register_factory, lambda: {"quantizer_class": Quantizer, "factory": lambda quantizer, **fields: None}),
    Registration("register_kind", tex.register_kind, lambda: {"cls": Quantizer, "describe": lambda x: "own"}),
    Registration("requires", lambda supports, method: tex.requires(supports)(method), lambda: {"supports": lambda request: None, "method": _gelu}),
    Registration("specialized_by", lambda how, method: tex.specialized_by(how)(method), lambda: {"how": lambda self, call: None, "method": _gelu}),
    Registration("build_quantized", tex.build_quantized, lambda: {"quantizer": _of_own()}),
    Registration("listening", _listened, lambda: {"note": lambda heard: None}),
    Registration("register_fusion_forward", register_fusion_forward, lambda: {"function": fused, "when": None}),
    Registration("register_fusion_inference", register_fusion_inference, lambda: {"function": fused, "when": None}),
    Registration("register_fusion_backward", register_fusion_backward, lambda: {"function": fused_backward, "when": None}),
    Registration("unregister_fusion", unregister_fusion, lambda: {"function": register_fusion_inference(fused)}, ("fusion",)),
    Registration("register_executor", executors.register_executor, lambda: {"name": "swept", "make": executors.EagerExecutor, "replace": False}),
    Registration("register_dtypes", protocol.register_dtypes, lambda: {"dtypes": {"swept": torch.float32}}),
    Registration("provide_classes", classes.provide_classes, lambda: {"provider": classes._provider}),
    Registration("register_saved", lambda classes: saving.register_saved(classes), lambda: {"classes": Quantizer}),
    *(
        Registration(f"register_{kind}_fusion", _fused_operations(kind), lambda: {"fn": _operations, "prepend": False, "priority": 0})
        for kind in OF_OPERATIONS
    ),
    Registration("unregister_fusion of operations", registration.unregister_fusion, lambda: {"fn": _registered_operations()}, ("unregister_fusion",)),
]
"""Every function by which something is registered with tex or the pipeline."""


def _of_own() -> Quantizer:
    tex.register_factory(Quantizer, lambda quantizer, **fields: None)
    return Quantizer()


def _registered_operations() -> Callable[..., Any]:
    if not any(entry.function is _operations for entry in registration._entries):
        registration.register_forward_fusion(_operations)
    return _operations


def put_back() -> None:
    """Leave ``KEPT`` as it was."""
    for one, former in zip(KEPT, _FORMER, strict=True):
        one.clear()
        (one.update if isinstance(one, dict) else one.extend)(former)


def written() -> list[Any]:
    """What registering writes."""
    fusions = [fusion for kind in ("forward", "backward", "inference") for fusion in registered(kind)]  # type: ignore[arg-type]
    kept = [classes._provider, *(type(one)(one) for one in KEPT)]
    return [registry.registered(), registry.policy, set(DECLARATIONS), dict(operands.KINDS), dict(factories._FACTORIES), fusions, kept]
