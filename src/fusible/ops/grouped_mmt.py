"""``GroupedMMT``: the linear layers of many groups of rows at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from fusible import nvte
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.nvte import DType, Tensor
from fusible.ops.op import Context, Op, check_width
from fusible.ops.sharing import Part, Process
from fusible.ops.types_by_name import Reads
from fusible.quantized import QuantizerRole

__all__ = ["GroupedMMT"]


class GroupedMMT(Op):
    """``y_i = x_i @ weight_i.T + bias_i`` for the groups ``x_i`` of rows of ``x [*, K]``, whose sizes are the first side input, int ``[groups]``.

    ``weights``: ``[N, K]`` for each group, or one of ``[groups, N, K]``. ``biases``: ``[N]`` each, or one of ``[groups, N]``, or none. With
    ``scale_bias`` each row takes its bias times its entry of the second side input, which has one for every row. Rows beyond the last group belong to
    nobody: there ``y`` and ``dx`` are 0.

    Every group is quantized by itself, with zeros after its rows where the format wants whole blocks (MXFP8: of 32, NVFP4: of 16): the x, weight and
    dy of group ``i`` are named ``x<i>``, ``weight<i>`` and ``dy<i>``. ``deferred(op, x, dy)``, where given, is handed what the gradients of the
    weights are made of (``dweights``), and backward gives none.

    Where processes share out the groups (``share_groups``), one has ``groups`` of them, from ``first`` on; names are those of all.
    """

    first = 0

    def __init__(
        self,
        groups: int,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        *,
        scale_bias: bool = False,
        deferred: Callable[[GroupedMMT, Tensor, Tensor], None] | None = None,
        x_dtype: nvte.Type | None = DType.Float8E4M3,
        weight_dtype: nvte.Type | None = DType.Float8E4M3,
        dy_dtype: nvte.Type | None = DType.Float8E5M2,
    ) -> None:
        self.groups, self.scale_bias, self.deferred, self.delays_wgrad = groups, scale_bias, deferred, deferred is not None
        self.rows, self.columns = weights[0].shape[-2:]
        self.whole_weight = len(weights[0].shape) == 3
        self.weight_names, self.bias_names = _names("weight", weights, 3), _names("bias", biases, 2)
        vars(self).update(zip(self.weight_names + self.bias_names, (*weights, *biases), strict=True))
        requests = {"x": (x_dtype, "input"), "weight": (weight_dtype, "weight"), "dy": (dy_dtype, "grad_output")}
        self._groups_of = {name: tuple(f"{name}{i}" for i in range(groups)) for name in requests}
        vars(self).update({f"{own}_dtype": request for name, (request, _) in requests.items() for own in self._groups_of[name]})
        self.roles = {own: QuantizerRole("grouped_linear", tensor) for name, (_, tensor) in requests.items() for own in self._groups_of[name]}

    @property
    def args(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.arg_names]

    @property
    def arg_names(self) -> tuple[str, ...]:
        return self.weight_names + self.bias_names

    @property
    def forward_names(self) -> tuple[str, ...]:
        return self._groups_of["x"] + self._groups_of["weight"]

    @property
    def backward_names(self) -> tuple[str, ...]:
        return self._groups_of["dy"]

    @property
    def reads(self) -> dict[str, Reads]:
        x, weight = self.wants("x"), self._wants_any(self.weight_names)
        ways = {"x": Reads(True, weight), "weight": Reads(True, x), "dy": Reads(x, weight)}
        return {own: ways[name] for name, names in self._groups_of.items() for own in names}

    def forward(self, x: Tensor, **sides: Tensor) -> tuple[Tensor, Context]:
        sizes, *scales = (sides[name] for name in self.side_inputs)
        self._check(x, sizes, scales)
        leading, x, types, multiple = x.shape[:-1], _matrix(x), self._types("x"), self._multiple
        if not nvte.is_quantized_type(types[0]):
            x = nvte.cast_checked(x, types[0])
        grouped, weights = nvte.grouped_cast(*nvte.grouped_pad(x, sizes, multiple), types), self._weights()
        biases = [getattr(self, name) for name in self.bias_names]
        factors = [nvte.grouped_pad(nvte.reshape(scale, (x.shape[0], 1)), sizes, multiple)[0] for scale in scales]
        y = nvte.grouped_matmul_transpose(grouped, weights, nvte.element(self.y_dtype), self._bias(biases) if biases else None, *factors)
        y = nvte.grouped_unpad(y, sizes, multiple, x.shape[0])
        ctx: Context = {"sizes": sizes}
        if self._wants_any(self.weight_names):
            ctx["x"] = nvte.by_columns(grouped) if nvte.is_quantized_type(types[0]) else x
        if self.wants("x"):
            by_name = {"weight": weights} if isinstance(weights, Tensor) else {f"weight{i}": weight for i, weight in enumerate(weights)}
            ctx.update({name: nvte.by_columns(weight) for name, weight in by_name.items()})
        if scales:
            ctx["scales"] = scales[0]
            if self.wants(self.side_inputs[1]):
                ctx.update(zip(self.bias_names, biases, strict=True))
        return nvte.reshape(y, (*leading, self.rows)), ctx

    def backward(self, ctx: Context, dy: Tensor) -> tuple[Tensor | None, list[Tensor | None], dict[str, Tensor | None]]:
        leading, sizes, dy = dy.shape[:-1], ctx["sizes"], _matrix(dy)
        wants_x, wants_weight = self.wants("x"), self._wants_any(self.weight_names)
        grouped, dbias = self._read_dy(dy, ctx, wants_x or wants_weight)
        dx, dweights = None, [None] * len(self.weight_names)
        if grouped is not None and wants_x:
            weights = self._readable(ctx["weight"] if "weight" in ctx else [ctx[f"weight{i}"] for i in range(self.groups)])
            dx = nvte.grouped_unpad(nvte.grouped_matmul(grouped, weights, nvte.element(self.dx_dtype)), sizes, self._multiple, dy.shape[0])
            dx = nvte.reshape(dx, (*leading, self.columns))
        if grouped is not None and wants_weight:
            x = ctx["x"]
            if not nvte.is_quantized_type(x.type):
                x = nvte.grouped_cast(*nvte.grouped_pad(x, sizes, self._multiple), [x.type] * self.groups)
            if self.deferred is None:
                dweights = self.dweights(x, grouped, nvte.current_pass().sums)
            else:
                self.deferred(self, x, nvte.by_columns(grouped))
        return dx, [*dweights, *self._dbiases(dbias)], self._dsides(dy, ctx)

    def _readable(self, weights: Sequence[Tensor] | Tensor) -> Sequence[Tensor] | Tensor:
        """``weights`` as the product of dx takes them: their values, where they are held by rows alone."""
        if isinstance(weights, Tensor):
            return nvte.grouped_dequantize(weights, self.activation) if _by_rows_alone(weights) else weights
        return [nvte.dequantize(weight, self.activation) if _by_rows_alone(weight) else weight for weight in weights]

    def dweights(self, x: Tensor, dy: Tensor, sums: Mapping[str, Tensor]) -> list[Tensor | None]:
        """``dy_i.T @ x_i`` of grouped operands, for each parameter that wants it; added to what ``sums`` has of it, by slot, which is used up."""
        so_far = [sums.get(f"{self.position}.{name}") for name in self.weight_names]
        types = [getattr(self, f"d{name}_dtype") for name in self.weight_names]
        shape = (self.groups, self.rows, self.columns)
        if all(tensor is None for tensor in so_far):
            whole = nvte.grouped_transpose_matmul(dy, x, types[0])
            found = [whole] if self.whole_weight else [nvte.cast_checked(part, type) for part, type in zip(nvte.unstack(whole), types, strict=True)]
        elif self.whole_weight:
            assert so_far[0] is not None
            found = [nvte.grouped_transpose_matmul_add_whole(dy, x, nvte.reshape(so_far[0], shape))]
        else:
            zeros = [nvte.zeros(shape[1:], type, dy) if tensor is None else tensor for tensor, type in zip(so_far, types, strict=True)]
            found = nvte.grouped_transpose_matmul_add(dy, x, zeros)
        return [tensor if self.wants(name) else None for name, tensor in zip(self.weight_names, found, strict=True)]

    def width(self, width: int) -> int:
        check_width(self, self.columns, width)
        return self.rows

    def share_groups(self, process: Process) -> Self:
        """The op of one process, which has an equal share of the groups; its parameters are still those of all. Raises ``ShapeError`` where they
        cannot be shared out equally, ``ArgumentError`` where each group has parameters of its own."""
        if any(name not in ("weight", "bias") for name in self.arg_names):
            of, do = f"the parameters of {self!r}", "hold the weights of all groups as one"
            raise ArgumentError(expected("one for all groups that are shared out", of=of, got="one for each", do=do))
        own = Part(self.groups, name="experts").of(process)
        return self.with_(first=own.start, groups=len(own))

    def extra_repr(self) -> str:
        return f"{self.groups} groups, {self.columns} -> {self.rows}"

    def _check(self, x: Tensor, sizes: Tensor, scales: Sequence[Tensor]) -> None:
        nvte.check_sizes(sizes, self.groups, repr(self))
        rows = math.prod(x.shape[:-1])
        for tensor in scales:
            if math.prod(tensor.shape) != rows:
                of = f"the bias scales of {self!r}"
                raise ShapeError(expected(f"one number for each of {rows} rows", of=of, got=list(tensor.shape), do="give every row one"))

    def _types(self, name: str) -> list[nvte.Type]:
        return [getattr(self, f"{own}_dtype") for own in self._own(name)]

    def _own(self, name: str) -> tuple[str, ...]:
        """The names of this process's groups' ``x``, ``weight`` or ``dy``."""
        return self._groups_of[name][self.first : self.first + self.groups]

    @property
    def _multiple(self) -> int:
        """The multiple to which the groups' rows are padded. All passes share it: both operands of a product have the same rows."""
        return nvte.rows_together([*self._types("x"), *self._types("dy")])

    def _wants_any(self, names: Sequence[str]) -> bool:
        return any(map(self.wants, names))

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        return {"weight": self._own("weight")} if self.whole_weight else {}

    def _weights(self) -> Sequence[Tensor] | Tensor:
        """The weights of the groups in the types of the products."""
        types = self._types("weight")
        if self.whole_weight and nvte.is_quantized_type(self.args[0].type):
            return self.args[0]
        if not self.whole_weight:
            return [nvte.cast_checked(getattr(self, name), type) for name, type in zip(self.weight_names, types, strict=True)]
        if not nvte.is_quantized_type(types[0]):
            return nvte.unstack(nvte.cast_checked(self.args[0], types[0]))
        return nvte.grouped_cast_stack(self.args[0], types)

    def _bias(self, biases: Sequence[Tensor]) -> Tensor:
        return biases[0] if len(biases[0].shape) == 2 else nvte.stack(biases)

    def _read_dy(self, dy: Tensor, ctx: Context, in_products: bool) -> tuple[Tensor | None, Tensor | None]:
        """``dy`` as products read it, where any does, and the biases' gradient, where any is wanted."""
        types, scales = self._types("dy"), ctx.get("scales")
        padded, sizes = nvte.grouped_pad(dy, ctx["sizes"], self._multiple if in_products else 1)
        if not self._wants_any(self.bias_names):
            return nvte.grouped_cast(padded, sizes, types) if in_products else None, None
        dbias_type = getattr(self, f"d{self.bias_names[0]}_dtype")
        if scales is not None:
            dbias = nvte.grouped_dbias_scaled(dy, ctx["sizes"], scales, dbias_type)
            return nvte.grouped_cast(padded, sizes, types) if in_products else None, dbias
        return nvte.grouped_bgrad_cast(padded, sizes, types if in_products else [dy.type] * self.groups, dbias_type)

    def _dbiases(self, dbias: Tensor | None) -> list[Tensor | None]:
        if dbias is None or len(getattr(self, self.bias_names[0]).shape) == 2:
            return [dbias] * len(self.bias_names)
        return [part if self.wants(name) else None for name, part in zip(self.bias_names, nvte.unstack(dbias), strict=True)]

    def _dsides(self, dy: Tensor, ctx: Context) -> dict[str, Tensor | None]:
        dsides: dict[str, Tensor | None] = dict.fromkeys(self.side_inputs)
        if self.scale_bias and self.wants(self.side_inputs[1]):
            scales, bias = ctx["scales"], self._bias([ctx[name] for name in self.bias_names])
            dsides[self.side_inputs[1]] = nvte.reshape(nvte.grouped_dscales(dy, ctx["sizes"], bias, nvte.element(scales.type)), scales.shape)
        return dsides


def _by_rows_alone(weight: Tensor) -> bool:
    return isinstance(weight.type, nvte.QuantizedType) and weight.type.by_rows_alone


def _names(name: str, tensors: Sequence[Tensor], whole: int) -> tuple[str, ...]:
    """The names of the parameters of all groups: one, where the only tensor has ``whole`` dimensions."""
    if len(tensors) == 1 and len(tensors[0].shape) == whole:
        return (name,)
    return tuple(f"{name}{i}" for i in range(len(tensors)))


def _matrix(x: Tensor) -> Tensor:
    return x if len(x.shape) == 2 else nvte.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
