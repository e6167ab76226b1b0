"""A replayed pass gives, bit for bit, what the pass itself gives, lets go of what it no longer needs, and notices what changes."""

from __future__ import annotations

import gc
import linecache
import weakref
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusible
from fusible import tex
from fusible.errors import ArgumentError
from fusible.pytorch.engine import executors
from fusible.pytorch.engine import replay as replaying
from fusible.pytorch.engine.executors import EagerExecutor
from fusible.pytorch.engine.listing import Listing
from fusible.pytorch.engine.steps import Step, last_uses
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer
from fusible.tex.backends.cpu import layouts
from fusible.tex.interface.specialize import SpecializedCall, specialized_by

RECIPES = [None, fusible.DelayedScaling(amax_history_len=4), fusible.Float8CurrentScaling()]


class Plain:
    """Runs every program as it stands."""

    name, whole, in_place = "plain", False, True

    def __call__(self, key, program, inputs):
        return program(inputs)


def _model(seed: int = 0) -> fusible.Sequential:
    torch.manual_seed(seed)
    return fusible.Sequential(
        fusible.Residual(
            fusible.LayerNorm(32), fusible.Linear(32, 64), fusible.GroupedQuerySelfAttention(32, 4, 2, rope_base=100.0), fusible.Linear(32, 32)
        ),
        fusible.Residual(fusible.RMSNorm(32), fusible.Linear(32, 64), fusible.SwiGLU(), fusible.Dropout(0.2), fusible.Linear(32, 32)),
    )


def _run(model: fusible.Sequential, recipe, dtype, steps: int = 6) -> list[torch.Tensor]:
    """Outputs and gradients over steps whose inputs come in two shapes, with sequences and without."""
    torch.manual_seed(1)
    results = []
    for step in range(steps):
        x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True) if step % 2 else torch.randn(9, 32, dtype=dtype, requires_grad=True)
        lengths = None if step % 2 else torch.tensor([4, 0, 5], dtype=torch.int32)
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x, lengths)
            y.backward(torch.randn_like(y))
            with torch.no_grad():
                results.append(model(x, lengths))
        results += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_replay_equals_the_pass(recipe, dtype) -> None:
    ours, plain = _model(), _model()
    plain._runner().executor = Plain()
    for got, expected in zip(_run(ours, recipe, dtype), _run(plain, recipe, dtype), strict=True):
        assert torch.equal(got, expected)
    replays = [replay for replay in ours._runner().executor._replays.values() if replay is not None]
    assert replays, "no pass was listed"


def test_the_steady_state_is_replayed_and_a_change_of_policy_is_noticed() -> None:
    model, x = _model(), torch.randn(3, 32)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        executor = model._runner().executor
        assert isinstance(executor, EagerExecutor)
        (replay,) = executor._replays.values()
        assert replay is not None
        with tex.record() as calls:
            model(x)
        assert calls, "the record saw nothing of a replayed pass"
        with tex.set_backend("torch", strict=True), tex.record() as calls:
            model(x)
        assert {call.backend for call in calls} == {"torch"}


def test_an_input_given_twice_is_not_taken_for_one() -> None:
    executor, x, z = EagerExecutor(), torch.randn(4, 8), torch.randn(4, 8)

    def program(leaves):
        return [tex.prim.add(leaves[0], leaves[1])], "static"

    for _ in range(2):
        (twice,), _ = executor("key", program, [x, x])
        assert torch.equal(twice, x + x)
    (replay,) = executor._replays.values()
    assert replay is not None
    (total,), static = executor("key", program, [x, z])
    assert torch.equal(total, x + z) and static == "static"


def test_values_go_when_they_are_no_longer_needed() -> None:
    alive: list[int] = []
    seen: list[weakref.ref] = []

    @tex.register_backend
    class Watching(tex.TEXBackendBase):
        NAME, PRIORITY = "watching", 999

        def relu(self, input, quantizer):
            alive.append(sum(ref() is not None for ref in seen))
            result = input.clone()
            seen.append(weakref.ref(result))
            return result

    try:
        model, x = fusible.Sequential(*(fusible.ReLU() for _ in range(8))), torch.randn(4, 4)
        with torch.no_grad():
            for _ in range(3):
                seen.clear()
                alive.clear()
                model(x)
    finally:
        tex.registry.unregister_backend("watching")
    assert max(alive) <= 1


