"""Gated delta rules by NVIDIA's names: against the recurrence in float64, token by token, and against NVIDIA's own modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package, relative_error

from fusible.compat import te_modules
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError

HEADS, KEY, VALUE, TOKENS, BATCH, UPDATES = 2, 8, 6, 150, 2, 3  # more tokens than a chunk has, and no multiple of them
EPS32 = 2.0**-23


def recurrence(q: Any, k: Any, v: Any, alpha: Any, beta: Any, w: Any, state: Any, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``[b, t, h, ..]`` and, of k, v, beta and w, ``[b, t, n, h, ..]``: as the papers write it, with ``S [b, h, e, d]``."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * alpha[:, t].unsqueeze(-2)
        for j in range(k.shape[2]):
            key = k[:, t, j]
            held = torch.einsum("bhed,bhd->bhe", state, beta[:, t, j] * key)
            state = state + torch.einsum("bhe,bhd->bhed", w[:, t, j] * v[:, t, j] - held, key)
        outputs.append(scale * torch.einsum("bhed,bhd->bhe", state, q[:, t]))
    return torch.stack(outputs, 1).flatten(2), state


class Rule:
    """One of the modules: what it is given, drawn for ``[b, t]`` tokens, and what that means to the recurrence."""

    def __init__(self, name: str, updates: int = 1, strong: float = 1.0, **options: Any) -> None:
        self.name, self.updates, self.strong, self.options = name, updates, strong, options

    def module(self, of: Any = te_modules, key: int = KEY, value: int = VALUE, format_: str = "bshd", **more: Any) -> Any:
        updates = {"num_householder": self.updates} if self.name == "GatedDeltaProductAttention" else {}
        return getattr(of, self.name)(HEADS, (key, value), qkv_format=format_, **updates, **more)

    def given(self, batch: int, tokens: int, key: int = KEY, value: int = VALUE) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(tokens)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64)

        n = (self.updates,) if self.name == "GatedDeltaProductAttention" else ()
        channels = (key,) if self.name == "GatedDeltaNet2Attention" else ()
        beta = drawn(*n, HEADS, *channels)
        made = {
            "query_layer": drawn(HEADS, key),
            "key_layer": torch.nn.functional.normalize(drawn(*n, HEADS, key), dim=-1),
            "value_layer": drawn(*n, HEADS, value),
            "g": -self.strong * drawn(HEADS, *channels).exp(),
            "beta": beta if "use_beta_sigmoid_in_kernel" in self.options else beta.sigmoid(),
        }
        if self.options.get("gate_domain") == "linear":
            made["g"] = drawn(HEADS).sigmoid()  # none below the least decay
        if self.options.get("safe_gate"):
            made["g"] = drawn(HEADS)
        return {**made, **({"w": drawn(HEADS, value).sigmoid()} if channels else {})}

    def meant(self, x: dict[str, Any], state: torch.Tensor, scale: float, heads: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, beta = (x[name] for name in ("query_layer", "key_layer", "value_layer", "g", "beta"))
        if self.options.get("use_qk_l2norm_in_kernel"):
            q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        if self.options.get("use_beta_sigmoid_in_kernel"):
            beta = beta.sigmoid() * (2 if self.options.get("allow_neg_eigval") else 1)
        if self.options.get("safe_gate"):
            g = -heads["a_log"].exp() * torch.log1p((g + heads["dt_bias"]).exp())
        alpha = g if self.options.get("gate_domain") == "linear" else g.exp()
        if self.name == "GatedDeltaNet2Attention":
            return recurrence(q, *(y.unsqueeze(2) for y in (k, v)), alpha, *(y.unsqueeze(2) for y in (beta, x["w"])), state, scale)
        if self.name == "GatedDeltaNetAttention":
            k, v, beta = (y.unsqueeze(2) for y in (k, v, beta))
        beta = beta.unsqueeze(-1)
        return recurrence(q, k, v, alpha.unsqueeze(-1), beta, beta, state, scale)


NET, NET2, PRODUCT = "GatedDeltaNetAttention", "GatedDeltaNet2Attention", "GatedDeltaProductAttention"
RULES = {
    "net": Rule(NET),
    "net, forgetting all": Rule(NET, strong=300.0),
    "net, of lengths 1": Rule(NET, use_qk_l2norm_in_kernel=True),
    "net 2": Rule(NET2),
    "net 2, forgetting all": Rule(NET2, strong=300.0),
    "net 2 by logits": Rule(NET2, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, use_qk_l2norm_in_kernel=True),
    "product": Rule(PRODUCT, UPDATES),
    "product of one": Rule(PRODUCT, 1, gate_domain="linear"),
    "product by logits": Rule(PRODUCT, UPDATES, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True, safe_gate=True, use_qk_l2norm_in_kernel=True),
}


def of_heads(rule: Rule, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    made = {"a_log": torch.tensor([0.3, -1.0], dtype=dtype), "dt_bias": torch.tensor([-0.5, 1.0], dtype=dtype)}
    return made if rule.options.get("safe_gate") else {}


def first_state(batch: int, key: int = KEY, value: int = VALUE) -> torch.Tensor:
    return torch.randn(batch, HEADS, value, key, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def gradients(outputs: tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    total = sum((y.double() * torch.cos(torch.arange(y.numel())).view_as(y)).sum() for y in outputs)
    return list(torch.autograd.grad(total, leaves))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RULES)
def test_outputs_states_and_gradients_are_the_recurrences(name: str) -> None:
    rule, state = RULES[name], first_state(BATCH)
    given = {key: x.requires_grad_() for key, x in {**rule.given(BATCH, TOKENS), "state": state, **of_heads(rule)}.items()}
    leaves = list(given.values())
    heads = {key: given[key] for key in of_heads(rule)}
    module = rule.module(scale=0.7)
    tensors = {key: x for key, x in given.items() if key != "state"}
    found = module(**tensors, initial_state=given["state"], output_final_state=True, **rule.options)
    wanted = rule.meant(given, given["state"], 0.7, heads)
    for mine, meant in zip((*found, *gradients(found, leaves)), (*wanted, *gradients(wanted, leaves)), strict=True):
        assert mine.shape == meant.shape
        # float64, where sums of decays cancel; the gradient of a decay that leaves nothing is a difference of numbers of size 1.
        assert (mine - meant).norm() <= 2.0**-36 * max(meant.norm().item(), 1.0)
    single = {key: x.detach().float() for key, x in tensors.items()}
    y = module(**single, initial_state=state.detach().float(), **rule.options)
    assert y.dtype == torch.float32
    # A chunk sums decays up to this size, and their differences are off by as much as the sums' last bits.
    largest = max(1.0, 64 * given["g"].abs().mean().item()) if "linear" not in str(rule.options) else 64.0
    assert relative_error(y, wanted[0]) <= 8 * EPS32 * largest


@pytest.mark.parametrize("name", ["net", "net 2", "product"])
def test_layouts_differ_in_nothing_else(name: str) -> None:
    rule = RULES[name]
    given = rule.given(BATCH, 20)
    wanted, state = rule.module()(**given, output_final_state=True)
    turned = {key: x.transpose(0, 1) for key, x in given.items()}
    found, other = rule.module(format_="sbhd")(**turned, output_final_state=True)
    assert torch.equal(found, wanted.transpose(0, 1)) and torch.equal(other, state)
    ends = torch.tensor([0, 20, 20, 32], dtype=torch.int32)  # one sequence is empty, and rows are left over
    packed = {key: x.flatten(0, 1) for key, x in given.items()}
    start = first_state(3)
    found, state = rule.module()(**packed, qkv_format="thd", cu_seqlens=ends, initial_state=start, output_final_state=True)
    for place, (first, last) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False)):
        alone = {key: x[None, first:last] for key, x in packed.items()}
        y, last_state = rule.module()(**alone, initial_state=start[place : place + 1], output_final_state=True)
        assert relative_error(state[place], last_state[0]) <= 2.0**-45
        if last > first:
            assert relative_error(found[first:last], y[0]) <= 2.0**-45
    assert found.shape == (40, HEADS * VALUE) and not found[32:].any()


def test_a_product_of_one_update_is_the_net() -> None:
    given = RULES["net"].given(BATCH, 20)
    more = {key: x.unsqueeze(2) if key in ("key_layer", "value_layer", "beta") else x for key, x in given.items()}
    assert torch.equal(Rule(PRODUCT, 1).module()(**more), RULES["net"].module()(**given))


@pytest.mark.parametrize("name", ["net", "product by logits"])
def test_recomputed_activations_give_the_same_gradients(name: str) -> None:
    rule = RULES[name]
    found = []
    for checkpointed in (False, True):
        given = {key: x.float().requires_grad_() for key, x in {**rule.given(BATCH, 20), **of_heads(rule)}.items()}
        y = rule.module()(**given, checkpoint_core_attention=checkpointed, **rule.options)
        found.append(gradients((y,), list(given.values())))  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        yield te


@pytest.mark.parametrize("format_", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("name", RULES)
def test_modules_are_nvidias(te: Any, name: str, format_: str) -> None:
    """NVIDIA's checks and layouts, around the same rule; the widths and types are those that its kernels have."""
    rule = RULES[name]
    results = []
    for of in (te, te_modules):
        drawn = {key: x.bfloat16() for key, x in rule.given(BATCH, 40, 64, 64).items()}
        if rule.name == NET:
            drawn.update(g=drawn["g"].float(), beta=drawn["beta"].float())
        lay = {"bshd": lambda x: x, "sbhd": lambda x: x.transpose(0, 1).contiguous(), "thd": lambda x: x.flatten(0, 1)}[format_]
        drawn = {key: lay(x) for key, x in drawn.items()}
        given = {**drawn, **of_heads(rule, torch.float32), "initial_state": first_state(2, 64, 64).float()}
        given = {key: x.requires_grad_() for key, x in given.items()}
        more: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 33, 80], dtype=torch.int32)} if format_ == "thd" else {}
        outputs = rule.module(of, 64, 64, format_)(**given, **more, **rule.options, output_final_state=True)
        results.append([*outputs, *gradients(outputs, list(given.values()))])
    for wanted, found in zip(*results, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype) and torch.equal(found, wanted)


