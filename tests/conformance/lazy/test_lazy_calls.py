"""Calling an executable: names, containers, checks, what is kept on the device, donation, streams, threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from fusible import lazy
from fusible.errors import ArgumentError, CompileError, DTypeError, ForkError, FusibleError, ShapeError
from fusible.lazy.engine import pjrt

_F32 = lazy.float32
_PAIR = lazy.InputInfo((2,), _F32)
_ONES = np.ones(2, np.float32)


def _affine(x: lazy.Tensor, scale: Any = 1.0, *, shift: Any = 0.0) -> lazy.Tensor:
    return x * scale + shift


def test_inputs_go_by_position_or_name_and_the_rest_is_constant() -> None:
    executable = lazy.compile(_affine, args=[_PAIR, 3.0], kwargs={"shift": _PAIR})
    shift = lazy.Tensor([10.0, 20.0])
    for got in (executable(_ONES, shift=shift), executable(x=_ONES, shift=shift), executable(shift=shift, x=lazy.Tensor(_ONES))):
        assert isinstance(got, lazy.Tensor) and got.tolist() == [13.0, 23.0]
    assert executable.input_infos == {"x": _PAIR, "shift": _PAIR} and executable.input_info == [_PAIR, _PAIR]
    assert executable.output_infos == [_PAIR]
    assert [o.numpy().tolist() for o in executable.run(_ONES, shift)] == [[13.0, 23.0]]


def test_one_tensor_comes_as_itself_and_several_as_a_tuple() -> None:
    assert isinstance(lazy.compile(lambda x: x, args=[_PAIR])(_ONES), lazy.Tensor)
    (one,) = lazy.compile(lambda x: [x], args=[_PAIR])(_ONES)
    three = lazy.compile(lambda x: (x, [x + 1.0, x * 2.0]), args=[_PAIR])(_ONES)
    assert one.tolist() == [1.0, 1.0] and isinstance(three, tuple) and [t.tolist()[0] for t in three] == [1.0, 2.0, 2.0]
    assert lazy.compile(lambda: lazy.ones((2,)))().tolist() == [1.0, 1.0]


_Point = namedtuple("_Point", "a b")


def _contained(state: dict[str, Any], layers: list[Any], point: _Point, *rest: Any, **named: Any) -> lazy.Tensor:
    total = state["k"] * state["factor"] + point.a - point.b
    for layer in (*layers, *rest, *named.values()):
        total = total + (layer[0] if isinstance(layer, tuple) else layer)
    return total


def test_containers_of_inputs_keep_their_structure() -> None:
    executable = lazy.compile(
        _contained,
        args=[{"k": _PAIR, "factor": 2.0}, [(_PAIR, None), 5.0], _Point(_PAIR, 0.5), _PAIR, 7.0],
        kwargs={"more": _PAIR},
    )
    assert list(executable.input_infos) == ["state", "layers", "point", "rest0", "more"]
    assert executable.input_infos["state"] == {"k": _PAIR} and executable.input_infos["layers"] == [(_PAIR, None), None]
    given = {"k": _ONES}, [(_ONES, "ignored"), None], (_ONES, None), _ONES
    assert executable(*given, more=_ONES).tolist() == [2 + 1 - 0.5 + 1 + 5 + 1 + 7 + 1] * 2
    wrong = [
        (({}, *given[1:]), r"state of the executable .*: expected a dict with the keys \['k'\]"),
        ((3.0, *given[1:]), "got a float"),
        ((given[0], [(_ONES, None)], *given[2:]), "layers .*: expected a sequence"),
        ((given[0], [_ONES, None], *given[2:]), r"layers\[0\] .*: expected a sequence"),
        ((given[0], [(np.ones(3, np.float32), None), None], *given[2:]), r"layers\[0\]\[0\] .*: expected shape \(2,\)"),
    ]
    for args, text in wrong:
        with pytest.raises(ArgumentError, match=text):
            executable(*args, more=_ONES)


_CPU = lazy.Tensor([1.0, 2.0], device=lazy.device("cpu"))

_REFUSED: list[tuple[type[FusibleError], str, tuple[Any, ...], dict[str, Any]]] = [
    (ArgumentError, r"the executable _affine: expected 2 inputs, got 1, without shift; pass \(x, shift\)", (_ONES,), {}),
    (ArgumentError, "got 1, without x", (), {"shift": _ONES}),
    (ArgumentError, "the executable _affine: expected 1 inputs by position, got 2", (_ONES, _ONES), {}),
    (ArgumentError, "expected one value for x", (_ONES,), {"x": _ONES, "shift": _ONES}),
    (ArgumentError, "got an argument scale", (_ONES,), {"scale": 1.0, "shift": _ONES}),
    (ArgumentError, "shift of the executable .*: expected contiguous memory", (_ONES,), {"shift": np.ones(4, np.float32)[::2]}),
    (ArgumentError, "x .*: expected contiguous memory", (torch.ones(4)[::2],), {"shift": _ONES}),
    (ArgumentError, "x .*: expected contiguous memory", (torch.ones(4, dtype=torch.bfloat16)[::2],), {"shift": _ONES}),
    (ArgumentError, "x .*: expected a tensor on gpu:0", (_CPU,), {"shift": _ONES}),
    (ArgumentError, "x .*: expected a lazy tensor, a numpy array or an object with __dlpack__", ([1.0, 2.0],), {"shift": _ONES}),
    (DTypeError, "x of the executable _affine: expected dtype float32, got int32", (lazy.Tensor([1, 2]),), {"shift": _ONES}),
    (DTypeError, "x .*: expected dtype float32", (torch.ones(2, dtype=torch.bfloat16),), {"shift": _ONES}),
    (DTypeError, "x .*: expected an element type with a lazy dtype", (np.ones(2, np.complex64),), {"shift": _ONES}),
    (ShapeError, r"x of the executable _affine: expected shape \(2,\), got \(1, 2\)", (lazy.Tensor([[1.0, 2.0]]),), {"shift": _ONES}),
    (ShapeError, r"shift .*: expected shape \(2,\)", (_ONES,), {"shift": np.ones(3, np.float32)}),
]


@pytest.fixture(scope="module")
def affine() -> lazy.Executable:
    return lazy.compile(_affine, args=[_PAIR], kwargs={"shift": _PAIR})


@pytest.mark.parametrize("case", range(len(_REFUSED)))
def test_one_located_sentence_names_the_argument(affine: lazy.Executable, case: int) -> None:
    kind, text, args, kwargs = _REFUSED[case]
    with pytest.raises(kind, match=text) as caught:
        affine(*args, **kwargs)
    place, line, carets, sentence = str(caught.value).split("\n")
    assert place.startswith(__file__) and line == "    affine(*args, **kwargs)" and carets.strip() == "^" * 23
    assert ": expected " in sentence and sentence.endswith(".")


def test_what_cannot_be_compiled_is_refused() -> None:
    refused: list[tuple[type[FusibleError], str, Any]] = [
        (ArgumentError, "optimization_level", lambda: lazy.compile(_affine, 9, args=[_PAIR])),
        (ArgumentError, "missing a required argument", lambda: lazy.compile(_affine)),
        (ArgumentError, "unexpected keyword", lambda: lazy.compile(_affine, args=[_PAIR], kwargs={"other": 1})),
        (ArgumentError, "names among shift, x of donate", lambda: lazy.compile(_affine, args=[_PAIR], kwargs={"shift": _PAIR}, donate=["y"])),
        (ArgumentError, r"a result of float32 \[2\] to take its memory", lambda: lazy.compile(lambda x: x.sum(), args=[_PAIR], donate=["x"])),
        (ArgumentError, "donated input y", lambda: lazy.compile(lambda x, y: x + y, args=[_PAIR, _PAIR], donate=["x", "y"])),
        (CompileError, "of a function being compiled", lambda: lazy.compile(lambda x: x.tolist(), args=[_PAIR])),
        (DTypeError, "three ints", lambda: lazy.InputInfo(((1, 2),), _F32)),
        (DTypeError, "a size or its bounds", lambda: lazy.InputInfo(("n",), _F32)),
        (DTypeError, "a sequence of dimensions", lambda: lazy.InputInfo("n", _F32)),
        (ShapeError, "min <= opt <= max", lambda: lazy.InputInfo(((4, 2, 8),), _F32)),
        (ShapeError, "min <= opt <= max", lambda: lazy.NamedDimension("n", 1, 9, 8)),
        (DTypeError, "a text", lambda: lazy.NamedDimension(3, 1, 2, 3)),  # type: ignore[arg-type]
        (DTypeError, "three ints", lambda: lazy.DimensionInputInfo(4)),  # type: ignore[arg-type]
        (DTypeError, "a device", lambda: lazy.default_stream("gpu")),  # type: ignore[arg-type]
    ]
    for kind, text, action in refused:
        with pytest.raises(kind, match=text) as caught:
            action()
        assert str(caught.value).startswith(__file__), text


def test_every_optimization_level_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[Any] = []
    options = pjrt._options
    monkeypatch.setattr(pjrt, "_options", lambda more=(): levels.extend(more) or options(more))
    results = [lazy.compile(lambda x: lazy.softmax(x * 3.0 + 1.0), level, args=[_PAIR])(np.array([1, 2], np.float32)).numpy() for level in (0, 1, 5)]
    assert levels == [("xla_backend_optimization_level", 0), ("xla_backend_optimization_level", 1)]
    for got in results:
        np.testing.assert_allclose(got, [1 / (1 + np.exp(3)), 1 / (1 + np.exp(-3))], rtol=8 * np.finfo(np.float32).eps)


def _address(tensor: lazy.Tensor) -> int:
    return tensor.trace_tensor.producer.placed().unsafe_buffer_pointer()


def test_stored_tensors_stay_on_the_device_and_leave_without_copies() -> None:
    executable = lazy.compile(lambda x: x + 1.0, args=[lazy.InputInfo((1024,), _F32)])
    x = lazy.zeros((1024,)) * 2.0
    y = executable(x)
    buffer = x.trace_tensor.producer.buffer
    z = executable(y)
    assert executable(x).numpy()[0] == 1.0 and x.trace_tensor.producer.buffer is buffer
    assert _address(y) == y.numpy().ctypes.data == torch.from_dlpack(y).data_ptr() == np.from_dlpack(y).ctypes.data
    assert torch.from_dlpack(z)[5] == 2.0 and y.device is lazy.device("gpu:0") and y.name is None
    given = torch.zeros(1024)
    assert _address(lazy.Tensor(given)) == given.data_ptr()
    kept = torch.from_dlpack(executable(given))
    assert kept.sum() == 1024.0 and given.sum() == 0.0


@pytest.mark.parametrize("of", [lazy.bfloat16, lazy.float8, lazy.int64, lazy.bool, lazy.int4], ids=str)
def test_results_of_every_kind_are_tensors(of: lazy.dtype) -> None:
    data = np.array([[0, 1, 1], [1, 0, 1]], np.float32)
    got = lazy.compile(lambda x: x.transpose(0, 1), args=[lazy.InputInfo((2, 3), of)])(lazy.Tensor(data).cast(of))
    assert (got.dtype, got.shape) == (of, (3, 2)) and got.cast(_F32).tolist() == data.T.tolist()
    assert got.numpy().astype(np.float32).tolist() == data.T.tolist()


def test_int4_is_packed_on_the_device_alone() -> None:
    values = np.arange(-8, 7).astype(ml_dtypes.int4).reshape(3, 5)
    executable = lazy.compile(lambda x: x.transpose(0, 1), args=[lazy.InputInfo((3, 5), lazy.int4)])
    for got in (executable(values), executable(executable(values).transpose(0, 1)), executable.run(values)[0]):
        assert got.numpy().tolist() == values.T.tolist()


def test_a_donated_tensor_is_used_up_and_its_memory_taken() -> None:
    big = lazy.InputInfo((4096,), _F32)
    executable = lazy.compile(lambda x, y: (y * 0.0, x + y), args=[big, big], donate=["x"])
    assert "tf.aliasing_output = 0" in executable.stablehlo.text
    state, step = lazy.zeros((4096,)).eval(), lazy.ones((4096,)).eval()
    for _ in range(5):
        before = _address(state)
        freed, state2 = executable(state, step)
        assert _address(freed) == before
        for use in (state.numpy, lambda: (state + 1.0).eval(), lambda: executable(state, step), lambda: executable(step, state)):  # noqa: B023
            with pytest.raises(ArgumentError, match="whose memory was donated"):
                use()
        state = state2
    assert (state.numpy() == 5.0).all() and (step.numpy() == 1.0).all()


def test_memory_that_others_see_is_copied_before_it_is_donated() -> None:
    executable = lazy.compile(lambda x: x + 1.0, args=[lazy.InputInfo((4096,), _F32, donate=True)])
    x = lazy.zeros((4096,)).eval()
    seen = x.numpy()
    theirs = torch.zeros(4096)
    shared = lazy.Tensor(theirs)
    for _ in range(3):
        assert executable(theirs).numpy().sum() == executable.run(theirs)[0].numpy().sum() == 4096.0
    assert executable(x).numpy().sum() == executable(shared).numpy().sum() == 4096.0
    assert seen.sum() == 0.0 and theirs.sum() == 0.0
    both = lazy.compile(lambda x, y: x + y, args=[lazy.InputInfo((4096,), _F32)] * 2, donate=["x"])
    y = lazy.ones((4096,)).eval()
    with pytest.raises(ArgumentError, match="a tensor of its own"):
        both(y, y)
    with pytest.raises(ShapeError):
        both(y, lazy.ones((3,)))
    assert y.numpy().sum() == 4096.0


def test_streams_are_the_hosts_one_order() -> None:
    executable = lazy.compile(_affine, args=[_PAIR])
    assert executable.stream is lazy.default_stream() is lazy.default_stream(lazy.device("gpu")) is not lazy.default_stream(lazy.device("cpu"))
    executable.stream = mine = lazy.Stream()
    assert executable(_ONES).tolist() == [1.0, 1.0] and mine.ptr == 0 and repr(mine) == "Stream(gpu:0)"
    mine.synchronize()


def test_four_threads_call_and_evaluate_at_once() -> None:
    executable = lazy.compile(lambda x, y: x @ y, args=[lazy.InputInfo(((1, 4, 8), 16), _F32), lazy.InputInfo((16, 16), _F32)])
    shared = lazy.Tensor(np.eye(16, dtype=np.float32))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(40):
                x = np.full((1 + (seed + i) % 5, 16), seed * 100 + i, np.float32)
                assert (executable(x, shared).numpy() == x).all()
                assert ((lazy.Tensor(x) + 1.0) * 2.0).numpy()[0, 3] == 2 * x[0, 3] + 2
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_to_spawn_by_calls_and_compilation(affine: lazy.Executable) -> None:
    x = lazy.Tensor(_ONES).eval()
    affine(x, shift=x)
    pid = os.fork()
    if not pid:
        told = 0
        for action in (lambda: affine(x, shift=x), lambda: affine(_ONES, shift=_ONES), lambda: lazy.compile(_affine, args=[_PAIR])):
            try:
                action()
            except ForkError as error:
                told += "spawn" in str(error)
        os._exit(0 if told == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _child(sender: Any) -> None:
    sender.send(lazy.compile(_affine, args=[_PAIR])(_ONES).tolist())


def test_a_spawned_child_compiles_and_calls() -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender,))
    process.start()
    assert receiver.poll(120) and receiver.recv() == [1.0, 1.0]
    process.join()
    assert process.exitcode == 0


def test_outputs_of_the_flat_call_are_inputs_again() -> None:
    executable = lazy.compile(lambda x: x + x, args=[lazy.InputInfo((3,), lazy.bfloat16)])
    (once,) = executable.run(np.ones(3, ml_dtypes.bfloat16))
    assert executable(once).cast(_F32).tolist() == [4.0] * 3 and executable.run(once)[0].numpy().tolist() == [4.0] * 3


def test_programs_that_differ_in_one_respect_are_told_apart() -> None:
    """What the key of a program holds besides its operations. The one that is compiled first must not serve the other."""
    x = np.full(4096, 3.0, np.float32)

    def both(a: lazy.Tensor) -> tuple[lazy.Tensor, lazy.Tensor]:
        more = a + 1.5
        return more, more * 2.0

    info = lazy.InputInfo((4096,), _F32)
    for function, wanted in ((both, (4.5, 9.0)), (lambda a: both(a)[::-1], (9.0, 4.5)), (lambda a: both(a)[1:] * 2, (9.0, 9.0))):
        assert tuple(t.numpy()[0] for t in lazy.compile(function, args=[info])(x)) == wanted
    for zero in (0.0, -0.0):
        assert str(lazy.full((7,), zero).numpy()[0]) == str(zero)
    taking, leaving = (lazy.compile(lambda a: a * 3.5, args=[info], donate=names) for names in (["a"], []))
    first, second = lazy.full((4096,), 3.0).eval(), (lazy.full((4096,), 1.5) * 2.0).eval()
    assert taking(first).numpy()[0] == leaving(second).numpy()[0] == 10.5
    assert second.numpy()[0] == 3.0
