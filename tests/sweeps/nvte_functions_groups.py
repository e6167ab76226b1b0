"""Right calls of nvte: groups and experts, collectives, and of types and what holds tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from nvte_draws import DRAWN_CALLS, FLOATS, FP8, Draw, DrawnCall, Wanted, draws, f64, half_unit, share
from nvte_functions_products import product
from torch.nn import functional as F

from fusible import nvte
from fusible.nvte import DType, QuantizedType, Tensor

# Groups.


def _groups(draw: Draw, whole: int = 1) -> tuple[Tensor, list[int]]:
    sizes = [whole * draw.of(0, 1, 2, 3, 8) for _ in range(draw.of(1, 2, 3))]
    return nvte.make_nvte_tensor(torch.tensor(sizes, dtype=draw.of(torch.int32, torch.int64))), sizes


def _padded(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    return torch.cat([F.pad(part, (0, 0, 0, -len(part) % multiple)) for part in parts])


@draws("grouped_pad")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    x, multiple = draw.tensor(sum(counts), draw.columns()), draw.of(1, 4, 16)
    wanted = _padded(f64(x).split(counts), multiple)

    def check(found: Any) -> None:
        padded, padded_sizes = found
        assert torch.equal(f64(padded)[: len(wanted)], wanted) and not f64(padded)[len(wanted) :].any()
        assert padded_sizes.data.tolist() == [count + -count % multiple for count in counts]

    return DrawnCall({"x": x, "sizes": sizes, "multiple": multiple}, check)


@draws("grouped_unpad")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    multiple = draw.of(1, 4, 16)
    x = draw.tensor(sum(count + -count % multiple for count in counts), draw.columns())
    parts = f64(x).split([count + -count % multiple for count in counts])
    value = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return DrawnCall({"x": x, "sizes": sizes, "multiple": multiple, "rows": sum(counts)}, [Wanted(value, exact=True, type=x.type)])


def _members(x: Tensor, counts: Sequence[int], columns: int) -> list[torch.Tensor]:
    """The values of a grouped tensor, group by group."""
    held = x.data
    if nvte.is_quantized_type(x.type):
        return [f64(Tensor(part, x.type)) for part in held.split_into_quantized_tensors()]
    flat = held.rowwise_data.double()
    return list(flat[: sum(counts) * columns].view(-1, columns).split(list(counts)))


@draws("grouped_cast")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    x, type = draw.tensor(sum(counts), draw.columns()), draw.of(*FLOATS)

    def check(found: Any) -> None:
        for part, got in zip(f64(x).split(counts), _members(found, counts, x.shape[1]), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(part, rounded=(type,)), None) <= 1

    return DrawnCall({"x": x, "sizes": sizes, "types": [type] * len(counts)}, check)


@draws("grouped_bgrad_cast")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    dy, type, dbias_type = draw.tensor(sum(counts), draw.columns()), draw.of(*FLOATS), draw.type()
    parts = f64(dy).split(counts)
    rounded = (dy.type,)
    sums = Wanted(torch.stack([p.sum(0) for p in parts]), sum(counts), torch.stack([p.abs().sum(0) for p in parts]), type=dbias_type, rounded=rounded)

    def check(found: Any) -> None:
        for part, got in zip(parts, _members(found[0], counts, dy.shape[1]), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(part, rounded=(type,)), None) <= 1
        assert share(found[1], sums, dbias_type) <= 1

    return DrawnCall({"dy": dy, "sizes": sizes, "types": [type] * len(counts), "dbias_type": dbias_type}, check)


@draws("grouped_cast_stack")
def _(draw: Draw) -> DrawnCall:
    groups, rows, columns = draw.of(1, 2, 3), 8 * draw.of(1, 2), 16 * draw.of(1, 2)
    x = draw.tensor(groups, rows, columns)

    def check(found: Any) -> None:
        for part, got in zip(f64(x), _members(found, [rows] * groups, columns), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(part, rounded=(FP8[0],)), None) <= 1

    return DrawnCall({"x": x, "types": [FP8[0]] * groups}, check)


@draws("grouped_dequantize")
def _(draw: Draw) -> DrawnCall:
    groups, rows, columns = draw.of(1, 2, 3), 8 * draw.of(1, 2), 16 * draw.of(1, 2)
    x, dtype = nvte.grouped_cast_stack(draw.tensor(groups, rows, columns), [draw.of(*FP8)] * groups), draw.of(*FLOATS)

    def check(found: Any) -> None:
        for value, got in zip(_members(x, [rows] * groups, columns), _members(found, [rows] * groups, columns), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(value, rounded=(dtype,)), None) <= 1

    return DrawnCall({"x": x, "dtype": dtype}, check)


def _experts(draw: Draw, kind: DType) -> tuple[Tensor, list[int], list[Tensor]]:
    sizes, counts = _groups(draw)
    n, k = draw.columns(), draw.columns()
    return sizes, counts, [draw.tensor(n, k, type=kind) for _ in counts]


def _by_group(parts: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor], more: Sequence[torch.Tensor] | None = None, **options: Any) -> Wanted:
    products = [product(a, b, None) for a, b in zip(parts, matrices, strict=True)]
    values, sizes = [p.value for p in products], [p.magnitude for p in products]
    if more is not None:
        values, sizes = [v + m for v, m in zip(values, more, strict=True)], [s + m.abs() for s, m in zip(sizes, more, strict=True)]  # type: ignore[operator]
    join = torch.cat if options.pop("side_by_side", True) else torch.stack
    return Wanted(join(values), max([1, *(p.shape[1] for p in parts)]), join(sizes), **options)  # type: ignore[arg-type]


@draws("grouped_matmul_transpose")
def _(draw: Draw) -> DrawnCall:
    kind, type = draw.type(), draw.type()
    sizes, counts, weights = _experts(draw, kind)
    n, k = weights[0].shape
    x = draw.tensor(sum(counts), k, type=kind)
    bias = draw.tensor(len(counts), n, type=type) if draw.of(True, False) else None
    scale = draw.tensor(sum(counts)) if bias is not None and draw.of(True, False) else None
    more = None
    if bias is not None:
        factors = (torch.ones(sum(counts)).double() if scale is None else f64(scale)).split(counts)
        more = [f[:, None] * b for f, b in zip(factors, f64(bias), strict=True)]
    operands = f64(x).split(counts), [f64(w).T for w in weights]
    # A bias is added to the product that was rounded, which may be larger than the sum.
    once = 0.0 if bias is None else half_unit(type, _by_group(*operands).value)
    wanted = _by_group(*operands, more, type=type, slack=once)
    call = {"x": nvte.grouped_cast(x, sizes, [kind] * len(counts)), "weights": weights, "type": type, "bias": bias, "bias_scale": scale}
    return DrawnCall(call, [wanted])


@draws("grouped_matmul")
def _(draw: Draw) -> DrawnCall:
    kind, type = draw.type(), draw.type()
    sizes, counts, weights = _experts(draw, kind)
    dy = draw.tensor(sum(counts), weights[0].shape[0], type=kind)
    wanted = _by_group(f64(dy).split(counts), [f64(w) for w in weights], type=type)
    return DrawnCall({"dy": nvte.grouped_cast(dy, sizes, [kind] * len(counts)), "weights": weights, "type": type}, [wanted])


def _wgrad(draw: Draw) -> tuple[Tensor, Tensor, list[torch.Tensor], list[torch.Tensor], DType]:
    kind = draw.type()
    sizes, counts = _groups(draw)
    dy, x = draw.tensor(sum(counts), draw.columns(), type=kind), draw.tensor(sum(counts), draw.columns(), type=kind)
    types = [kind] * len(counts)
    parts = [p.T for p in f64(dy).split(counts)], list(f64(x).split(counts))
    return nvte.grouped_cast(dy, sizes, types), nvte.grouped_cast(x, sizes, types), *parts, kind


@draws("grouped_transpose_matmul")
def _(draw: Draw) -> DrawnCall:
    dy, x, a, b, _ = _wgrad(draw)
    type = draw.type()
    return DrawnCall({"dy": dy, "x": x, "type": type}, [_by_group(a, b, type=type, side_by_side=False)])


@draws("grouped_transpose_matmul_add")
def _(draw: Draw) -> DrawnCall:
    dy, x, a, b, kind = _wgrad(draw)
    addends = [nvte.copy(draw.tensor(dy.shape[1], x.shape[1], type=kind)) for _ in a]
    wanted = [product(p, q, kind, f64(c)) for p, q, c in zip(a, b, addends, strict=True)]
    return DrawnCall({"dy": dy, "x": x, "addends": addends}, wanted)


@draws("grouped_transpose_matmul_add_whole")
def _(draw: Draw) -> DrawnCall:
    dy, x, a, b, kind = _wgrad(draw)
    addend = nvte.copy(draw.tensor(len(a), dy.shape[1], x.shape[1], type=kind))
    return DrawnCall({"dy": dy, "x": x, "addend": addend}, [_by_group(a, b, list(f64(addend)), type=kind, side_by_side=False)])


@draws("grouped_dbias_scaled")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    kind, type = draw.type(), draw.type()
    dy, scale = draw.tensor(sum(counts), draw.columns(), type=kind), draw.tensor(sum(counts), type=DType.Float32)
    parts = [(d * s[:, None]) for d, s in zip(f64(dy).split(counts), f64(scale).split(counts), strict=True)]
    value, size = torch.stack([p.sum(0) for p in parts]), torch.stack([p.abs().sum(0) for p in parts])
    return DrawnCall({"dy": dy, "sizes": sizes, "bias_scale": scale, "type": type}, [Wanted(value, sum(counts), size, type=type)])


@draws("grouped_dscales")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    kind, type = draw.type(), draw.type()
    dy = draw.tensor(sum(counts), draw.columns(), type=kind)
    bias = draw.tensor(len(counts), dy.shape[1], type=kind)
    parts = [(d * b) for d, b in zip(f64(dy).split(counts), f64(bias), strict=True)]
    value, size = torch.cat([p.sum(1) for p in parts]), torch.cat([p.abs().sum(1) for p in parts])
    return DrawnCall({"dy": dy, "sizes": sizes, "bias": bias, "type": type}, [Wanted(value, dy.shape[1], size, type=type)])


# Experts.


def _routed(draw: Draw) -> tuple[Tensor, int, torch.Tensor]:
    """The experts of each token, their number, and the places of tokens' copies in the order of experts, as ``t k + j``."""
    count = draw.of(1, 2, 4, 8)
    tokens, k = draw.rows(), draw.of(*range(1, min(count, 4) + 1))
    chosen = torch.rand(tokens, count, generator=draw.generator).argsort(1)[:, :k]
    return nvte.make_nvte_tensor(chosen.to(torch.int32)), count, chosen.flatten().argsort(stable=True)