def test_what_forward_saved_goes_as_backward_uses_it() -> None:
    saved: list[weakref.ref] = []
    alive: list[int] = []

    @tex.register_backend
    class Watching(tex.TEXBackendBase):
        NAME, PRIORITY = "watching", 999

        def relu(self, input, quantizer):
            result = input.relu()
            saved.append(weakref.ref(result))
            return result

        def drelu(self, grad, fwd_input, quantizer):
            alive.append(sum(ref() is not None for ref in saved))
            return grad * (fwd_input > 0)

    try:
        model = fusible.Sequential(*(fusible.ReLU() for _ in range(6)))
        for retained in (False, False, False, True):  # as it stands, listened to, replayed
            saved.clear()
            alive.clear()
            x = torch.randn(4, 4, requires_grad=True)
            y = model(x).sum()
            y.backward(retain_graph=retained)
            if retained:
                once = x.grad.clone()
                y.backward()
                assert torch.equal(x.grad, 2 * once)
                continue
            assert alive == [5, 4, 3, 2, 1, 0]
    finally:
        tex.registry.unregister_backend("watching")


def test_a_pass_that_computes_elsewhere_is_run_as_it_stands() -> None:
    class Outside(fusible.ops.Op):
        def forward(self, x):
            return fusible.nvte.Tensor(x.data * 2, x.type), {}

        def backward(self, ctx, dy):
            return fusible.nvte.Tensor(dy.data * 2, dy.type), []

    class Module(fusible.BaseModule):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            super().__init__(Outside())

    model = Module()
    for _ in range(4):
        x = torch.randn(3, 4, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full_like(x, 2.0))
    executor = model._runner().executor
    assert isinstance(executor, EagerExecutor) and len(executor._unlistable) == 2 and not any(executor._replays.values())


class Counting(Float8CurrentScalingQuantizer):
    """Has state of its own: no two are alike."""

    def _value_key(self) -> None:
        return None


@pytest.mark.parametrize("kind", [Float8CurrentScalingQuantizer, Counting])
def test_a_quantizer_that_a_program_makes_is_a_constant_unless_it_has_state(kind) -> None:
    x = torch.randn(4, 4)
    listing = Listing([x])
    with tex.listening(listing.note):
        y = tex.quantize(x, kind(tex.DType.kFloat8E4M3))
    replay = listing.finish([y._data], None, 0)
    if kind is Counting:
        assert replay is None
    else:
        assert replay is not None and torch.equal(replay.run([-x])[0] ^ 128, y._data)


def test_of_more_programs_than_are_kept_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_KEPT", 2)
    executor = EagerExecutor()
    for name in "abc":
        for _ in range(3):
            assert executor(name, lambda inputs: ([tex.gelu(inputs[0], None)], name), [torch.ones(2)])[1] == name  # noqa: B023
    assert [key[0] for key in executor._replays] == ["b", "c"] and all(executor._replays.values())


def heard(listing: Listing, method, *args, **kwargs):
    """A call as ``listing`` hears of it."""
    result = method(*args, **kwargs)
    listing.note(tex.RecordedCall(method, args, kwargs, result))
    return result


def test_a_replay_gives_each_call_what_the_pass_gave_it() -> None:
    given = []

    def noting(*args, **kwargs):
        given.append((args[1:], kwargs))
        return args[0] + 1

    x = torch.ones(2)
    listing = Listing([torch.ones(2), x])
    y = heard(listing, noting, x, 1, 2.5, "a", None, True, torch.float32, (3, 4), (), [5, None], how=(6, "b"), why=[7])
    replay = listing.finish([y, y], "static", 0)
    assert replay is not None and replay.static == "static"
    assert [z.tolist() for z in replay.run([torch.zeros(1), torch.zeros(2)])] == [[1.0, 1.0]] * 2
    assert given[0] == given[1]  # a tuple is no list


@pytest.mark.parametrize(
    "given", [torch.ones(2), torch.empty(0), [torch.ones(2)], {"a": torch.ones(2)}, object()], ids=lambda given: type(given).__name__
)
def test_a_call_with_a_keyword_that_is_no_constant_is_not_replayed(given: object) -> None:
    """Whoever calls again would be given what was there the first time."""
    x = torch.ones(2)
    listing = Listing([x])
    y = heard(listing, lambda x, how: x + 1, x, how=given)
    assert listing.finish([y], None, 0) is None


@pytest.mark.parametrize("kind", [list, tuple])
def test_tensors_in_a_list_are_those_of_the_run(kind) -> None:
    x = torch.ones(2)
    listing = Listing([x])
    y = heard(listing, lambda x: x + 1, x)
    z = heard(listing, lambda given: given[0] + given[1] + given[2], kind([x, y, 3]))
    replay = listing.finish([z], None, 0)
    assert replay is not None and replay.run([torch.full((2,), 10.0)])[0].tolist() == [24.0, 24.0]


