"""A trace as a function of whatever tensors are named as its inputs: names and identity hold, and the program computes what numpy does.

Programs are generated: a pool of stored tensors, literals and results grows at random; then inputs and outputs are drawn from all of it, so that an
input may be stored, evaluated, a literal, an intermediate of another, an output, unused or out of reach, and an output may come twice.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_interpreter import interpret

from fusible import lazy
from fusible.errors import ArgumentError, CompileError
from fusible.lazy.evaluation.compiler import compile_trace
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES
from fusible.lazy.flat_ir.passes.function_deduplication import function_deduplication
from fusible.lazy.trace.checker import check_trace
from fusible.lazy.trace.specialize import specialize

Array = np.ndarray[Any, Any]
Compute = Callable[[dict[int, Array]], Array]

_WIDTH = 5
_EXACT: dict[str, tuple[int, Callable[..., Any], Callable[..., Any]]] = {
    "add": (2, lambda a, b: a + b, np.add),
    "sub": (2, lambda a, b: a - b, np.subtract),
    "max": (2, lazy.maximum, np.maximum),
    "neg": (1, lambda a: -a, np.negative),
    "abs": (1, lazy.abs, np.abs),
    "flip": (1, lambda a: lazy.flip(a, dim=0), lambda a: a[::-1]),
    "half": (1, lambda a: a * 0.5, lambda a: a * np.float32(0.5)),
}
"""Operations that are exact on small integers and their halves, so that every order of computation gives the same numbers."""


class _Pool:
    """Lazy tensors, and of each what numpy makes of it, given the values of those that are inputs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values = np.random.default_rng(seed)
        self.tensors: list[lazy.Tensor] = []
        self.compute: list[Compute] = []
        self.together: dict[int, Callable[[], None]] = {}
        for _ in range(self.random.randint(1, 3)):
            self.store()
        for _ in range(self.random.randint(1, 9)):
            self.random.choice([self.operate] * 6 + [self.store, self.literal, self.several, self.evaluate])()

    def array(self) -> Array:
        return self.values.integers(-8, 9, _WIDTH).astype(np.float32)

    def add(self, tensor: lazy.Tensor, compute: Compute) -> None:
        at = len(self.tensors)
        self.tensors.append(tensor)
        self.compute.append(lambda given: given[at] if at in given else compute(given))

    def store(self) -> None:
        array = self.array()
        self.add(lazy.Tensor(array, name=self.random.choice(["x", "t0", "t1", "t_inter1", "main", None])), lambda given: array)

    def literal(self) -> None:
        value = float(self.random.randint(-3, 3))
        self.add(lazy.full((_WIDTH,), value), lambda given: np.full(_WIDTH, value, np.float32))

    def operate(self) -> None:
        count, ours, theirs = _EXACT[self.random.choice(list(_EXACT))]
        at = [self.random.randrange(len(self.tensors)) for _ in range(count)]
        self.add(ours(*(self.tensors[i] for i in at)), lambda given: theirs(*(self.compute[i](given) for i in at)))

    def several(self) -> None:
        """An operation of two results, either of which may become an input without the other."""
        at = self.random.randrange(len(self.tensors))
        largest, where = lazy.topk(self.tensors[at], _WIDTH, 0)
        stored: list[Array] = []

        def order(given: dict[int, Array]) -> Array:
            return stored[0] if stored else np.argsort(-self.compute[at](given), kind="stable")

        self.together[len(self.tensors)] = lambda: stored.append(order({}))
        self.add(largest, lambda given: self.compute[at](given)[order(given)])
        self.add(where.cast(lazy.float32), lambda given: order(given).astype(np.float32))

    def evaluate(self) -> None:
        """What is evaluated is stored, with the other results of its operation: from then on it depends on nothing."""
        at = self.random.randrange(len(self.tensors))
        value = self.compute[at]({})
        assert np.array_equal(self.tensors[at].eval().numpy(), value)
        self.compute[at] = lambda given: given.get(at, value)
        self.together.pop(at, lambda: None)()

    def draw(self) -> tuple[list[int], list[int]]:
        """The inputs, each once, and the outputs, some of them twice."""
        everywhere = range(len(self.tensors))
        inputs = self.random.sample(everywhere, self.random.randint(0, min(4, len(self.tensors))))
        outputs = self.random.choices(everywhere, k=self.random.randint(1, 4))
        return inputs, outputs + outputs[:1] * self.random.randint(0, 1)


