"""The classes that operations are written against: ``OperationContext``, ``FusibleOperation``, ``BasicOperation``, ``FusedOperation``.

A *basic* operation holds parameters and gives one forward and one backward. A *fused* operation stands for several basic ones, in one pass or in
both, and holds nothing. Names, signatures and contracts are those of ``transformer_engine.pytorch.ops.op``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.fusions import Fusion
from fusible.nvte import PassKind
from fusible.ops import Op
from fusible.pytorch.engine.bound import BoundOp, without_memory
from fusible.pytorch.engine.chain import ChainCall, Passage, go_through
from fusible.pytorch.engine.channels import ExtraTensors
from fusible.pytorch.engine.parametrized import is_computed, lacks_parameter
from fusible.pytorch.engine.tracing import TracedRun
from fusible.pytorch.modules.base import BaseModule, has_hooks
from fusible.pytorch.ops import op_passes
from fusible.pytorch.ops.context import OperationContext
from fusible.pytorch.ops.option_changes import check_fixed, made_anew
from fusible.pytorch.ops.overrides import check_derived, check_overrides, rewritten
from fusible.pytorch.ops.ran_in import shown
from fusible.pytorch.ops.saved_context import SavedContext
from fusible.pytorch.ops.torch_operation import TorchOperation, pass_of
from fusible.quantized import Quantizer, QuantizerRole, Recipe, RecipeState

__all__ = ["BasicOperation", "FusedOperation", "FusibleOperation", "OperationContext", "runs_operations"]

Mode = Literal["forward", "backward"]
Pipeline = TypeVar("Pipeline", bound=type[Any])


class FusibleOperation(BaseModule):
    """Base of all operations: a ``torch.nn.Module`` that a fuser can run together with its neighbours."""

    fixed_options: ClassVar[frozenset[str]] = frozenset()
    """The options by which its parameters were made: another value is refused (``ArgumentError``)."""
    _alone: ClassVar[type[Any]]
    """The class of pipelines that runs an operation called by itself (``runs_operations``)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_derived(cls, FusibleOperation, BasicOperation)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        check_fixed(self, name, value)
        super().__setattr__(name, value)

    @property
    def fuses(self) -> tuple[bool, bool]:
        """Whether the forward, and whether the backward, is code of the operation's own that a plan is to call."""
        return False, False

    @property
    @abstractmethod
    def is_fused_op(self) -> bool:
        """Whether the operation stands for several basic ones."""

    @abstractmethod
    def basic_operations(self) -> Iterator[BasicOperation]:
        """The basic operations that it consists of, in order; a basic one is its own."""

    def holders(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        return [(op, op.parameter_names) for op in self.basic_operations()]

    def pre_first_fuser_forward(self) -> None:
        """Called once, before the first forward: the place to make parameters that were left on the meta device."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before each forward; ``requires_grad``: whether backward will come by."""

    def get_input_quantizer(self) -> Quantizer | None:
        """How the operation wants its input quantized; None for not at all."""
        return None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        """How the operation wants the gradient of its output quantized; None for not at all."""
        return None

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        """``(output, extra outputs of each basic operation)``. The lists have an entry for each basic operation.

        ``next_op_input_quantizer`` says how the next operation would quantize the output: to hand it over quantized so is allowed, not asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} has no fused forward")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor | None]], Iterable[Iterable[torch.Tensor | None]]]:
        """``(gradient of the input, gradients of each basic operation's parameters, gradients of its extra inputs)``."""
        raise NotImplementedError(f"{type(self).__name__} has no fused backward")

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The operation on its own; ``kwargs`` go to its ``op_forward``. Returns the output, or a tuple of it and the extra outputs."""
        if torch.compiler.is_compiling():
            return TracedRun(self, 0, [self]).in_chain(input, extra_inputs, ChainCall(keywords={0: kwargs} if kwargs else {}))
        return self._fuser()(input, *extra_inputs, basic_op_kwargs=[kwargs for _ in self.basic_operations()])

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, *extra, **call.keywords.get(id(self), {}))

    def _fuser(self) -> Any:
        """The pipeline that runs the operation by itself; it is kept, so that plans are made once."""
        return self._runner()

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> Any:
        return self._alone([self], executor=self._executor)


def runs_operations(pipeline: Pipeline) -> Pipeline:
    """Let a class of pipelines, which is built upon operations, run each that stands alone."""
    FusibleOperation._alone = pipeline
    return pipeline


class BasicOperation(SavedContext, ExtraTensors, FusibleOperation):
    """An operation with a forward and a backward of its own. A subclass calls ``super().__init__()`` first and may then assign parameters.

    ``num_extra_inputs``, ``num_extra_outputs``: tensors that it takes beside its input, and gives beside its output. An operation that has any
    overrides ``fuser_forward`` and ``fuser_backward``; any other ``op_forward`` and ``op_backward``.

    A subclass of an operation of ours may override these too, one or both: ``super().op_forward`` and ``super().op_backward`` are then the op's own
    passes. One that overrides a single pass leaves, or finds, in the context what the op's other pass finds or leaves (``save_for_backward``,
    ``saved_for_backward``).
    """

    remakes_op = True
    keywords: ClassVar[frozenset[str]] = frozenset()
    """The keyword arguments of a call that an operation of ours takes; the caller's own takes those of its ``op_forward``."""
    _bound_op: BoundOp | None = None
    _registered: tuple[str, ...] = ()
    """The names of all parameters that it has had."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        super().__init__()
        self._quantizers: dict[str, list[Quantizer | None]] | None = None
        self._recipe: Recipe | None = None
        self._begin_channels()

    @property
    def is_fused_op(self) -> bool:
        return False

    def basic_operations(self) -> Iterator[BasicOperation]:
        yield self

    def get_extra_state(self) -> torch.Tensor:
        """uint8 ``[0]``: the place in a state dict that the package's operations have, and want, for scaling states; here they go by
        ``scaling_state``."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def make_op(self) -> Op:
        """The entry of a plan that does the operation's arithmetic. By default its own ``op_forward`` and ``op_backward``."""
        return TorchOperation(self)

    def bound_ops(self) -> Iterator[BoundOp]:
        yield self.bound_op

    def local_ops(self) -> tuple[BoundOp, ...]:
        return (self.bound_op,)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters that it has, or that are computed in their places, in the order in which they were registered."""
        return tuple(name for name in self._registered if self._parameters.get(name) is not None or is_computed(self, name))

    @property
    def bound_op(self) -> BoundOp:
        """The operation as a pipeline takes it. Made anew when an attribute or a parameter that it depends on has changed."""
        if self._bound_op is None:
            self._bound_op = BoundOp(without_memory(self.make_op()), self, self.parameter_names, self.extras)
        return self._bound_op

    def current(self, bound: BoundOp) -> BoundOp:
        return self.bound_op

    def __setattr__(self, name: str, value: Any) -> None:
        """An option that is set after the first call takes effect at the next. A value that the operation cannot have raises, and is not set."""
        with self._noticed(name):
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        with self._noticed(name):
            super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name not in self._registered:
            self._registered = (*self._registered, name)
        if param is None and self._parameters.get(name) is not None and type(self).make_op is not BasicOperation.make_op:
            raise lacks_parameter(self, name)
        with self._noticed(name):
            super().register_parameter(name, param)

    def _noticed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._bound_op is None or name.startswith("_") or name == "training" else made_anew(self)

    @property
    def fuses(self) -> tuple[bool, bool]:
        return (False, False) if type(self).make_op is BasicOperation.make_op else rewritten(type(self))

    def local_passes(self, position: int) -> tuple[tuple[int, int, Fusion], ...]:
        forward, backward = self.fuses
        kinds: dict[PassKind, bool] = {"forward": forward, "inference": forward, "backward": backward}
        return tuple((position, position + 1, Fusion(kind, pass_of(self, kind, 1), ())) for kind, own in kinds.items() if own)

    def quantized_names(self, mode: Mode) -> tuple[str, ...]:
        """The names in a plan of the tensors that the operation quantizes in a pass, in the order of its quantizers."""
        return self.bound_op.op.forward_names if mode == "forward" else self.bound_op.op.backward_names

    def num_quantizers(self, mode: Mode) -> int:
        """How many tensors the operation quantizes in a pass; in forward the first is its input, in backward the gradient of its output."""
        return 0

    def get_quantizer_roles(self, mode: Mode) -> list[QuantizerRole] | None:
        """The roles of the quantized tensors of a pass, for recipes that look at them. None: by position (input, weight, output; grad_output,
        grad_input)."""
        return None

    def reset_recipe_state(self, *, recipe: Recipe | None) -> None:
        """Make the quantizers that ``recipe`` asks for, anew where it is another recipe than before; None drops them."""
        recipe = None if recipe is None else recipe.immutable()
        if recipe is None or (self._quantizers is not None and recipe == self._recipe):
            self._quantizers, self._recipe = (None, None) if recipe is None else (self._quantizers, recipe)
            return
        made: dict[str, list[Quantizer | None]] = {}
        for mode in ("forward", "backward"):
            count = self.num_quantizers(mode)
            roles = self.get_quantizer_roles(mode)
            made[mode] = RecipeState.create(recipe, mode=mode, num_quantizers=count, roles=roles).make_quantizers() if count else []
        self._quantizers, self._recipe = made, recipe

    def get_quantizer(self, mode: Mode, index: int) -> Quantizer | None:
        """The quantizer of a pass's ``index``-th tensor under the recipe in force, with the scale that comes next; None where there is none."""
        if not 0 <= index < self.num_quantizers(mode):
            of = f"{type(self).__name__}.get_quantizer({mode!r}, index)"
            raise ArgumentError(expected(f"an index below {self.num_quantizers(mode)}", of=of, got=index, do="name a quantizer that it has"))
        return None if self._quantizers is None else shown(self, mode, index)

    def get_input_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """The output for an input. Saves in ``ctx`` what ``op_backward`` needs. See ``fuser_forward`` for the quantizers."""
        if type(self).make_op is BasicOperation.make_op:
            raise NotImplementedError(f"{type(self).__name__} overrides neither op_forward nor make_op")
        return op_passes.fuser_forward(self, [ctx], input_, basic_op_extra_inputs=[()], next_op_input_quantizer=next_op_input_quantizer)[0]

    def op_backward(self, ctx: OperationContext, grad_output: torch.Tensor) -> Any:
        """``(gradient of the input, gradients of the parameters)``, or the gradient of the input alone where there are no parameters."""
        if type(self).make_op is BasicOperation.make_op:
            raise NotImplementedError(f"{type(self).__name__} overrides neither op_backward nor make_op")
        grad_input, grads, _ = op_passes.fuser_backward(self, [ctx], grad_output, basic_op_grad_extra_outputs=[()])
        return grad_input, grads[0]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        if type(self).make_op is not BasicOperation.make_op and type(self).op_forward is BasicOperation.op_forward:
            extra, quantizer = basic_op_extra_inputs, next_op_input_quantizer
            return op_passes.fuser_forward(self, basic_op_ctxs, input_, basic_op_extra_inputs=extra, next_op_input_quantizer=quantizer)
        check_overrides(self, "fuser_forward")
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor | None]], Iterable[Iterable[torch.Tensor | None]]]:
        if type(self).make_op is not BasicOperation.make_op and type(self).op_backward is BasicOperation.op_backward:
            return op_passes.fuser_backward(self, basic_op_ctxs, grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs)
        check_overrides(self, "fuser_backward")
        result = self.op_backward(basic_op_ctxs[0], grad_output)
        grad_input, grad_params = result if isinstance(result, tuple) else (result, ())
        return grad_input, [grad_params], [()]