def _row_map(order: torch.Tensor, k: int) -> Tensor:
    return nvte.make_nvte_tensor(order.argsort().view(-1, k).T.flatten().to(torch.int32))


def _probs(draw: Draw, experts: Tensor) -> Tensor:
    return draw.tensor(*experts.shape, type=DType.Float32)


def _router(draw: Draw, count: int, k: int) -> dict[str, Any]:
    """How probabilities are made of logits, without what chooses."""
    score = draw.of("softmax", "sigmoid")
    return {"normalized": draw.of(True, False) or (score == "sigmoid" and k == 1), "score_function": score, "scaling_factor": draw.of(None, 2.5)}


def _probs_of(logits: torch.Tensor, chosen: torch.Tensor, how: dict[str, Any]) -> torch.Tensor:
    """Those of the experts ``chosen [T, k]``, in float64."""
    if how["score_function"] == "sigmoid":
        own = logits.sigmoid().gather(1, chosen)
        own = own / own.sum(1, keepdim=True) if how["normalized"] and chosen.shape[1] > 1 else own
    else:
        own = logits.gather(1, chosen).softmax(1) if how["normalized"] else logits.softmax(1).gather(1, chosen)
    return own * (how["scaling_factor"] or 1.0)


@draws("top_experts")
def _(draw: Draw) -> DrawnCall:
    """Biases are so far apart that rounding changes no order; groups are chosen by one expert of each."""
    count = draw.of(1, 2, 4, 8)
    logits, k = draw.tensor(draw.rows(), count), draw.of(*range(1, min(count, 4) + 1))
    how = _router(draw, count, k)
    scores = f64(logits).sigmoid() if how["score_function"] == "sigmoid" else f64(logits)
    if how["score_function"] == "sigmoid":  # logits that are apart may have sigmoids that are not, in fp32
        bias = torch.randperm(count, generator=draw.generator).float() * 4
        how["expert_bias"], scores = nvte.make_nvte_tensor(bias), scores + bias.double()
    if count >= 2 and k <= count // 2 and draw.of(True, False):
        how |= {"groups": count // 2, "top_groups": k}
        pairs = scores.view(len(scores), count // 2, 2)
        best = pairs.amax(2).sort(dim=1, descending=True, stable=True).indices[:, :k]
        scores = scores.masked_fill(
            torch.ones_like(pairs, dtype=torch.bool).scatter(1, best[:, :, None].expand(-1, -1, 2), False).flatten(1), -torch.inf
        )
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    probs = Wanted(_probs_of(f64(logits), chosen, how), 2 * count, type=logits.type, rounded=(logits.type,))

    def check(found: Any) -> None:
        assert share(found[0], probs, logits.type) <= 1
        assert torch.equal(found[1].data.long(), chosen)

    return DrawnCall({"logits": logits, "k": k, **how}, check)


@draws("dtop_experts")
def _(draw: Draw) -> DrawnCall:
    count = draw.of(1, 2, 4, 8)
    logits, k = draw.tensor(draw.rows(), count, type=DType.Float32), draw.of(*range(1, min(count, 4) + 1))
    how = _router(draw, count, k)
    dprobs, (_, experts, scores) = draw.tensor(logits.shape[0], k, type=DType.Float32), nvte.top_experts(logits, k, **how)
    x = f64(logits).requires_grad_()
    _probs_of(x, experts.data.long(), how).backward(f64(dprobs))
    assert x.grad is not None
    size = f64(dprobs).abs().sum(1, keepdim=True).expand_as(x) * (how["scaling_factor"] or 1.0)
    if how["score_function"] == "sigmoid" and how["normalized"]:  # divided by the sum of the chosen
        size = size / f64(logits).sigmoid().gather(1, experts.data.long()).sum(1, keepdim=True)
    return DrawnCall({"dprobs": dprobs, "experts": experts, "scores": scores, **how}, [Wanted(x.grad, 4 * count, size, type=DType.Float32)])


@draws("count_experts")
def _(draw: Draw) -> DrawnCall:
    experts, count, _ = _routed(draw)
    return DrawnCall({"experts": experts, "count": count}, [Wanted(experts.data.flatten().bincount(minlength=count).double(), exact=True)])


@draws("moe_permute")
def _(draw: Draw) -> DrawnCall:
    experts, _, order = _routed(draw)
    x, k = draw.tensor(experts.shape[0], draw.columns()), experts.shape[1]

    def check(found: Any) -> None:
        assert torch.equal(f64(found[0]), f64(x)[order // k]) and torch.equal(found[1].data, _row_map(order, k).data)

    return DrawnCall({"x": x, "experts": experts}, check)


@draws("dmoe_permute")
def _(draw: Draw) -> DrawnCall:
    experts, _, order = _routed(draw)
    k = experts.shape[1]
    drows = draw.tensor(len(order), draw.columns())
    copies = f64(drows)[order.argsort()].view(-1, k, drows.shape[1])
    wanted = Wanted(copies.sum(1), k, copies.abs().sum(1), type=drows.type)
    return DrawnCall({"drows": drows, "row_map": _row_map(order, k), "k": k}, [wanted])


@draws("moe_unpermute")
def _(draw: Draw) -> DrawnCall:
    experts, _, order = _routed(draw)
    k, probs = experts.shape[1], _probs(draw, experts)
    rows = draw.tensor(len(order), draw.columns())
    copies = f64(rows)[order.argsort()].view(-1, k, rows.shape[1]) * f64(probs)[..., None]
    wanted = Wanted(copies.sum(1), k, copies.abs().sum(1), type=rows.type)
    return DrawnCall({"rows": rows, "row_map": _row_map(order, k), "probs": probs}, [wanted])


@draws("dmoe_unpermute")
def _(draw: Draw) -> DrawnCall:
    experts, _, order = _routed(draw)
    k, probs, kind = experts.shape[1], _probs(draw, experts), draw.type()
    rows = draw.tensor(len(order), draw.columns(), type=kind)
    dy = draw.tensor(experts.shape[0], rows.shape[1], type=kind)
    copies = f64(rows)[order.argsort()].view(-1, k, rows.shape[1])
    drows = (f64(dy)[:, None] * f64(probs)[..., None]).flatten(0, 1)[order]
    products = f64(dy)[:, None] * copies
    wanted = [Wanted(drows, type=kind), Wanted(products.sum(2), rows.shape[1], products.abs().sum(2), type=DType.Float32)]
    return DrawnCall({"dy": dy, "rows": rows, "row_map": _row_map(order, k), "probs": probs}, wanted)


# Between processes, of which there is one.


@draws("exchange_groups")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    x = draw.tensor(sum(counts), draw.columns())

    def check(found: Any) -> None:
        y, own, came = found
        assert torch.equal(f64(y), f64(x)) and own.data.tolist() == counts and came.data.tolist() == [counts]

    return DrawnCall({"x": x, "sizes": sizes, "group": None}, check)


@draws("return_groups")
def _(draw: Draw) -> DrawnCall:
    sizes, counts = _groups(draw)
    y = draw.tensor(sum(counts), draw.columns())
    came = nvte.make_nvte_tensor(torch.tensor([counts]))
    return DrawnCall({"y": y, "sizes": sizes, "counts": came, "group": None}, [Wanted(f64(y), exact=True, type=y.type)])


@draws("all_gather")
def _(draw: Draw) -> DrawnCall:
    x = draw.tensor(draw.rows(), draw.columns())
    return DrawnCall({"x": x, "group": None}, [Wanted(f64(x), exact=True, type=x.type)])


@draws("reduce_scatter")
def _(draw: Draw) -> DrawnCall:
    return DRAWN_CALLS["all_gather"](draw)


@draws("all_reduce")
def _(draw: Draw) -> DrawnCall:
    given = DRAWN_CALLS["all_gather"](draw)
    return DrawnCall({**given.arguments, "reduction": draw.of("sum", "max", "mean")}, given.wanted)


@draws("begin_all_gather")
def _(draw: Draw) -> DrawnCall:
    given = DRAWN_CALLS["all_gather"](draw)
    x = given.arguments["x"]

    def check(found: nvte.Underway) -> None:
        came = found.end()
        assert came.type == x.type and torch.equal(came.data, x.data)

    return DrawnCall(given.arguments, check)


@draws("begin_sum")
def _(draw: Draw) -> DrawnCall:
    given = DRAWN_CALLS["begin_all_gather"](draw)
    return DrawnCall({**given.arguments, "scatter": draw.of(True, False)}, given.wanted)


@draws("all_to_all")
def _(draw: Draw) -> DrawnCall:
    return DRAWN_CALLS["all_gather"](draw)


@draws("ring_shift")
def _(draw: Draw) -> DrawnCall:
    return DRAWN_CALLS["all_gather"](draw)


@draws("own_rows")
def _(draw: Draw) -> DrawnCall:
    size = draw.of(1, 2, 3)
    rank, x = draw.of(*range(size)), draw.tensor(size * draw.rows(), draw.columns())
    return DrawnCall({"x": x, "rank": rank, "size": size}, [Wanted(f64(x).chunk(size)[rank] if len(f64(x)) else f64(x), exact=True, type=x.type)])


@draws("bytes_gathered")
def _(draw: Draw) -> DrawnCall:
    shape, type, processes = (draw.rows(), draw.columns()), draw.of(*FLOATS), draw.of(1, 2, 4)
    return DrawnCall({"shape": shape, "type": type, "processes": processes}, _gives([processes * shape[0] * shape[1] * nvte.bit_width(type) // 8]))


@draws("permute")
def _(draw: Draw) -> DrawnCall:
    x, dims = draw.tensor(draw.rows(), draw.of(1, 2, 3), draw.columns()), draw.of((0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0))
    return DrawnCall({"x": x, "dims": dims}, [Wanted(f64(x).permute(dims).contiguous(), exact=True, type=x.type)])


@draws("merge_attention")
def _(draw: Draw) -> DrawnCall:
    count, length, heads, width, kind = draw.of(1, 2), draw.of(1, 3, 8), draw.of(1, 2), draw.of(1, 4), DType.Float32
    o, o_step = (draw.tensor(count * length, heads, width, type=kind) for _ in range(2))
    stats, stats_step = (draw.tensor(count, heads, length, 1, type=kind) for _ in range(2))
    both = torch.stack([f64(stats), f64(stats_step)])
    total = both.logsumexp(0)
    first, second = ((part - total).exp().transpose(1, 2).reshape(count * length, heads, 1) for part in both)
    merged, size = first * f64(o) + second * f64(o_step), first * f64(o).abs() + second * f64(o_step).abs()
    steep = 1 + both.abs().max()
    arguments = {"o": o, "stats": stats, "o_step": o_step, "stats_step": stats_step, "sequences": nvte.Sequences.equal(count, length, o)}
    return DrawnCall(arguments, [Wanted(merged, 4, size * steep, type=kind), Wanted(total, 4, total.abs() + steep, type=kind)])


# Of types, and what holds tensors.


def _gives(value: Any) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        assert found == value, f"{found} instead of {value}"

    return check


DRAWN_CALLS |= {
    "bit_width": lambda draw: DrawnCall({"dtype": (d := draw.type())}, _gives(32 if d is DType.Float32 else 16)),
    "dtype_name": lambda draw: DrawnCall({"dtype": (d := draw.type())}, _gives(d.name)),
    "element": lambda draw: DrawnCall({"type": (t := draw.out())}, _gives(t.dtype if isinstance(t, QuantizedType) else t)),
    "is_fp8": lambda draw: DrawnCall({"of": (t := draw.out())}, _gives(t in FP8)),
    "is_quantized_type": lambda draw: DrawnCall({"type": (t := draw.out())}, _gives(t in FP8)),
    "is_rescalable": lambda draw: DrawnCall({"type": (t := draw.out())}, _gives(t in FP8)),
    "exponent_of": lambda draw: DrawnCall({"factor": 2.0 ** (k := draw.of(-3, 0, 7))}, _gives(k)),
    "has_own_blocks": lambda draw: DrawnCall({"shape": (draw.rows(), 32), "type": draw.out()}, _gives(False)),
    "over": lambda draw: DrawnCall({"type": (t := draw.of(None, *FLOATS)), "group": None}, _gives(t)),
    "share_amax": lambda draw: DrawnCall({"type": draw.out(), "group": None}, _gives(None)),
    "rows_together": lambda draw: DrawnCall({"types": [draw.out(), draw.out()]}, _gives(1)),
    "nvte_dtype": lambda draw: DrawnCall({"dtype": nvte.te_to_torch_dtype(d := draw.type())}, _gives(d)),
    "torch_to_te_dtype": lambda draw: DrawnCall({"dtype": nvte.te_to_torch_dtype(d := draw.type())}, _gives(d)),
    "te_to_torch_dtype": lambda draw: DrawnCall({"dtype": (d := draw.type())}, _gives({4: torch.float32, 5: torch.float16, 6: torch.bfloat16}[d])),
    "current_pass": lambda draw: DrawnCall({}, lambda found: _gives("inference")(found.kind)),
    "pass_": lambda draw: DrawnCall({}, _gives("inference")),
    "set_execution_state": lambda draw: DrawnCall({"state": None}, _gives(None)),
    "quantizer_for": lambda draw: DrawnCall({"type": (t := draw.out())}, lambda found: _gives(t in FP8)(found is not None)),
    "check_sizes": lambda draw: DrawnCall({"sizes": (g := _groups(draw))[0], "groups": len(g[1]), "of": "a function"}, _gives(None)),
}


@draws("note_amax")
def _(draw: Draw) -> DrawnCall:
    state, amax = nvte.Pass("forward"), torch.ones(1)

    def check(found: Any) -> None:
        assert found is None
        nvte.current_pass().amaxes.clear()

    return DrawnCall({"slot": f"{len(state.amaxes)}.x", "amax": amax}, check)


@draws("running")
def _(draw: Draw) -> DrawnCall:
    state = nvte.Pass("backward")

    def check(found: Any) -> None:
        with found as entered:
            assert entered is state and nvte.current_pass() is state
        assert nvte.current_pass() is not state

    return DrawnCall({"state": state}, check)


def _some(draw: Draw) -> list[Tensor]:
    return [draw.tensor(draw.rows(), draw.columns()), nvte.cast(draw.tensor(2, 4), FP8[0])]


@draws("flatten")
def _(draw: Draw) -> DrawnCall:
    tensors = _some(draw)

    def check(found: Any) -> None:
        for was, now in zip(tensors, nvte.unflatten(*found), strict=True):
            assert was.type == now.type and torch.equal(f64(was), f64(now))

    return DrawnCall({"tensors": tensors}, check)


@draws("unflatten")
def _(draw: Draw) -> DrawnCall:
    tensors = _some(draw)
    leaves, spec = nvte.flatten(tensors)
    return DrawnCall({"leaves": leaves, "spec": spec}, [Wanted(f64(x), exact=True, type=x.type) for x in tensors])


@draws("flatten_storage")
def _(draw: Draw) -> DrawnCall:
    storage = nvte.cast(draw.tensor(2, 4), FP8[0]).data
    return DrawnCall({"storage": storage}, lambda found: _gives(True)(found[0][0] is storage._data))


@draws("unflatten_storage")
def _(draw: Draw) -> DrawnCall:
    storage = nvte.cast(draw.tensor(2, 4), FP8[0]).data
    leaves, spec = nvte.flatten_storage(storage)
    return DrawnCall({"leaves": iter(leaves), "spec": spec}, lambda found: _gives(True)(found._data is storage._data))