def _wanted(pool: _Pool, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[list[Array], list[Array]]:
    given = {i: pool.array() for i in inputs}
    return list(given.values()), [np.ascontiguousarray(pool.compute[i](given)) for i in outputs]


_TYPED = re.compile(r"^\s+(\w+): \[shape")


def _check_names(text: str) -> None:
    """Every printed name is given or made once, before it is used."""
    known: set[str] = set()
    section = ""
    for line in text.split("\n")[1:]:
        if line in ("inputs:", "outputs:"):
            section = line
        elif match := _TYPED.match(line):
            name = match[1]
            assert (name in known) == (section == "outputs:"), text
            known.add(name)
        else:
            left, right = line.split(" = ", 1)
            made = [part.split(":")[0] for part in re.sub(r": \[shape.*?\)\]", ":", left).split(", ")]
            used = re.findall(r"\b(t\d+|t_inter\d+)\b", right)
            assert not known & set(made) and len(set(made)) == len(made) and set(used) <= known, text
            known.update(made)


def _storages(trace: lazy.Trace) -> list[Array]:
    return [storage.data for storage in trace.storages]


def test_generated_programs_compute_what_numpy_does(tmp_path: Path) -> None:
    """250 programs: names in both printed forms, the checks before and after the passes, and the interpreter's results of both."""
    programs: list[tuple[lazy.FlatIR, list[Array]]] = []
    expected: list[list[Array]] = []
    kinds: set[str] = set()
    for seed in range(250):
        pool = _Pool(seed)
        inputs, outputs = pool.draw()
        trace = check_trace(lazy.Trace([pool.tensors[i] for i in outputs], [pool.tensors[i] for i in inputs]))
        flat = check_flat_ir(trace.to_flat_ir())
        _check_names(str(trace))
        _check_names(str(flat))
        arrays, results = _wanted(pool, inputs, outputs)
        for program in (flat, flat.run(*DEFAULT_PASSES), flat.run(function_deduplication)):
            programs.append((check_flat_ir(program), arrays + _storages(trace)))
            expected.append(results)
        assert len(flat.inputs) == len(inputs) + len(trace.storages)
        kinds |= {type(pool.tensors[i].trace_tensor.producer).__name__ for i in inputs}
        kinds |= ({"twice"} if len(set(outputs)) < len(outputs) else set()) | ({"given and returned"} if set(inputs) & set(outputs) else set())
    assert {"Storage", "TopK", "BinaryElementwise", "UnaryElementwise", "twice", "given and returned"} <= kinds, kinds
    for got, want in zip(interpret(programs, tmp_path), expected, strict=True):
        assert len(got) == len(want) and all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


def test_generated_programs_run_compiled(tmp_path: Path) -> None:
    """40 of them on the engine, with the inputs by their place."""
    for seed in range(40):
        pool = _Pool(seed)
        inputs, outputs = pool.draw()
        trace = lazy.Trace([pool.tensors[i] for i in outputs], [pool.tensors[i] for i in inputs])
        arrays, results = _wanted(pool, inputs, outputs)
        got = compile_trace(trace, 0, {})(arrays + _storages(trace))
        assert all(np.array_equal(g, w) for g, w in zip(got, results, strict=True)), seed


def test_generated_functions_are_compiled_saved_and_loaded(tmp_path: Path) -> None:
    """20 functions of runtime inputs that capture stored tensors and results of theirs, return inputs and the same result twice."""
    for seed in range(20):
        draw = random.Random(seed)
        arrays = [np.random.default_rng(seed + i).integers(-8, 9, _WIDTH).astype(np.float32) for i in range(3)]
        captured = lazy.Tensor(arrays[2], name="a")
        computed = captured * 0.5
        if draw.random() < 0.5:
            computed.eval()
        names = [draw.choice(list(_EXACT)) for _ in range(4)]
        picks = [draw.choices(range(4 + i), k=2) for i in range(4)]
        returned = draw.choices(range(8), k=3)

        def run(operations: int, *pool: Any, names: Any = names, picks: Any = picks, returned: Any = returned) -> tuple[Any, ...]:
            made = list(pool)
            for name, at in zip(names, picks, strict=True):
                count = _EXACT[name][0]
                made.append(_EXACT[name][operations](*(made[i] for i in at[:count])))
            return tuple(made[i] for i in returned)

        def function(a: Any, b: Any, captured: Any = captured, computed: Any = computed, run: Any = run) -> tuple[Any, ...]:
            return run(1, a, b, captured, computed)

        info = lazy.InputInfo((_WIDTH,), lazy.float32)
        executable = lazy.compile(function, args=[info, info])
        _check_names(str(executable.trace))
        _check_names(str(check_flat_ir(executable.flat_ir)))
        _check_names(str(check_flat_ir(executable.optimized_flat_ir)))
        wanted = run(2, arrays[0], arrays[1], arrays[2], arrays[2] * np.float32(0.5))
        executable.save(tmp_path / f"{seed}.executable")
        loaded = lazy.Executable.load(tmp_path / f"{seed}.executable")
        for given in (executable, loaded):
            got = given(lazy.Tensor(arrays[0]), lazy.Tensor(arrays[1]))
            assert all(np.array_equal(g.numpy(), w) for g, w in zip(got, wanted, strict=True)), seed
            same = lazy.Tensor(arrays[0])  # one tensor for two arguments
            got = given(same, same)
            twice = run(2, arrays[0], arrays[0], arrays[2], arrays[2] * np.float32(0.5))
            assert all(np.array_equal(g.numpy(), w) for g, w in zip(got, twice, strict=True)), seed


def test_an_input_given_twice_and_what_is_no_tensor_are_refused() -> None:
    a, b = lazy.Tensor([1.0], name="a"), lazy.Tensor([2.0], name="a")
    for inputs in ([a, a], [b, a, b], [a.trace_tensor, a]):
        with pytest.raises(
            ArgumentError, match=r"the inputs of a trace: expected each tensor once, got float32 \[1\] 'a' \(made at .*\) twice; pass"
        ):
            lazy.Trace([a + b], inputs)
    for given in ([3], [None], ["a"], [np.ones(1)]):
        with pytest.raises(ArgumentError, match="an output of a trace: expected a lazy tensor"):
            lazy.Trace(given)
        with pytest.raises(ArgumentError, match="an input of a trace: expected a lazy tensor"):
            lazy.Trace([a], given)
    assert len(lazy.Trace([a, a, b, a], [b, a]).names) == 2


def test_a_trace_of_such_inputs_may_be_specialized() -> None:
    stored, literal = lazy.Tensor([1.0, 2.0]), lazy.full((2,), 3.0)
    made = stored * literal
    for inputs in ([stored, made], [literal], [made, literal, stored]):
        trace = lazy.Trace([made + stored, literal], inputs)
        assert str(check_trace(specialize(trace, {}))) == str(trace)


def test_an_argument_of_a_function_being_compiled_may_be_an_input() -> None:
    texts: list[str] = []

    def function(x: lazy.Tensor) -> lazy.Tensor:
        y = x + 1.0
        texts.append(str(lazy.Trace([y * 2.0], [x])))
        texts.append(str(lazy.Trace([y * 2.0], [y])))
        stranger = lazy.Trace([y])
        check_trace(stranger)
        assert len(stranger.tracers) == 1
        with pytest.raises(CompileError, match="depends on the argument x of a function being compiled"):
            y.eval()
        return y

    lazy.compile(function, args=[lazy.InputInfo((2,), lazy.float32)])
    for text in texts:
        _check_names(text)
    assert "t0 = " not in texts[1] and texts[1].count("binaryelementwise") == 1


def test_a_function_compiled_within_another_takes_values_alone() -> None:
    inner = lazy.compile(lambda x: x + 1.0, args=[lazy.InputInfo((2,), lazy.float32)])
    constant = lazy.Tensor([1.0, 2.0])

    def outer(x: lazy.Tensor) -> tuple[lazy.Tensor, lazy.Tensor]:
        with pytest.raises(CompileError, match="depends on the argument x"):
            inner(x)
        made = inner(constant)
        return x + made, made

    first, second = lazy.compile(outer, args=[lazy.InputInfo((2,), lazy.float32)])(lazy.Tensor([10.0, 20.0]))
    assert first.tolist() == [12.0, 23.0] and second.tolist() == [2.0, 3.0]


def test_a_trace_made_while_another_thread_evaluates_is_valid() -> None:
    """What makes a tensor may change, from its operation to what is stored, between two looks at it."""
    wrong: list[BaseException] = []
    for seed in range(30):
        x = lazy.Tensor(np.arange(_WIDTH, dtype=np.float32) + seed)
        chain = [x + 1.0]
        for _ in range(20):
            largest, where = lazy.topk(chain[-1], _WIDTH, 0)
            chain += [largest + where.cast(lazy.float32), chain[-1] + largest]

        def evaluates(chain: list[lazy.Tensor] = chain) -> None:
            try:
                for tensor in chain[:12]:
                    tensor.eval()
            except BaseException as error:
                wrong.append(error)

        thread = threading.Thread(target=evaluates)
        thread.start()
        while thread.is_alive():
            check_trace(lazy.Trace([chain[-1], chain[3]]))
        thread.join()
    assert not wrong, wrong