class FusedOperation(FusibleOperation):
    """Several basic operations as one: it overrides ``fuser_forward``, ``fuser_backward`` or both, and holds no parameters beside theirs.

    One that overrides a single pass must leave, and find, in each basic operation's context what that operation's own passes leave and find. It
    calls their ``op_forward`` or ``fuser_forward`` with that context, or computes itself and says so by ``BasicOperation.save_for_backward`` (in
    backward: reads ``BasicOperation.saved_for_backward``). One that overrides both may use ``ctx.save_for_backward`` and ``ctx.saved_tensors``.

    An extra tensor that a channel carries from one of its basic operations to another passes inside: its place in ``basic_op_extra_inputs`` and in
    ``basic_op_grad_extra_outputs`` holds None, and what is returned for it is not looked at.
    """

    def __init__(self, basic_ops: Iterable[BasicOperation]) -> None:
        nn.Module.__init__(self)
        self.basic_ops = nn.ModuleList(basic_ops)
        if not len(self.basic_ops):
            raise ArgumentError(expected("at least one basic operation", of=type(self).__name__, got="none", do="give those that it stands for"))
        super().__init__()

    @property
    def is_fused_op(self) -> bool:
        return True

    def basic_operations(self) -> Iterator[BasicOperation]:
        yield from self.basic_ops  # pyright: ignore[reportReturnType]

    def bound_ops(self) -> Iterator[BoundOp]:
        for op in self.basic_operations():
            yield op.bound_op

    def local_ops(self) -> tuple[BoundOp, ...]:
        return ()

    @property
    def public_extra_inputs(self) -> int:
        return sum(op.public_extra_inputs for op in self.basic_operations())

    @property
    def open(self) -> bool:
        return any(self.fuses) or not any(has_hooks(op) for op in self.basic_operations())

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: torch.Tensor, *extra_inputs: torch.Tensor, basic_op_kwargs: Sequence[dict[str, Any]] | None = None
    ) -> Any:
        """The operation on its own. ``basic_op_kwargs``: the keyword arguments of each basic operation."""
        parts = list(self.basic_operations())
        each = basic_op_kwargs if basic_op_kwargs is not None else [{} for _ in parts]
        if torch.compiler.is_compiling():
            return super().forward(input, *extra_inputs, **{name: value for kwargs in each for name, value in kwargs.items()})
        if self.open:
            return self._fuser()(input, *extra_inputs, basic_op_kwargs=each)
        keywords = {id(op): kwargs for op, kwargs in zip(parts, each, strict=False) if kwargs}
        return go_through(Passage(type(self).__name__, parts, input, extra_inputs, ChainCall(keywords=keywords)), parts)  # so that hooks fire

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        return self(x, *extra, basic_op_kwargs=[dict(call.keywords.get(id(op), {})) for op in self.basic_operations()])

    @property
    def fuses(self) -> tuple[bool, bool]:
        own = type(self)
        return own.fuser_forward is not FusibleOperation.fuser_forward, own.fuser_backward is not FusibleOperation.fuser_backward

    @property
    def adapts(self) -> tuple[bool, bool]:
        """Whether the forward, and the backward, are the engine's fused passes of its basic operations, which a plan calls by itself."""
        return False, False

    def pre_first_fuser_forward(self) -> None:
        for op in self.basic_operations():
            op.pre_first_fuser_forward()

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        for op in self.basic_operations():
            op.pre_fuser_forward(requires_grad=requires_grad)

    def get_input_quantizer(self) -> Quantizer | None:
        return next(self.basic_operations()).get_input_quantizer()

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return list(self.basic_operations())[-1].get_grad_output_quantizer()
