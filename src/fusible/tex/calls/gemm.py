"""A call of generic_gemm: its shape rules, and what of it is checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError, expected
from fusible.tex.formats import PLAIN, format_of, is_quantized, logical_shape, scaling
from fusible.tex.interface.arguments import DTypeLike, Tensor
from fusible.tex.interface.declare import CallArguments
from fusible.tex.interface.gemm import GEMM
from fusible.tex.interface.specialize import SpecializedCall, specialized_by
from fusible.tex.protocol import QuantizerLike, TensorLike, outer

__all__ = ["GemmBySteps", "GemmJob", "GemmShape", "GemmTypes", "check_bias", "check_gelu_input", "gemm_shape"]

T = TypeVar("T")


class GemmShape(NamedTuple):
    """``op(B) [rows, depth] @ op(A) [depth, columns]``, whose result is shown as ``output``."""

    rows: int
    columns: int
    depth: int
    output: tuple[int, ...]

    @property
    def empty(self) -> bool:
        """Whether an operand has no elements."""
        return not (self.rows and self.columns and self.depth)


def gemm_shape(a: Sequence[int], trans_a: bool, b: Sequence[int], trans_b: bool) -> GemmShape:
    """The shape rules of ``generic_gemm``; raises ``ShapeError`` where the contracted dimensions differ."""
    if len(a) < 1 or len(b) < 1:
        raise ShapeError(expected("at least one dimension", of="A and B of generic_gemm", got=f"{list(a)} and {list(b)}", do="pass matrices"))
    a0, a1, b0, b1 = outer(a), a[-1], outer(b), b[-1]
    depth_a, columns = (a1, a0) if trans_a else (a0, a1)
    rows, depth = (b1, b0) if trans_b else (b0, b1)
    if depth_a != depth:
        layout = f"{'T' if trans_a else 'N'}{'T' if trans_b else 'N'}"
        raise ShapeError(
            expected(
                f"equal contracted dimensions in layout {layout}",
                of="A and B of generic_gemm, where D = op(B) @ op(A)",
                got=f"{depth_a} of A {list(a)} and {depth} of B {list(b)}",
                do="exchange A and B, or change a transpose flag",
            )
        )
    return GemmShape(rows, columns, depth, (b1, columns) if trans_b else (*b[:-1], columns))


def _check_beta(accumulate: bool, beta: float | None, has_output: bool) -> float:
    """The factor of D in ``generic_gemm``; raises ``ArgumentError`` for a combination that means nothing."""
    if not accumulate:
        if beta:
            raise ArgumentError(expected("beta 0 or None without accumulate", of="generic_gemm", got=beta, do="pass accumulate=True"))
        return 0.0
    if not has_output:
        raise ArgumentError(expected("a given D", of="an accumulating generic_gemm", got="None", do="pass D, or accumulate=False"))
    return 1.0 if beta is None else float(beta)


class GemmJob(NamedTuple, Generic[T]):
    """A checked call: ``D = alpha * op(B) @ op(A) + beta * D``, by ``quantizer`` where there is one.

    ``dtype`` is that of the result, ``quantized`` whether both operands are, ``per_tensor`` whether with one scale each, ``beta`` 0 where D is not
    read.
    """

    A: Tensor
    transA: bool
    B: Tensor
    transB: bool
    D: Tensor | None
    quantizer: QuantizerLike | None
    shape: GemmShape
    dtype: T
    quantized: bool
    alpha: float
    beta: float
    per_tensor: bool


@dataclass(frozen=True)
class GemmTypes(Generic[T]):
    """A backend's dtypes: ``floating``, its values of fp32, bf16 and fp16; ``nominal(x)``, the unquantized dtype of an operand; ``of(dtype)``, a
    given dtype as one of its own."""

    floating: frozenset[T]
    nominal: Callable[[Any], T]
    of: Callable[[Any], T]

    def check(
        self, A: Any, transA: bool, B: Any, transB: bool, D: Any, quantizer: Any, output_dtype: Any, accumulate: bool, alpha: float, beta: Any
    ) -> GemmJob[T]:
        """The call as a job. Raises ``ShapeError``, ``DTypeError`` or ``ArgumentError`` for what does not fit together."""
        format_a, format_b = format_of(A), format_of(B)
        shape = gemm_shape(format_a.shape(A), transA, format_b.shape(B), transB)
        factor = _check_beta(accumulate, beta, D is not None)
        stands_for = self.nominal(A)
        for name, x, form in (("A", A, format_a), ("B", B, format_b)):
            # What a quantized tensor stands for may be FP8 itself: its values are its bytes and scales.
            if form is PLAIN and (dtype := self.nominal(x)) not in self.floating:
                raise DTypeError(expected("float32, bfloat16, float16 or FP8", of=f"{name} of generic_gemm", got=dtype, do="cast it"))
        dtype = stands_for if output_dtype is None else self.of(output_dtype)
        if dtype not in self.floating and output_dtype is None and D is not None and not is_quantized(D):
            dtype = self.nominal(D)
        if dtype not in self.floating:
            raise DTypeError(expected("float32, bfloat16 or float16", of="output_dtype of generic_gemm", got=dtype, do="pass a quantizer for FP8"))
        if D is not None:
            dtype = self._check_output(D, shape, dtype, output_dtype is not None, factor)
        if quantizer is not None:
            scaling(quantizer)
            if accumulate:
                raise ArgumentError(expected("no quantizer", of="an accumulating generic_gemm", got="one", do="accumulate in high precision"))
        elif D is not None and is_quantized(D):
            quantizer = D._quantizer
        quantized, per_tensor = format_a is not PLAIN and format_b is not PLAIN, format_a.per_tensor and format_b.per_tensor
        return GemmJob(A, transA, B, transB, D, quantizer, shape, dtype, quantized, float(alpha), factor, per_tensor)

    def _check_output(self, D: Tensor, shape: GemmShape, dtype: T, dtype_given: bool, factor: float) -> T:
        if logical_shape(D) != shape.output:
            got = list(logical_shape(D))
            raise ShapeError(expected(f"shape {list(shape.output)}", of="D of generic_gemm", got=got, do="pass a tensor of that shape"))
        if is_quantized(D):
            if factor:
                raise ArgumentError(expected("an unquantized D", of="an accumulating generic_gemm", got="FP8", do="accumulate in high precision"))
            return dtype
        if dtype_given and D.dtype is not dtype:
            raise DTypeError(expected(f"output_dtype {D.dtype}, that of D", of="generic_gemm", got=dtype, do="pass None or D's dtype"))
        if D.dtype not in self.floating:
            raise DTypeError(expected("float32, bfloat16 or float16", of="D of generic_gemm", got=D.dtype, do="pass such a tensor"))
        return D.dtype


def _specialized(backend: GemmBySteps, call: CallArguments) -> SpecializedCall | None:
    plain = call.D is None and call.extra_output is None and not call.accumulate and not call.beta
    if not plain or call.quantizer is not None or call.alpha != 1.0 or call.comm_overlap is not None:
        return None
    kernel = backend._plain_gemm(call.A, call.transA, call.B, call.transB, call.output_dtype, call.bias, call.gelu, call.grad)
    return None if kernel is None else SpecializedCall(kernel, (call.A, call.B, call.bias))


class GemmBySteps(GEMM):
    """Checks a call and hands it to the one step that backends differ in."""

    NAME: str
    _gemm_types: ClassVar[GemmTypes[Any]]

    def _plain_gemm(
        self, A: Any, transA: bool, B: Any, transB: bool, output_dtype: Any, bias: Any, gelu: bool, grad: bool
    ) -> Callable[[Any, Any, Any], list[Any]] | None:
        """What gives ``[D, bias_grad, pre_gelu_out, None]`` of ``(A, B, bias)`` where ``_gemm`` would take none of its steps, else None: asked before
        anything is checked, with no D, quantizer, alpha or beta."""
        return None

    def _gemm_added_at_once(self, A: Any, transA: bool, B: Any, transB: bool, D: Any, output_dtype: Any) -> list[Any] | None:
        """``generic_gemm`` of what is added to D and no more, as ``_plain_gemm`` would compute it."""
        return None

    def _gemm(
        self, job: GemmJob[Any], bias: TensorLike | None, bias_type: DTypeLike | None, gelu: bool, gelu_in: TensorLike | None, grad: bool
    ) -> tuple[Any, Any, Any]:
        """``(D, bias_grad, pre_gelu_out)``."""
        raise NotImplementedError

    @specialized_by(_specialized)
    def generic_gemm(
        self,
        A: Tensor,
        transA: bool,
        B: Tensor,
        transB: bool,
        D: Tensor | None,
        quantizer: QuantizerLike | None,
        output_dtype: DTypeLike | None,
        bias: TensorLike | None,
        bias_type: DTypeLike | None,
        gelu: bool,
        gelu_in: TensorLike | None,
        grad: bool,
        accumulate: bool,
        use_split_accumulator: bool,
        comm_overlap: Any = None,
        comm_type: Any = None,
        extra_output: Any = None,
        bulk_overlap: bool = False,
        alpha: float = 1.0,
        beta: float | None = None,
    ) -> list[Any]:
        if quantizer is None and alpha == 1.0 and comm_overlap is None:
            done = None
            if D is None and not accumulate and not beta:
                kernel = self._plain_gemm(A, transA, B, transB, output_dtype, bias, gelu, grad)
                done = kernel(A, B, bias) if kernel is not None else None
            elif D is not None and accumulate and beta in (None, 1.0) and bias is None and not gelu and not grad:
                done = self._gemm_added_at_once(A, transA, B, transB, D, output_dtype)
            if done is not None:
                done[3] = extra_output
                return done
        if comm_overlap is not None:
            of = f"the {self.NAME} backend's generic_gemm"
            raise NotServedError(expected("no comm_overlap", of=of, got=type(comm_overlap).__name__, do="pass None"))
        job = self._gemm_types.check(A, transA, B, transB, D, quantizer, output_dtype, accumulate, alpha, beta)
        return [*self._gemm(job, bias, bias_type, gelu, gelu_in, grad), extra_output]


def check_bias(bias: TensorLike, job: GemmJob[Any]) -> None:
    """Raise ``ShapeError`` unless ``bias`` has one element per column of the result."""
    if tuple(bias.shape) != (job.shape.columns,):
        got = list(bias.shape)
        raise ShapeError(expected(f"shape [{job.shape.columns}]", of="bias of generic_gemm", got=got, do="pass one value per column of D"))


def check_gelu_input(gelu_in: TensorLike | None, job: GemmJob[Any]) -> None:
    """Raise ``ShapeError`` unless ``gelu_in`` is given, in the shape of the result."""
    if gelu_in is None or tuple(gelu_in.shape) != job.shape.output:
        got = "None" if gelu_in is None else list(gelu_in.shape)
        raise ShapeError(expected(f"shape {list(job.shape.output)}", of="gelu_in with grad", got=got, do="pass the input of the GELU"))
