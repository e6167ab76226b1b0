"""Every environment variable that Fusible reads: its name, type, default and meaning.

A knob is read where it is used (``TE_BACKEND.get()``), never at import and never on a hot path. A value
that cannot be parsed raises ``KnobError`` with the variable's name and what it takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from fusible.errors import KnobError, expected

__all__ = ["CPU_LEVELS", "KNOBS", "Knob", "is_held_to", "of_level", "replacing", "setting", "with_variables"]

T = TypeVar("T")

KNOBS: dict[str, Knob] = {}
"""Every knob by the name of its variable, in the order of declaration."""


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One environment variable: ``get()`` gives its value, parsed, or ``default`` where it is unset or empty."""

    name: str
    parse: Callable[[str], T]
    default: T
    takes: str
    doc: str

    def __post_init__(self) -> None:
        KNOBS[self.name] = self

    @property
    def text(self) -> str | None:
        """What the variable is set to, as it stands, or None."""
        return os.environ.get(self.name)

    def get(self) -> T:
        """The value that the variable stands for. Raises ``KnobError`` where it stands for none."""
        text = (self.text or "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            raise KnobError(expected(self.takes, of=f"the environment variable {self.name}", got=repr(text), do="set it so or unset it")) from None


_LEVELS = {
    "generic": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512bf16": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "DEFAULT"},
}
"""What holds torch and its libraries to the instructions of a level of the native kernels."""


CPU_LEVELS = tuple(_LEVELS)
"""Of the native kernels, each with the instructions of those before it."""


def of_level(level: str) -> dict[str, str]:
    """The variables that hold the native kernels, torch and its libraries to a level, for a process that is started with them."""
    return {"FUSIBLE_CPU_LEVEL": level, **_LEVELS[level]}


def is_held_to(level: str) -> bool:
    """Whether this process was started with ``of_level(level)``."""
    return all(os.environ.get(name) == value for name, value in of_level(level).items())


def with_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with others in it, for a process to start."""
    return {**os.environ, **variables}


@contextmanager
def setting(**variables: str) -> Iterator[None]:
    """Set environment variables while the context is open, those that are unset: for packages that read theirs and offer no other way."""
    added = {name: text for name, text in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def replacing(name: str, value: Callable[[str | None], str]) -> Iterator[None]:
    """Let an environment variable be ``value`` of what it is while the context is open: for the processes that are started then."""
    former = os.environ.get(name)
    os.environ[name] = value(former)
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = former


def _by_word(values: Mapping[str, T]) -> Callable[[str], T]:
    """Reads one of a few words, in whatever case, as its value."""

    def parse(text: str) -> T:
        if text.lower() not in values:
            raise ValueError(text)
        return values[text.lower()]

    return parse


def _switch(name: str, doc: str) -> Knob[bool]:
    """A knob that is off unless its variable says otherwise."""
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    return Knob(name, _by_word(words), False, "1, true, yes, on, 0, false, no or off", doc)


def _choice(name: str, words: Sequence[str], default: T, doc: str) -> Knob[str | T]:
    """A knob that takes one of ``words``, in whatever case."""
    *others, last = words
    return Knob[str | T](name, _by_word({word.lower(): word for word in words}), default, f"{', '.join(others)} or {last}", doc)


def _choices(name: str, words: Sequence[str], default: tuple[str, ...], doc: str) -> Knob[tuple[str, ...]]:
    """A knob that takes several of ``words``, in whatever case."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name.lower() for name in _names(text))
        if not names or not set(names) <= set(words):
            raise ValueError(text)
        return names

    return Knob(name, parse, default, f"a comma-separated list of {', '.join(words)}", doc)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _threads(text: str) -> int:
    """A count that a machine can have: an OpenMP runtime ends the process where it cannot start as many threads as it was asked for."""
    if not text.isascii() or not text.isdecimal() or int(text) > _MOST_THREADS:
        raise ValueError(text)
    return int(text)


def _vendors(text: str) -> frozenset[str]:
    if not _names(text):
        raise ValueError(text)
    return frozenset(name.lower() for name in _names(text))


def _orders(text: str) -> dict[str, tuple[str, ...]]:
    """``function=word|word;function=word``: of each function, the words for the backends that may serve it, best first."""
    orders: dict[str, tuple[str, ...]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        function, equals, words = (piece.strip() for piece in part.partition("="))
        order = tuple(word.strip() for word in words.split("|"))
        if not equals or not function or not all(order) or function in orders:
            raise ValueError(text)
        orders[function.replace("prim.", "prim_")] = order
    if not orders:
        raise ValueError(text)
    return orders


_MOST_THREADS = 1024
_SCOPES = ("none", "weights", "activations", "all")

TE_BACKEND = Knob("TE_BACKEND", str.lower, "", "a backend's name", "forces a tex backend for every call that it serves")
TE_PLUGIN = Knob("TE_PLUGIN", str.lower, "", "a backend's name", "the same as TE_BACKEND, which wins where both are set")
TE_FALLBACK_BACKEND = Knob(
    "TE_FALLBACK_BACKEND", str.lower, "", "a backend's name", "serves what the backend in force lacks; default: the next in order"
)
TE_FL_STRICT = _switch("TE_FL_STRICT", "a forced backend is the only one: what it lacks is an error")
TE_FL_DEBUG = _switch("TE_FL_DEBUG", "log each first selection of a backend, through logging")
TE_FL_SKIP_CUDA = _switch("TE_FL_SKIP_CUDA", "treat the nvidia backend as unavailable")
TE_FL_PREFER = Knob(
    "TE_FL_PREFER",
    _by_word({"flagos": "flagos", "default": "flagos", "vendor": "vendor", "reference": "reference"}),
    None,
    "flagos (or default), vendor or reference",
    "backends of that kind come first: FlagGems, the vendors' or torch; default: by priority",
)
TE_FL_PER_OP = Knob(
    "TE_FL_PER_OP",
    _orders,
    {},
    "function=backend|backend;function=backend",
    "for single functions, who alone may serve them, best first: a backend's name, flagos, vendor, vendor:NAME, reference or impl:ID",
)
TE_FL_ALLOW_VENDORS = Knob(
    "TE_FL_ALLOW_VENDORS", _vendors, None, "a comma-separated list of vendors", "of the vendors' backends, the only ones that may serve"
)
TE_FL_DENY_VENDORS = Knob(
    "TE_FL_DENY_VENDORS", _vendors, frozenset(), "a comma-separated list of vendors or backends", "backends that may serve nothing"
)
TE_FL_PLUGIN_MODULES = Knob(
    "TE_FL_PLUGIN_MODULES", _names, (), "a comma-separated list of modules", "modules with a register(registry) function, loaded at first use of tex"
)
FUSIBLE_CPU_LEVEL = _choice(
    "FUSIBLE_CPU_LEVEL",
    CPU_LEVELS,
    "",
    "the highest instruction set that the native kernels may use; default: the best that the CPU has",
)
FUSIBLE_NUM_THREADS = Knob(
    "FUSIBLE_NUM_THREADS", _threads, 0, f"a number of threads up to {_MOST_THREADS}", "threads of the native kernels; default (0): torch's own number"
)
FUSIBLE_RETURN_MEMORY = _switch(
    "FUSIBLE_RETURN_MEMORY", "commands give freed memory back to the system, as the C library does by itself; default: they keep it, which is faster"
)

RANK = Knob("RANK", _threads, 0, "a number from 0 on", "which of the processes that torchrun has started this one is")
WORLD_SIZE = Knob("WORLD_SIZE", _threads, 1, "a number of processes", "how many processes torchrun has started")
FUSIBLE_RUN = Knob(
    "FUSIBLE_RUN", json.loads, None, "what fusible run sets it to", "set by fusible run, for the processes that its program starts to be served too"
)

NVTE_PLUGIN = Knob(
    "NVTE_PLUGIN", str, None, "a module", "the module whose load_plugins() NVIDIA's package calls once it has its kernels: fusible.plugin, or another"
)
NVTE_BACKWARD_OVERRIDE = _choice(
    "NVTE_BACKWARD_OVERRIDE",
    ("high_precision", "dequantized"),
    None,
    "the default of a recipe's backward_override: what the backward pass computes from; default: from quantized operands",
)
NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES = _switch(
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "the default of Float8CurrentScaling's use_power_2_scales"
)
NVTE_FP8_BLOCK_SCALING_FP32_SCALES = _switch("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "the default of Float8BlockScaling's use_f32_scales")
NVTE_NVFP4_DISABLE_RHT = _switch("NVTE_NVFP4_DISABLE_RHT", "the default of NVFP4BlockScaling's disable_rht")
NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING = _switch(
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "the default of NVFP4BlockScaling's disable_stochastic_rounding"
)
NVTE_NVFP4_DISABLE_2D_QUANTIZATION = _switch("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "the default of NVFP4BlockScaling's disable_2d_quantization")
NVTE_NVFP4_ROW_SCALED_ACTIVATION = _switch("NVTE_NVFP4_ROW_SCALED_ACTIVATION", "the default of NVFP4BlockScaling's row_scaled_activation")
NVTE_NVFP4_4OVER6 = _choice("NVTE_NVFP4_4OVER6", _SCOPES, "none", "the default of NVFP4BlockScaling's nvfp4_4over6")
NVTE_NVFP4_4OVER6_E4M3_USE_256 = _choice(
    "NVTE_NVFP4_4OVER6_E4M3_USE_256", _SCOPES, "all", "the default of NVFP4BlockScaling's nvfp4_4over6_e4m3_use_256"
)
NVTE_NVFP4_4OVER6_ERR_MODE = _choice("NVTE_NVFP4_4OVER6_ERR_MODE", ("MAE", "MSE"), "MAE", "the default of NVFP4BlockScaling's nvfp4_4over6_err_mode")
FUSIBLE_LAZY_ENGINE = _choice(
    "FUSIBLE_LAZY_ENGINE", ("pjrt", "iree"), "pjrt", "the default of fusible.lazy's config.engine: what compiles and runs recorded programs"
)
FUSIBLE_LAZY_VERBOSITY = _choices(
    "FUSIBLE_LAZY_VERBOSITY",
    ("verbose", "info", "warning", "error", "trace", "flat_ir", "mlir", "ir", "timing"),
    ("warning",),
    "the default of fusible.lazy's logger.verbosity: a level, and channels",
)
FUSIBLE_LAZY_CACHE_DIR = Knob(
    "FUSIBLE_LAZY_CACHE_DIR", str, None, "a directory", "the default of fusible.lazy's config.timing_cache_file_path: where engine binaries are kept"
)
FUSIBLE_LAZY_ERRORS = _choices(
    "FUSIBLE_LAZY_ERRORS",
    ("flat_ir", "diagnostic"),
    (),
    "the default of fusible.lazy's config.extra_error_information: what errors of compilation show besides the user's line",
)
