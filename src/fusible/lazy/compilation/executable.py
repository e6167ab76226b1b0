"""Compiled functions, and calling them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fusible.errors import ArgumentError, FusibleError, NotServedError, ShapeError, check_path, check_switch, expected
from fusible.lazy.assumptions import Condition
from fusible.lazy.compilation import saving
from fusible.lazy.compilation.argument_checks import ArgumentCheck
from fusible.lazy.compilation.input_info import Bounds, InputInfo, Runtime
from fusible.lazy.compilation.signature import Signature, mapped
from fusible.lazy.compilation.source import Source
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dims import Size, SizeLike, Symbol, bounds, concrete, evaluate
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine.engine import Program
from fusible.lazy.engine.output import Output
from fusible.lazy.engine.pjrt import check_process
from fusible.lazy.engine.stream import default_stream
from fusible.lazy.flat_ir import FlatIR
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import locate, shows_user
from fusible.lazy.printing import Shape
from fusible.lazy.source import user_line
from fusible.lazy.stablehlo.module import StableHLO
from fusible.lazy.trace import Storage, Trace, TraceTensor
from fusible.locks import Lock

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["Executable", "ResultType"]

_CAPACITY = 64
"""How many programs of one executable are kept, for as many sizes."""

ResultType = tuple[Shape, dtype, device]


class Saved(NamedTuple):
    """The parts of an executable that a file keeps. ``usual_program`` compiles the program for its usual sizes."""

    signature: Signature
    results: list[ResultType]
    conditions: list[Condition]
    single: bool
    source: Source
    usual_program: Callable[[], Program]


class Executable:
    """A compiled function, made by ``compile`` or ``Executable.load``.

    Calling it takes the runtime inputs by position or by name, and returns a tensor, or a tuple where the function returned several (flat,
    in order). An input is a lazy tensor (evaluated first where it has to be), a numpy array or anything on the host with ``__dlpack__``; its memory
    is read in place where it is aligned to 64 bytes. A size is an int. Arguments are checked before anything runs: a call raises
    ``ArgumentError`` for a missing, unknown or doubled argument, another structure or device, or memory that is not contiguous, ``DTypeError``
    for another dtype and ``ShapeError`` for another rank or size, or for sizes outside of their bounds.

    A program is compiled for each set of sizes that is met, first of all the usual ones; 64 are kept. A call is synchronous:
    when it returns, the results are ready and no input is read any more. Calls may come from several threads.

    ``trace``, ``flat_ir`` (before passes) and ``stablehlo`` (of ``flat_ir``) print the program; ``optimized_flat_ir.report``
    lists what the passes did.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        checks: Sequence[ArgumentCheck],
        results: Sequence[ResultType],
        source: Source,
        *,
        single: bool,
        conditions: Sequence[Condition] = (),
    ) -> None:
        self.name = name
        self.stream = default_stream()
        self._signature = signature
        self._plain_count = signature.plain_count
        self._checks = list(checks)
        self._results = list(results)
        self._source = source
        self._single = single
        self._conditions = list(conditions)
        self._origins = [origin for a in checks for origin in a.origins]
        self._donated = [i for i, a in enumerate(checks) if a.donate]
        self._lock = Lock()
        self._programs: OrderedDict[tuple[int, ...], tuple[Program, list[ResultType]]] = OrderedDict()
        self._constants = [op.placed() for op in source.storages]
        self.__signature__ = signature.spelled(Tensor, tuple[(Tensor,) * len(self._results)] if not single else Tensor)  # type: ignore[misc]
        self._fixed: tuple[Program, list[ResultType]] | None = None
        if not self._origins:
            self._fixed = source.program({}), list(results)
        elif self._usual_sizes_agree():
            self._usual_program()

    @property
    def input_infos(self) -> dict[str, Any]:
        """By argument its ``InputInfo`` or ``DimensionInputInfo``, or the structure of them that it was compiled for."""
        return {p.name: mapped(p.template, lambda leaf: leaf.info) for p in self._signature.parameters}

    @property
    def input_info(self) -> list[Runtime]:
        """The declaration of every runtime input, in the order of ``run``."""
        return [leaf.info for leaf in self._signature.leaves]

    @property
    def output_infos(self) -> list[InputInfo]:
        """The shapes and dtypes of the results; a size that depends on the call as its bounds."""
        usual = {symbol: symbol.opt for symbol, _ in self._origins}

        def dimension(n: SizeLike) -> int | Bounds:
            low, high = bounds(n)
            return Bounds(max(low, 0), max(evaluate(n, usual), 0), high) if isinstance(n, Size) else n

        return [InputInfo(tuple(map(dimension, shape)), of) for shape, of, _ in self._results]

    @property
    def trace(self) -> Trace:
        """The recorded function; raises ``ArgumentError`` in a loaded executable, which has none."""
        return self._source.trace

    @property
    def flat_ir(self) -> FlatIR:
        """Its FlatIR; raises ``ArgumentError`` in a loaded executable, which has none."""
        return self._source.flat_ir

    @property
    def optimized_flat_ir(self) -> FlatIR:
        """The FlatIR of its usual sizes after the passes: what is compiled. Its ``report`` says what each pass did.

        Raises ``ArgumentError`` in a loaded executable, which has none.
        """
        return self._source.optimized({symbol: symbol.opt for symbol, _ in self._origins})

    @property
    def stablehlo(self) -> StableHLO:
        return self._source.stablehlo

    def __str__(self) -> str:
        """Its runtime inputs and what a call returns: ``Executable(x: Tensor) -> Tensor``."""
        inputs = [f"{name}: {p.annotation.__name__}" for name, p in self.__signature__.parameters.items()]
        result = "Tensor" if self._single else f"tuple[{', '.join(['Tensor'] * len(self._results))}]"
        return f"Executable({', '.join(inputs)}) -> {result}"

    def __repr__(self) -> str:
        return f"Executable({self.name}, inputs={len(self._checks)}, outputs={len(self._results)})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on the runtime inputs. See the class."""
        try:
            leaves: Sequence[Any] = args if len(args) == self._plain_count and not kwargs else self._signature.bind(args, kwargs)
            buffers: list[Any] = []
            sizes: list[int] = []
            for check, leaf in zip(self._checks, leaves, strict=True):
                if type(leaf) is Tensor and not check.donate:
                    # The common case without a call: a stored tensor of the one right type.
                    tensor = leaf.trace_tensor
                    stored = tensor.producer
                    if type(stored) is Storage and tensor.shape == check.shape and tensor.dtype is check.dtype and tensor.device is DEFAULT:
                        buffers.append(stored.buffer if stored.buffer is not None else stored.placed())
                        continue
                buffers.append(check.admit(leaf, sizes))
            program, results = self._fixed or self._at(sizes)
            if self._donated:
                self._donate(buffers)
            made = program.launch(buffers + self._constants)
        except FusibleError as error:
            locate(error, ())
            raise
        line = user_line()
        tensors = []
        for buffer, (shape, of, place) in zip(made, results, strict=True):
            op = Storage(shape, of, buffer=buffer)
            tensor = TraceTensor(shape, of, place, op, line)
            op.bind((), (tensor,))
            tensors.append(Tensor.from_trace_tensor(tensor))
        return tensors[0] if self._single else tuple(tensors)

    def run(self, *inputs: Any) -> list[Output]:
        """Run on ``inputs`` in order, and return a flat list of ``Output``: the call for those who hold arrays.

        Strided memory is copied. Raises as a call does; donation takes nothing from the caller here.
        """
        try:
            if len(inputs) != len(self._checks):
                wanted = f"{len(self._checks)} inputs"
                raise ArgumentError(expected(wanted, of=f"the executable {self.name}", got=len(inputs), do="pass one per InputInfo"))
            sizes: list[int] = []
            arrays = [check.read(value, sizes) for check, value in zip(self._checks, inputs, strict=True)]
            program, _ = self._fixed or self._at(sizes)
        except FusibleError as error:
            locate(error, ())
            raise
        for i in self._donated:
            arrays[i] = arrays[i].copy()
        put = program.put
        buffers = [put(i, array) for i, array in enumerate(arrays)]
        return [Output(array) for array in program.run(buffers + self._constants)]

    @property
    def usual_program(self) -> tuple[Program, list[Any]]:
        """The program of the usual sizes, which of an executable without dynamic ones is the only one, and the buffers of its constants, which it
        takes last: for callers that place buffers themselves, of the shapes and dtypes of ``input_info``, and need no checks."""
        return self._usual_program(), self._constants

    @shows_user
    def save(self, path: str | PathLike[str], *, binary: bool = False) -> None:
        """Write the executable to the file ``path``, all of it or nothing: see ``fusible.lazy.compilation.saving``.

        With ``binary`` the file holds the compiled program of the usual sizes too, which a process that trusts it loads faster. Raises
        ``CompileError`` where the program has an operation that StableHLO lacks for dynamic sizes.
        """
        check_path(path, "path of Executable.save")
        check_switch(binary, "binary of Executable.save")
        saving.save(self, path, binary)

    @classmethod
    @shows_user
    def load(cls, path: str | PathLike[str], *, trust_binary: bool = False) -> Executable:
        """The executable of a file that ``save`` wrote; the source of its model is not needed. Nothing in the file is unpickled.

        ``trust_binary`` allows the compiled program in it, where it fits this machine: loading that may run code, so use it for
        your own files only. Raises ``CheckpointError`` for a file that is truncated, altered or something else.
        """
        check_path(path, "path of Executable.load")
        check_switch(trust_binary, "trust_binary of Executable.load")
        return saving.load(cls, path, trust_binary)

    def __copy__(self) -> Executable:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Executable:
        return self.__copy__()  # but for its stream, nothing of it changes

    def __reduce__(self) -> NoReturn:
        do = "write it by its save(path), and read it by Executable.load(path)"
        raise NotServedError(expected("a file of its own", of=f"a pickle of the Executable {self.name}", got="a pickle", do=do))

    @property
    def saved(self) -> Saved:
        """The parts that ``save`` writes."""
        return Saved(self._signature, self._results, self._conditions, self._single, self._source, self._usual_program)

    def _usual_program(self) -> Program:
        return (self._fixed or self._at([symbol.opt for symbol, _ in self._origins]))[0]

    def _usual_sizes_agree(self) -> bool:
        """Whether the usual sizes fulfil the program's conditions, so that it can be compiled for them before the first call."""
        usual = {symbol: symbol.opt for symbol, _ in self._origins}
        try:
            for condition in self._conditions:
                condition.check(usual, dict(self._origins))
        except ShapeError:
            return False
        return True

    def _at(self, sizes: Sequence[int]) -> tuple[Program, list[ResultType]]:
        """The program for the sizes of a call (one per dynamic dimension, in order), and the types of its results."""
        check_process()  # before the lock, which a thread that a forked child lacks may hold
        key = tuple(sizes)
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found
        values = self._values(key)
        for condition in self._conditions:
            condition.check(values, dict(self._origins))
        made = self._source.program(values), [(concrete(shape, values), of, place) for shape, of, place in self._results]
        with self._lock:
            self._programs[key] = made
            while len(self._programs) > _CAPACITY:
                self._programs.popitem(last=False)
        return made

    def _values(self, sizes: Sequence[int]) -> dict[Symbol, int]:
        """The value of each named size; raises ``ShapeError`` where two dimensions of one name differ."""
        values: dict[Symbol, int] = {}
        origins: dict[Symbol, str] = {}
        for (symbol, origin), n in zip(self._origins, sizes, strict=True):
            first = values.setdefault(symbol, n)
            origins.setdefault(symbol, origin)
            if first != n:
                of = f"{origins[symbol]} and {origin} of the executable {self.name}, both named {symbol.name!r}"
                raise ShapeError(expected("equal sizes", of=of, got=f"{first} and {n}", do="pass tensors whose sizes agree"))
        return values

    def _donate(self, buffers: list[Any]) -> None:
        """Replace the stored tensors that are donated by their buffers; they are used up."""
        donated: list[Storage] = [buffers[i] for i in self._donated]
        kept = {id(b) for i, b in enumerate([*buffers, *self._constants]) if i not in self._donated}
        if len(set(map(id, donated))) < len(donated) or any(id(stored.buffer) in kept for stored in donated):
            got = "one that is another input or a constant as well"
            raise ArgumentError(expected("a tensor of its own", of=f"a donated input of the executable {self.name}", got=got, do="copy it first"))
        for i in self._donated:
            buffers[i] = buffers[i].donate()