def test_a_part_of_a_result_that_is_read_twice_is_taken_once() -> None:
    x = torch.ones(2)
    listing = Listing([x])
    _, b = heard(listing, lambda x: [x + 1, x + 2], x)
    y = heard(listing, lambda a, b: a * b, b, heard(listing, lambda b: b * 2, b))
    replay = listing.finish([y], None, 0)
    assert replay is not None and len(replay.steps[0].parts) == 1 and replay.run([torch.zeros(2)])[0].tolist() == [8.0, 8.0]


@pytest.mark.parametrize("usage", [usage for usage in product((True, False), repeat=3) if any(usage[:2])], ids=str)
def test_a_quantizer_of_delayed_scaling_is_made_anew_with_its_options(usage) -> None:
    made = []

    def noting(x, quantizer):
        made.append((quantizer.rowwise_usage, quantizer.columnwise_usage, quantizer.internal, quantizer.dtype, quantizer.scale.item()))
        return x + 1

    rowwise, columnwise, internal = usage
    x, scale = torch.ones(2), torch.tensor([4.0])
    listing = Listing([x, scale])
    quantizer = Float8Quantizer(scale, None, tex.DType.kFloat8E5M2, rowwise=rowwise, columnwise=columnwise, internal=internal)
    y = heard(listing, noting, x, quantizer)
    replay = listing.finish([y], None, 0)
    assert replay is not None
    replay.run([x, torch.tensor([8.0])])
    assert made == [(*usage, tex.DType.kFloat8E5M2, 4.0), (*usage, tex.DType.kFloat8E5M2, 8.0)]


