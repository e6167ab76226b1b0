"""The matrix product with an FP8 operand, by the compiled kernel: it decodes while packing, and scales, adds, activates and rounds at the store."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.errors import NotServedError
from fusible.tex.backends.cpu.blocks import StoredCodes, codes_of_blocks, fails_to_cancel, operand_of_blocks, stored_codes
from fusible.tex.backends.cpu.kernel_calls import Value, native_program, specialized
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.layouts import HOST, PLAIN_CLASSES, as_read, layouts, pattern
from fusible.tex.backends.cpu.output import produce
from fusible.tex.backends.cpu.quantize import dequantize, quantize_tensor
from fusible.tex.backends.cpu.sums import sums_as_data, sums_of_columns
from fusible.tex.calls.gemm import GemmBySteps, GemmJob, GemmTypes, check_bias, check_gelu_input
from fusible.tex.enums import DType
from fusible.tex.formats import PLAIN, WAYS, format_of, is_quantized, nominal, scheme_of, transposed
from fusible.tex.formats.block_reading import Codes
from fusible.tex.interface.declare import DECLARATIONS, CallArguments, Request, handing_on, inherited, requires
from fusible.tex.interface.kernel_calls import Buffer
from fusible.tex.interface.specialize import SpecializedCall, specialize, specialized_by
from fusible.tex.protocol import to_torch
from fusible.tex.selection.dispatch import method_after, successor

__all__ = ["GemmKernels", "products_gain"]

_Job = GemmJob[torch.dtype]
_BF16, _FP32 = ("cpu", torch.bfloat16), ("cpu", torch.float32)
_BF16_NAMES = (None, torch.bfloat16, DType.kBFloat16)
_NO_GELU, _GELU, _GELU_GRADIENT = range(3)


_ALL = 2**62
_VECTORS = {torch.float32: 2**13, torch.bfloat16: _ALL}
_DONE_HERE = {"amx": {torch.float32: 2**13, torch.bfloat16: 2**16}, "avx512bf16": _VECTORS, "avx512": _VECTORS, "avx2": _VECTORS}
"""By the CPU's level, up to how many elements of the largest of its three matrices a product of unquantized operands is done here, as measured beside
torch's: of bfloat16 that takes 2 to 100 times as long without tiles. Larger ones are handed over, and at other levels all."""
_FEW_ROWS = 8
"""For which a weight of bfloat16 is read as it lies, tiles or none (kMaxFewTiledRows of cppsrc/gemm)."""


def products_gain(A: Hashable, B: Hashable, is_plain: bool) -> str | None:
    """None where the kernel is the better one for operands of these kinds; otherwise what it is better for.

    ``is_plain``: torch's own product of bfloat16 serves what is wanted, which is as fast on tiles. For the rest torch has a product of float32.
    """
    if any(isinstance(kind, tuple) and len(kind) == 3 for kind in (A, B)):
        return None
    level = native.get_level()
    if A == B == _BF16 and ((level == "amx" and not is_plain) or _done_here(level, torch.bfloat16) == _ALL):
        return None
    return "serves products with an FP8 operand, and of bfloat16 where it is the faster one; others are left to torch's own"


def _better_here(request: Request) -> str | None:
    if request["A"] == request["B"] and request["A"] in (_FP32, _BF16):
        return None  # what torch does as fast is handed over
    return products_gain(request["A"], request["B"], True)


def _done_here(level: str, dtype: torch.dtype) -> int:
    return _DONE_HERE.get(level, {}).get(dtype, 0)


_SMALL = {dtype: min(most[dtype] for most in _DONE_HERE.values()) for dtype in _VECTORS}
"""Elements of the largest of a product's three matrices up to which a program is kept for its sizes: as many as are done here at every level that
does any, so that who is faster need not be asked again."""


def _stored(x: Any, transpose: bool, way: str) -> StoredCodes | None:
    """The operand ``x``, where it lies as it is read."""
    if as_read(x):
        return StoredCodes(x, transpose, x.dtype, None, False, 1.0)
    if not is_quantized(x):
        return None
    if format_of(x).per_tensor:
        if x._data is None or not as_read(x._data, x._scale_inv):
            return None
        return StoredCodes(x._data, transpose, int(x._fp8_dtype), None, False, x._scale_inv)
    stored = stored_codes(x, way)
    return None if stored is None else stored._replace(turned=transpose != stored.turned)


def _sums_separately(arguments: Mapping[str, Any]) -> bool:
    """Whether a product that is handed over goes with the sum of B's rows, the gradient of a bias: sums of rows have one order here, and are added up
    here."""
    return arguments["grad"] and arguments["bias"] is not None and not arguments["gelu"] and arguments["quantizer"] is None


