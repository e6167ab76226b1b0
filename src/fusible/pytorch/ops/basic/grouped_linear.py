"""``GroupedLinear``: the linear layers of many groups of rows, as the experts of a mixture are."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.nvte import Tensor, make_nvte_tensor, te_to_torch_dtype
from fusible.ops import Op
from fusible.pytorch.engine.main_grads import MainGrad, first_microbatch, is_first_microbatch, sums_so_far
from fusible.pytorch.ops.basic.parameters import WithParameters
from fusible.pytorch.ops.buffers import check_buffer, write_rows
from fusible.pytorch.ops.op import Mode, OperationContext
from fusible.pytorch.ops.tensors import maybe_dequantize
from fusible.pytorch.quantized_init import as_parameter
from fusible.quantized import QuantizedTensor, Quantizer, QuantizerRole, Recipe

__all__ = ["GRAD_INPUT_BUFFER_KEY", "GroupedLinear", "OUTPUT_BUFFER_KEY", "is_op_fuser_grouped_tensor_path_supported"]

OUTPUT_BUFFER_KEY = "output"
"""The keyword of a call of ``GroupedLinear`` by which it is given memory for its output."""
GRAD_INPUT_BUFFER_KEY = "grad_input"
"""The keyword by which it is given memory for the gradient of its input."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def is_op_fuser_grouped_tensor_path_supported(recipe: Recipe | None, dtype: torch.dtype) -> bool:
    """Whether ``GroupedLinear`` of ``dtype`` runs under ``recipe`` (None: unquantized) on one grouped tensor, its sizes left on their device, and so
    may have single parameters: any recipe but one that computes backward otherwise than forward (``backward_override``), and in fp64 none."""
    return dtype in _DTYPES and (recipe is None or (recipe.backward_override is None and dtype is not torch.float64))


