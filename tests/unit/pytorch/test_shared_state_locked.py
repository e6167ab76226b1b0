"""What threads share is read and written under its lock: where the lock cannot be had, a call ends there, and everything is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusible import nvte
from fusible.compute_pipeline import ComputePipeline, PlanRequest, StateLayout
from fusible.fusions import epoch, registry
from fusible.nvte import DType
from fusible.ops import GELU, ReLU
from fusible.pytorch.engine.scaling import ScalingOwner
from fusible.pytorch.ops import registration
from fusible.quantized import DelayedScaling


class Held(Exception):
    """The lock is another's."""


class Refusing:
    """A lock that nobody is given."""

    def __enter__(self) -> None:
        raise Held

    def __exit__(self, *_: Any) -> None: ...


def fuse(relu: ReLU, gelu: GELU, x: nvte.Tensor) -> nvte.Tensor:
    raise NotImplementedError


def arrange(given: Any, *, recipe: Any) -> Any:
    raise NotImplementedError


GLOBAL: dict[str, tuple[Any, Callable[[], Any]]] = {
    **{f"registered {kind}": (registry, lambda kind=kind: registry.registered(kind)) for kind in ("forward", "backward", "inference")},
    "register inference": (registry, lambda: registry.register_fusion_inference(fuse)),
    "unregister": (registry, lambda: registry.unregister_fusion(fuse)),
    **{f"fusions {kind}": (registration, lambda kind=kind: registration.fusions(kind)) for kind in ("forward", "backward", "forward_backward")},
    "register forward of operations": (registration, lambda: registration.register_forward_fusion(arrange)),
    "register backward of operations": (registration, lambda: registration.register_backward_fusion(arrange)),
    "register both of operations": (registration, lambda: registration.register_forward_backward_fusion(arrange)),
    "unregister of operations": (registration, lambda: registration.unregister_fusion(arrange)),
}


def registered() -> Any:
    return {kind: list(fusions) for kind, fusions in registry._fusions.items()}, epoch(), list(registration._entries), registration._epoch


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", GLOBAL)
def test_registries_are_under_a_lock(name: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = GLOBAL[name]
    if there:
        registry.register_fusion_inference(fuse)
        registration.register_forward_fusion(arrange)
    try:
        before = registered()
        with monkeypatch.context() as patched:
            patched.setattr(module, "_lock", Refusing())
            with pytest.raises(Held):
                call()
        assert registered() == before
    finally:
        if there:
            registry.unregister_fusion(fuse)
            registration.unregister_fusion(arrange)


RECIPE, CPU = DelayedScaling(amax_history_len=4), torch.device("cpu")
OWNED: dict[str, Callable[[ScalingOwner, Any], Any]] = {
    "snapshot": lambda owner, other: owner.snapshot(RECIPE, CPU),
    "snapshot of an inference": lambda owner, other: owner.snapshot(RECIPE, CPU, inference=True),
    "snapshot of what is repeated": lambda owner, other: owner.snapshot(RECIPE, CPU, repeated=True),
    "upcoming": lambda owner, other: owner.upcoming(RECIPE),
    "commit forward": lambda owner, other: owner.commit_forward(other.current, {"0.x": torch.ones(1)}),
    "commit backward": lambda owner, other: owner.commit_backward({"0.dy": torch.ones(1)}),
    "save": lambda owner, other: owner.save(),
    "load": lambda owner, other: owner.load(other.save()),
    "reset": lambda owner, other: owner.reset(),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", OWNED)
def test_a_scaling_state_is_under_a_lock(name: str, used: bool) -> None:
    owner, other = (ScalingOwner(StateLayout(("0.x",), ("0.dy",))) for _ in range(2))
    for each in (owner, other) if used else (other,):
        each.commit_forward(each.snapshot(RECIPE, CPU), {"0.x": torch.ones(1)})
    before = {**vars(owner), "_lock": None}
    lock, owner._lock = owner._lock, Refusing()  # type: ignore[assignment]
    with pytest.raises(Held):
        OWNED[name](owner, other)
    assert {**vars(owner), "_lock": None} == before
    owner._lock = lock
    if used or name != "commit backward":  # there is no backward without a forward
        OWNED[name](owner, other)


def test_a_plan_is_built_under_a_lock_and_found_without() -> None:
    pipeline = ComputePipeline([ReLU()])
    request = PlanRequest(None, DType.BFloat16, 4, True, ((),), (True,), False, epoch())
    lock, pipeline._lock = pipeline._lock, Refusing()  # type: ignore[assignment]
    with pytest.raises(Held):
        pipeline.plan(request)
    assert not pipeline.plans_built
    pipeline._lock = lock
    plan = pipeline.plan(request)
    pipeline._lock = Refusing()  # type: ignore[assignment]
    assert pipeline.plan(request) is plan and pipeline.plans_built == 1


def test_a_plan_that_another_thread_has_built_meanwhile_is_taken() -> None:
    pipeline = ComputePipeline([ReLU()])
    request = PlanRequest(None, DType.BFloat16, 4, True, ((),), (True,), False, epoch())
    other = ComputePipeline([ReLU()]).plan(request)

    class Late:
        def __enter__(self) -> None:
            pipeline._plans[request] = other

        def __exit__(self, *_: Any) -> None: ...

    pipeline._lock = Late()  # type: ignore[assignment]
    assert pipeline.plan(request) is other and not pipeline.plans_built