def _specialized_elsewhere(self: GemmKernels, call: CallArguments) -> SpecializedCall | None:
    sums = _sums_separately(vars(call))
    for_next = vars(call) | {"bias": None} if sums else vars(call)
    found = specialize(method_after(self, "generic_gemm", **for_next), tuple(for_next.values()))  # type: ignore[arg-type]
    if found is None or not sums:
        return found
    place = next((place for place, x in enumerate(found.operands) if x is call.B), None)
    if place is None:
        return None
    multiply = found.compute

    def compute(*operands: Any) -> list[Any]:
        result, _, *rest = multiply(*operands)
        return [result, _row_sum(operands[place], result.dtype), *rest]

    return SpecializedCall(compute, found.operands)


def _specialized(self: GemmKernels, call: CallArguments) -> SpecializedCall | None:
    """Of a product that is alone, or goes with a bias, a GELU, or what it is added to; of one that is handed over, what it comes to there."""
    if self._hands_over(call.A, call.transA, call.B, call.transB, call.D, call.output_dtype, call.bias, call.gelu):
        return _specialized_elsewhere(self, call)
    ways = WAYS[not call.transA], WAYS[call.transB]
    if any(x is not None for x in (call.quantizer, call.comm_overlap, call.extra_output)) or fails_to_cancel(call.A, ways[0], call.B, ways[1]):
        return None
    if not all(x is None or as_read(x) for x in (call.bias, call.D)) or (call.grad and call.gelu):
        return None
    job = self._gemm_types.check(call.A, call.transA, call.B, call.transB, call.D, None, call.output_dtype, call.accumulate, call.alpha, call.beta)
    if job.shape.empty or job.alpha != 1.0 or (job.D is not None and call.gelu):
        return None
    left, right = _stored(call.B, call.transB, ways[1]), _stored(call.A, call.transA, ways[0])
    if left is None or right is None or left.tiled:
        return None
    result, pre = Buffer(job.dtype, job.shape.output) if job.D is None else job.D, None
    if call.gelu:
        pre = Buffer(to_torch(call.bias_type) if job.quantized and call.bias_type is not None else job.dtype, job.shape.output)
    of_left = {"left": left.data, "left_transposed": left.turned, "left_dtype": left.dtype, "left_scale": left.factor, "left_scales": left.scales}
    of_right = {"right": right.data, "right_transposed": right.turned, "right_dtype": right.dtype, "right_scale": right.factor}
    of_right |= {"right_scales": right.scales, "right_tiled": right.tiled}
    epilogue = {
        "bias": None if call.grad else call.bias,
        "addend": job.D,
        "beta": job.beta,
        "gelu": _GELU if call.gelu else _NO_GELU,
        "pre_gelu": pre,
    }
    product = kernel_call("gemm", **of_left, **of_right, dst=result, dtype=job.dtype, **epilogue)
    if not call.grad or call.bias is None:
        return specialized([result, None, pre, None], *left.before, *right.before, product)
    summed = sums_as_data(call.B, job.dtype)
    return None if summed is None else specialized([result, summed[0], pre, None], *left.before, *right.before, product, *summed[1])


_PARAMETERS = tuple(DECLARATIONS["generic_gemm"].signature.parameters)
_OWN_PARAMETERS = tuple(inspect.signature(GemmBySteps.generic_gemm).parameters)[1:]
_ALONE = (
    "D is None and quantizer is None and not accumulate and not beta and alpha == 1.0 and comm_overlap is None and extra_output is None "
    "and self._does_small_products()"
)
_BY_SIZE = (
    f"multiply(A, B, bias) if {_ALONE} "
    "and (multiply := self._plain_gemm(A, transA, B, transB, output_dtype, bias, gelu, grad)) is not None "
    f"else self._handed_over({', '.join(_PARAMETERS)}) if self._hands_over(A, transA, B, transB, D, output_dtype, bias, gelu) "
    f"else self._own_gemm({', '.join(_OWN_PARAMETERS)})"
)
"""``generic_gemm`` here: no kind of an argument shows its size, so that who is faster is known only in the call. A small product of operands as they
lie is made before anything else is asked, as its call is most of its time."""


_Multiply = Callable[[Tensor, Tensor, Tensor | None], list[Any]]
_KEPT = 256
_small_products: dict[tuple[Hashable, ...], _Multiply | None] = {}
"""By how the operands lie, and the arguments that tell what their product is."""