class GroupedLinear(WithParameters):
    """``y_i = x_i @ weight_i.T + bias_i`` for each of ``num_groups`` groups of rows of ``x [*, in_features]``.

    Extra inputs: ``split_sizes``, int32 or int64 ``[num_groups]``, the rows of each group, one group after the other, any of them 0; and with
    ``bias`` and ``scale_bias``, a number for each row by which its bias is multiplied. The sizes may lie on any device and are not read by the host,
    unless a backend does. Rows beyond the last group belong to nobody: there the output and the gradient of the input are 0. Each group is quantized
    by itself; under MXFP8 with zeros after its rows up to a multiple of 32, under NVFP4 of 16, which no result shows.

    Parameters: ``weight0``, ``weight1``, ... of ``[out_features, in_features]``, or with ``single_grouped_weight`` one ``weight [num_groups,
    out_features, in_features]``; ``bias0``, ... of ``[out_features]``, or with ``single_grouped_bias`` one ``bias [num_groups, out_features]``.
    Weights are quantized when they have changed.

    ``accumulate_into_main_grad``: the products that give the weights' gradients add them to their ``main_grad``, and ``grad`` stays as it is. Where
    ``overwrite_main_grad`` of a weight is true, its ``main_grad`` is written over.
    ``delay_wgrad_compute``: backward leaves those products to ``backward_dw``.

    A call takes the keywords ``output`` and ``grad_input``: contiguous tensors without gradient to which the result and the gradient of ``x`` are
    copied, and which are what the call and its backward give. Rows of ``output`` beyond the last group stay as they are. The operation is then called
    by itself, neither compiled nor replayed. Raises ``ShapeError`` for a buffer of another shape, dtype or device.
    """

    num_extra_inputs = 1
    keeps_unnamed = True
    keywords = frozenset({OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY})
    fixed_options = frozenset(
        {
            "delay_wgrad_compute",
            "in_features",
            "num_groups",
            "out_features",
            "scale_bias",
            "single_grouped_bias",
            "single_grouped_weight",
            "use_bias",
        }
    )

    weight: nn.Parameter
    weight0: nn.Parameter
    bias: nn.Parameter
    bias0: nn.Parameter

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        for name, size in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ArgumentError(expected("a positive number", of=f"{name} of GroupedLinear", got=size, do="pass at least 1"))
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in _DTYPES:
            raise DTypeError(expected("float32, float16, bfloat16 or float64", of="the dtype of GroupedLinear", got=dtype, do="pass one of these"))
        self.num_extra_inputs = 2 if bias and scale_bias else 1  # read by the constructor
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.use_bias, self.scale_bias = bias, bias and scale_bias
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.accumulate_into_main_grad, self.delay_wgrad_compute = accumulate_into_main_grad, delay_wgrad_compute
        self._rng_state_tracker_function = rng_state_tracker_function
        self._hooks: list[Callable[[], Any]] = []
        self._deferred: deque[tuple[ops.GroupedMMT, Tensor, Tensor, bool]] = deque()
        self._weight_names = self._register("weight", single_grouped_weight, (out_features, in_features), device, dtype)
        self._bias_names = self._register("bias", single_grouped_bias, (out_features,), device, dtype) if bias else ()
        self._fill()
        self._mark_weights()

    def _register(self, name: str, single: bool, shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype) -> tuple[str, ...]:
        sizes = {name: (self.num_groups, *shape)} if single else {f"{name}{i}": shape for i in range(self.num_groups)}
        for own, size in sizes.items():
            self.register_parameter(own, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        return tuple(sizes)

    def _mark_weights(self) -> None:
        """Delayed gradients are no business of what is hooked to backward."""
        if self.delay_wgrad_compute:
            for name in self._weight_names:
                getattr(self, name).skip_backward_post_hook = True

    @property
    def accumulating_parameters(self) -> tuple[str, ...]:
        """The parameters to whose ``main_grad`` the engine adds. Delayed products (``backward_dw``) add to it themselves."""
        return self._weight_names if self.accumulate_into_main_grad and not self.delay_wgrad_compute else ()

    @property
    def has_bias(self) -> bool:
        return self.use_bias

    def reset_parameters(self) -> None:
        """Draw the weights, group after group, uniform in ``+-1/sqrt(in_features)``; biases are 0. What is on the meta device is made first. Within
        ``quantized_model_init`` the weights are quantized then, each by itself."""
        self._materialize()
        with torch.no_grad():
            for name in self._weight_names:
                weight = getattr(self, name)
                values = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if isinstance(weight, QuantizedTensor) else weight
                for part in values if values.dim() == 3 else (values,):
                    self._draw_weight(part)
                if values is weight:
                    setattr(self, name, as_parameter(weight, self.get_quantizer_roles("forward")[1]))
                else:
                    weight.copy_(values)
            for name in self._bias_names:
                nn.init.zeros_(getattr(self, name))
        self._mark_weights()

    def make_op(self) -> Op:
        added = [name for name in self._bias_names if name in self.parameter_names]
        weights, biases = ([make_nvte_tensor(getattr(self, name)) for name in names] for names in (self._weight_names, added))
        deferred = self._defer if self.delay_wgrad_compute else None
        return ops.GroupedMMT(self.num_groups, weights, biases, scale_bias=self.scale_bias, deferred=deferred)

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
        **others: Any,
    ) -> tuple[torch.Tensor, Iterable[Iterable[torch.Tensor]]]:
        ctx, keywords = basic_op_ctxs[0], basic_op_kwargs[0]
        shapes = {OUTPUT_BUFFER_KEY: (*input_.shape[:-1], self.out_features), GRAD_INPUT_BUFFER_KEY: tuple(input_.shape)}
        buffers = {name: keywords[name] for name in shapes if keywords.get(name) is not None}
        for name, buffer in buffers.items():
            dtype = input_.dtype if ctx._op is None else te_to_torch_dtype(ctx._op.activation)
            check_buffer(buffer, shapes[name], dtype, input_.device, f"{name} of {type(self).__name__}")
        into = buffers.get(OUTPUT_BUFFER_KEY)
        others.update(basic_op_kwargs=basic_op_kwargs, next_op_input_quantizer=next_op_input_quantizer if into is None else None)
        y, extra = super().fuser_forward(basic_op_ctxs, input_, basic_op_extra_inputs=basic_op_extra_inputs, **others)
        ctx.dgrad_out = buffers.get(GRAD_INPUT_BUFFER_KEY)  # type: ignore[attr-defined]
        return y if into is None else write_rows(y, into, basic_op_extra_inputs[0][0]), extra

    def fuser_backward(self, basic_op_ctxs: list[OperationContext], grad_output: torch.Tensor, **extra: Any) -> tuple[torch.Tensor, Any, Any]:
        dx, *rest = super().fuser_backward(basic_op_ctxs, grad_output, **extra)
        buffer = getattr(basic_op_ctxs[0], "dgrad_out", None)
        if buffer is not None and dx is not None:
            dx = buffer.copy_(maybe_dequantize(dx, buffer.dtype))
        return dx, *rest  # type: ignore[return-value]

    def num_quantizers(self, mode: str) -> int:
        return 2 * self.num_groups if mode == "forward" else self.num_groups

    def get_quantizer_roles(self, mode: str) -> list[QuantizerRole]:
        names = ("input", "weight") if mode == "forward" else ("grad_output",)
        return [QuantizerRole("grouped_linear", name) for _ in range(self.num_groups) for name in names]

    def quantized_names(self, mode: Mode) -> tuple[str, ...]:
        names = super().quantized_names(mode)  # in forward all x0, x1, .., then all weight0, weight1, ..
        half = self.num_groups
        return names if mode == "backward" else tuple(name for pair in zip(names[:half], names[half:], strict=True) for name in pair)

    def need_backward_dw(self) -> bool:
        """Whether ``backward_dw`` must be called for the weights' gradients."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """The delayed gradients of the weights of the earliest backward that waits for them, added to their ``grad`` or ``main_grad``.

        Then the hooks that ``register_wgrad_accumulation_and_reduce_hooks`` took are called. Does nothing where no backward waits.
        """
        if not self._deferred:
            return
        op, x, dy, first = self._deferred.popleft()
        weights = {name: self._parameters[name] for name in self._weight_names}
        with first_microbatch() if first else nullcontext():
            found = {name: MainGrad.of(weights[name]) for name in self._weight_names if self.accumulate_into_main_grad and op.wants(name)}
        main_grads = {f"{op.position}.{name}": main_grad for name, main_grad in found.items() if main_grad is not None}
        with torch.no_grad():
            sums = sums_so_far(list(main_grads.values()), in_place=True)
            slots = dict(zip(main_grads, map(make_nvte_tensor, sums), strict=True))
            for (name, weight), grad in zip(weights.items(), op.dweights(x, dy, slots), strict=True):
                if grad is None or f"{op.position}.{name}" in slots or weight is None:
                    continue
                weight.grad = grad.data if weight.grad is None else weight.grad + grad.data
        for hook in self._hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]) -> None:
        """Call a function after each ``backward_dw``: a data-parallel wrapper reduces gradients there."""
        self._hooks.append(wgrad_accumulation_and_reduce_hook)

    def _defer(self, op: ops.GroupedMMT, x: Tensor, dy: Tensor) -> None:
        self._deferred.append((op, x, dy, is_first_microbatch()))

    def extra_repr(self) -> str:
        return f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"