def test_every_value_but_results_and_constants_goes_at_some_step() -> None:
    """Those that nobody reads, too: results, and their parts."""
    x, unread = torch.ones(2), torch.ones(3)
    listing = Listing([x, unread])
    a, b = heard(listing, lambda x: [x + 1, x + 2], x)
    heard(listing, lambda b: b * 2, b)
    y = heard(listing, lambda a, n: a + n, a, 3)
    replay = listing.finish([y], None, 0)
    assert replay is not None and replay.run([x, unread])[0].tolist() == [5.0, 5.0]
    kept = {*replay.outputs, *replay._constants}
    gone = [place for ends in last_uses(replay.steps, kept) for place in ends]
    places = {place for step in replay.steps for place in (*step.sources, step.target, *(place for _, place in step.parts))}
    assert len(gone) == len(set(gone)) and set(gone) == places - kept


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory by columns."""
    return x.t().contiguous().t()


def block() -> fusible.Sequential:
    torch.manual_seed(0)
    return fusible.Sequential(fusible.LayerNorm(32), fusible.Linear(32, 32), fusible.GELU(), fusible.Linear(32, 32), fusible.RMSNorm(32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["x", "weight", "gamma", "gradient", "negated", "mode", "subclass", "as it was"])
def test_what_lies_otherwise_than_when_it_was_listed_is_computed_all_the_same(way: str, dtype: torch.dtype) -> None:
    ours, plain = block().to(dtype), block().to(dtype)
    plain._runner().executor = Plain()
    x, dy = torch.randn(16, 32).to(dtype), torch.randn(16, 32).to(dtype)

    def step(model: fusible.Sequential, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        model.zero_grad()
        y = model(x)
        y.backward(dy)
        return [y.detach(), x.grad, *(p.grad for p in model.parameters())]

    for _ in range(4):
        step(ours, x, dy)
    for model in (ours, plain):
        if way == "weight":
            model[1].weight.data = strided(model[1].weight.data)
        if way == "gamma":
            model[0].weight.data = torch.ones(64, dtype=dtype)[::2]
    inputs = {"x": (strided(x), dy), "gradient": (x, strided(dy)), "negated": (torch._neg_view(x), dy), "subclass": (x.as_subclass(Named), dy)}
    here = inputs.get(way, (x, dy))
    with Watching() if way == "mode" else nullcontext():
        found = step(ours, *here)
    assert all(torch.equal(a, b) for a, b in zip(found, step(plain, *here), strict=True))


@pytest.mark.parametrize("norm", [fusible.LayerNorm, fusible.RMSNorm])
def test_a_gradient_that_is_one_number_everywhere_is_read_where_it_is(norm: type) -> None:
    """A sum's gradient is a number that is expanded: its memory is that of one."""
    models = [fusible.Sequential(fusible.GELU(), norm(32)) for _ in range(2)]
    models[1]._runner().executor = Plain()
    for step in range(5):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        grads = []
        for model in models:
            model.zero_grad()
            own = x.clone().requires_grad_()
            ((step + 1) * model(own).sum()).backward()
            grads.append([own.grad, *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert all("_run_specialized" in vars(replay) for replay in models[0]._runner().executor._replays.values())


class Named(torch.Tensor):
    """A subclass that changes nothing."""


class Watching(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_pass_is_specialized_where_its_backends_say_how() -> None:
    """Nothing is put together that its calls do not take."""
    model = fusible.quantize_parameters(block())
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(16, 32))
    (replay,) = model._runner().executor._replays.values()
    assert "_run_specialized" in vars(replay) and "_run_listed" not in vars(replay)
    assembled = [step for step in replay.steps if step.assembles]
    specialized = replay._run_specialized.__globals__
    assert assembled and not any(step.call in specialized.values() for step in assembled)


@pytest.mark.parametrize("beside", [2.0, None, torch.float32, "elsewhere"], ids=str)
def test_a_specialized_call_takes_what_the_pass_has_and_constants(beside: object) -> None:
    operand = torch.ones(2) if beside == "elsewhere" else beside

    class Backend:
        @specialized_by(lambda self, call: SpecializedCall(lambda x, beside: x + 3, (call.input, operand)))
        def gelu(self, input, quantizer):
            return input + 3

    x = torch.ones(2)
    listing = Listing([x])
    y = heard(listing, Backend().gelu, x, None)
    replay = listing.finish([y], None, 0)
    assert replay is not None and replay.run([torch.zeros(2)])[0].tolist() == [3.0, 3.0]
    assert (replay.steps[0].specialized is None) == (beside == "elsewhere")


def test_what_only_the_method_would_take_goes_where_it_came() -> None:
    steps = [Step(list, (0,), 1, (("[0]", 2), ("[1]", 3))), Step(abs, (2,), 4, specialized=Step(abs, (1,), 4))]
    assert [sorted(ends) for ends in last_uses(steps, {4})] == [[0, 1, 3], [2]]
    specialized = [step.as_specialized() for step in steps]
    assert [sorted(ends) for ends in last_uses(specialized, {4})] == [[0, 2, 3], [1]]


def test_the_lines_of_a_replay_are_there_for_tracebacks_as_long_as_it_is() -> None:
    def failing(x):
        if not x.any():
            raise ValueError("nothing")
        return x + 1

    x = torch.ones(2)
    listing = Listing([x])
    replay = listing.finish([heard(listing, failing, x)], None, 0)
    assert replay is not None
    with pytest.raises(ValueError, match="nothing") as caught:
        replay.run([torch.zeros(2)])
    frame = next(entry.frame for entry in caught.traceback if "steps.py: pass" in entry.frame.code.raw.co_filename)
    file = frame.code.raw.co_filename
    assert "v1 = c0(v0)" in "".join(linecache.getlines(file))
    del replay, caught, frame
    gc.collect()
    assert file not in linecache.cache


def test_how_inputs_lie_is_asked_where_a_call_hangs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(replaying, "layouts", lambda inputs: asked.append(len(inputs)) or layouts(inputs))
    executor, x = EagerExecutor(), torch.ones(2)
    for name, function in (("gelu", lambda x: tex.gelu(x, None)), ("add", lambda x: tex.prim.add(x, x))):
        for _ in range(5):
            executor(name, lambda inputs: ([function(inputs[0])], None), [x])  # noqa: B023
        assert len(asked) == (4 if name == "gelu" else 1), name  # once as it is listed, and for each replay
        asked.clear()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_call_on_what_comes_from_elsewhere_makes_the_whole_program_none_to_replay(when) -> None:
    """Though nothing that is returned was made by it: it may have written somewhere."""
    x, elsewhere = torch.ones(2), torch.ones(2)
    listing = Listing([x])
    for now in ("before", "after"):
        if now == when:
            heard(listing, lambda elsewhere: elsewhere.add_(1), elsewhere)
        if now == "before":
            y = heard(listing, lambda x: x + 1, x)
    assert listing.finish([y], None, 0) is None


def test_a_registered_executor_is_made_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_EXECUTORS", dict(executors._EXECUTORS))
    executors.register_executor("plain", Plain)
    assert isinstance(executors.make_executor("plain"), Plain) and isinstance(executors.make_executor("eager"), EagerExecutor)
    with pytest.raises(ArgumentError, match="^the executor: expected one of eager, xla, plain, got 'another'"):
        executors.make_executor("another")


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_listed_pass_leaves_nothing_that_refers_to_the_parameters(recipe) -> None:
    """``torch.utils.swap_tensors``, by which modules are moved and loaded, refuses a tensor that is referred to weakly; the collector may not have
    come by for long."""
    layer = fusible.Linear(16, 16)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                layer(torch.randn(8, 16, requires_grad=True)).sum().backward()
            for parameter in layer.parameters():
                parameter.grad = None
                assert not weakref.getweakrefcount(parameter)
                torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.ones_like(parameter)))
    finally:
        gc.enable()
    assert (layer.weight == 1).all()