def _small_product(A: Tensor, transA: bool, B: Tensor, transB: bool, output_dtype: Any, bias: Tensor | None) -> _Multiply | None:
    """``[D, None, None, None]`` of all operands that lie as these do; None where that is no small product of contiguous matrices of one dtype."""
    dtype = A.dtype
    if not as_read(A, B) or B.dtype is not dtype or dtype not in _SMALL or A.dim() != 2 or B.dim() != 2:
        return None
    if output_dtype is not None and to_torch(output_dtype) is not dtype:
        return None
    (depth, columns), (rows, depth_of_b) = A.shape[::-1] if transA else A.shape, B.shape[::-1] if transB else B.shape
    if depth != depth_of_b or max(columns * depth, rows * depth, rows * columns) > _SMALL[dtype] or not (rows and columns and depth):
        return None
    if bias is not None and not (as_read(bias) and bias.dtype is dtype and bias.shape == (columns,)):
        return None
    shapes = [(columns, depth) if transA else (depth, columns), (depth, rows) if transB else (rows, depth), (rows, columns)]
    values: list[Value] = [(number, 0, dtype, shape, (shape[1], 1)) for number, shape in enumerate(shapes)]
    kinds = {"left_transposed": transB, "left_dtype": dtype, "left_scale": 1.0, "right_transposed": transA, "right_dtype": dtype, "right_scale": 1.0}
    places = {"right": 0, "left": 1, "dst": 2}
    if bias is not None:
        values.append((3, 0, dtype, (columns,), (1,)))
        places["bias"] = 3
    run, like = native_program(len(values), values, [("gemm", kinds | {"dtype": dtype}, places)]), pattern(shapes[2], dtype)

    def multiply(A: Tensor, B: Tensor, bias: Tensor | None) -> list[Any]:
        result = torch.empty_like(like)
        if not run([A, B, result] if bias is None else [A, B, result, bias]):  # of numbers that are negated in word only
            run([x.resolve_neg() for x in ((A, B, result) if bias is None else (A, B, result, bias))])
        return [result, None, None, None]

    return multiply


class GemmKernels(GemmBySteps):
    _gemm_types = GemmTypes(frozenset({torch.float32, torch.bfloat16, torch.float16}), nominal, to_torch)
    _own_gemm = inherited(GemmBySteps.generic_gemm)
    generic_gemm = specialized_by(_specialized)(requires(_better_here)(handing_on("generic_gemm", _BY_SIZE)))

    def _hands_over(self, A: Any, transA: bool, B: Any, transB: bool, D: Any, output_dtype: Any, bias: Any, gelu: bool) -> bool:
        """Whether a product of unquantized operands is one that torch does as fast: a large one, but of a few rows, whose matrix is read once. What
        is of a subclass of torch's is, too: torch knows what it is, and one that is faked has no memory."""
        plain = A.__class__ in PLAIN_CLASSES and B.__class__ in PLAIN_CLASSES
        if not plain and (is_quantized(A) or is_quantized(B)):
            return False
        dtype = A.dtype
        if B.dtype is not dtype or dtype not in _SMALL:
            return False
        level = native.get_level()
        if dtype is torch.bfloat16 and level == "amx":
            alone = D is None and not gelu and not transB and output_dtype in _BF16_NAMES and (bias is None or bias.dtype is dtype)
            if not alone:
                return False
        most = _done_here(level, dtype)
        if plain and most == _ALL:
            return False
        of_a, of_b = A.numel(), B.numel()
        if not (plain and of_a and of_b and A.dim() > 1):
            return True
        depth = A.shape[-1] if transA else of_a // A.shape[-1]
        columns, rows = of_a // depth, of_b // depth
        return max(of_a, of_b, columns * rows) > most and not (most and dtype is torch.bfloat16 and rows <= _FEW_ROWS and transA)

    def _plain_gemm(
        self, A: Any, transA: bool, B: Any, transB: bool, output_dtype: Any, bias: Tensor | None, gelu: bool, grad: bool
    ) -> _Multiply | None:
        """A small product of two matrices as they lie, by a program made for such: half of what checks, choices and a function's call take."""
        if gelu or (grad and bias is not None) or A.__class__ not in PLAIN_CLASSES:
            return None
        key = (layouts([A, B] if bias is None else [A, B, bias]), transA, transB, output_dtype)
        try:
            return _small_products[key]
        except KeyError:
            if len(_small_products) >= _KEPT:
                _small_products.clear()
            found = _small_products[key] = None if key[0] is None else _small_product(A, transA, B, transB, output_dtype, bias)
            return found

    def _does_small_products(self) -> bool:
        """Whether small products of unquantized operands are done here, as they are at most levels."""
        return native.get_level() in _DONE_HERE

    def _handed_over(self, *arguments: Any) -> list[Any]:
        """By the next backend; where there is none that may serve, here."""
        by_name = dict(zip(_PARAMETERS, arguments, strict=True))
        sums = _sums_separately(by_name)
        try:
            found: list[Any] = _of_next(self)(**(by_name | {"bias": None} if sums else by_name))
        except NotServedError:
            return self._own_gemm(*(by_name[name] for name in _OWN_PARAMETERS))
        return [found[0], _row_sum(by_name["B"], found[0].dtype), *found[2:]] if sums else found

    def _gemm(self, job: _Job, bias: Any, bias_type: Any, gelu: bool, gelu_in: Any, grad: bool) -> tuple[Any, Any, Any]:
        if grad:
            return _backward(job, bias, gelu, gelu_in)
        if bias is not None:
            check_bias(bias, job)
            bias = None if job.shape.empty else bias.contiguous()
        pre_gelu = None
        if gelu:
            pre_gelu_dtype = to_torch(bias_type) if job.quantized and bias_type is not None else job.dtype
            pre_gelu = torch.empty(job.shape.output, dtype=pre_gelu_dtype, device=HOST)
        epilogue: dict[str, Any] = {} if bias is None else {"bias": bias}
        if gelu:
            epilogue |= {"gelu": _GELU, "pre_gelu": pre_gelu}
        return _product(job, **epilogue), None, pre_gelu