def _net(**changed: Any) -> Any:
    options = {name: changed.pop(name) for name in ("qkv_format", "cu_seqlens", "initial_state") if name in changed}
    return RULES["net"].module()(**{**RULES["net"].given(BATCH, 4), **changed}, **options)


REFUSED = {
    "no gate": (lambda: _net(g=None), DTypeError, "g of GatedDeltaNetAttention: expected a tensor of floats, got NoneType"),
    "another width": (lambda: _net(key_layer=torch.zeros(BATCH, 4, HEADS, 3)), ShapeError, "GatedDeltaNetAttention: expected [2, 4, 2, 8]"),
    "another state": (lambda: _net(initial_state=torch.zeros(BATCH, HEADS, KEY, VALUE)), ShapeError, "expected [2, 2, 6, 8]"),
    "a layout": (lambda: _net(qkv_format="bhsd"), ArgumentError, "qkv_format of GatedDeltaNetAttention: expected one of sbhd, bshd, thd"),
    "lengths": (lambda: _net(cu_seqlens=torch.tensor([0, 4])), ArgumentError, "with qkv_format='bshd': expected no cu_seqlens"),
    "a guard": (lambda: RULES["net 2"].module()(**RULES["net 2"].given(1, 4), beta_guard=True), NotServedError, "beta_guard=False"),
    "no sigmoid": (lambda: RULES["net 2"].module()(**RULES["net 2"].given(1, 4), allow_neg_eigval=True), ArgumentError, "use_beta_sigmoid_in_kernel"),
    "two gates": (
        lambda: RULES["product"].module()(**RULES["product"].given(1, 4), safe_gate=True, gate_domain="linear"), ArgumentError, "expected 'log'"
    ),
    "a bias of no gate": (
        lambda: RULES["product"].module()(**RULES["product"].given(1, 4), dt_bias=torch.zeros(2)), ArgumentError, "without safe_gate"
    ),
    "no update": (lambda: te_modules.GatedDeltaProductAttention(2, 8, 0), ArgumentError, "expected at least 1"),
    "heads": (lambda: te_modules.GatedDeltaNetAttention(3, 8, tp_size=2), ArgumentError, "GatedDeltaNetAttention's heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_one_sentence(name: str) -> None:
    make, kind, sentence = REFUSED[name]
    with pytest.raises(kind) as raised:
        make()
    assert sentence in str(raised.value) and ": expected " in str(raised.value)