@functools.cache
def _of_next(backend: GemmKernels) -> Callable[..., Any]:
    return successor("generic_gemm", backend)  # type: ignore[arg-type]


def _backward(job: _Job, bias: Any, gelu: bool, gelu_in: Any) -> tuple[Any, Tensor | None, None]:
    if not gelu:
        return _product(job), None if bias is None else _row_sum(job.B, job.dtype), None
    check_gelu_input(gelu_in, job)
    sums = None if bias is None else torch.empty(job.shape.columns, dtype=torch.float32, device=HOST)
    step = _NO_GELU if job.shape.empty else _GELU_GRADIENT
    result = _product(job, gelu=step, pre_gelu=gelu_in.contiguous(), column_sums=sums)
    return result, None if sums is None else sums.to(job.dtype), None


def _product(job: _Job, **epilogue: Any) -> Any:
    """``D`` by the native kernel. Its left operand is ``B``: rows come first there, as in memory."""
    ways = WAYS[not job.transA], WAYS[job.transB]
    in_blocks = not job.per_tensor and (format_of(job.A).block_scaled or format_of(job.B).block_scaled)
    undo = in_blocks and fails_to_cancel(job.A, ways[0], job.B, ways[1])
    left, right = (_codes(job.B, ways[1], undo), _codes(job.A, ways[0], undo)) if in_blocks and not job.shape.empty else (None, None)
    left = None if left is not None and left.tiled else left
    if left is not None:
        epilogue["left_scales"] = left.scales
    if right is not None:
        epilogue |= {"right_scales": right.scales, "right_tiled": right.tiled}
    operands = (*_operand(job.B, job.transB, ways[1], undo, left), *_operand(job.A, job.transA, ways[0], undo, right))
    if job.D is not None and job.beta:
        epilogue |= {"addend": job.D.contiguous(), "beta": job.beta}
    if job.alpha != 1.0:
        epilogue["alpha"] = job.alpha

    kernel = partial(native.gemm, **epilogue) if epilogue else native.gemm
    if job.quantizer is None or job.quantized or not scheme_of(job.quantizer).per_tensor:
        return produce(kernel, operands, job.shape.output, job.dtype, job.quantizer, job.D)
    return quantize_tensor(produce(kernel, operands, job.shape.output, job.dtype, None), job.quantizer, job.D)


def _codes(x: Any, way: str, undo: bool) -> Codes | None:
    """An operand in blocks as it is stored, where the kernel reads it so."""
    return codes_of_blocks(x, way, undo) if format_of(x).block_scaled else None


def _operand(x: Any, transpose: bool, way: str, undo: bool, codes: Codes | None) -> tuple[Tensor, bool, Any, Any]:
    """A stored matrix, whether it is transposed, what its elements are and their factor: as the kernel takes them. ``way``: the copy whose lines are
    contracted; ``undo`` takes back a transform of them; ``codes``: of an operand that is read as it lies."""
    if codes is not None:
        return codes.data, transpose != codes.turned, int(codes.dtype), codes.factor
    form = format_of(x)
    if form is PLAIN:
        return x.contiguous(), transpose, x.dtype, 1.0
    if not form.per_tensor:
        values, turned, factor = operand_of_blocks(x, way, undo)
        return values, transpose != turned, values.dtype, factor
    if x._data is not None:
        return x._data.contiguous(), transpose, int(x._fp8_dtype), x._scale_inv
    data = transposed(x)
    return data.reshape(data.shape[0], -1), not transpose, int(x._fp8_dtype), x._scale_inv


def _row_sum(B: Any, dtype: torch.dtype) -> Tensor:
    """The bias gradient of a weight-gradient product: B summed over its rows."""
    return sums_of_columns(dequantize(B, torch.float32) if is_quantized(B) else B).to(dtype)
