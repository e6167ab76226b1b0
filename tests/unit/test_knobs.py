"""Every environment variable: unset, empty, good and bad, with spaces and in any case. What cannot be read is refused by the variable's name."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from fusible.errors import KnobError
from fusible.knobs import KNOBS
from fusible.lazy.logger import CHANNELS, LEVELS

_SWITCH: dict[str, Any] = {**dict.fromkeys(("1", "true", "Yes", "ON"), True), **dict.fromkeys(("0", "false", "No", "OFF"), False)}
_BAD_SWITCH = ("2", "-1", "truthy", "1,0", "none", "1 0", "\u0661")
_SCOPES: dict[str, Any] = {name: name for name in ("none", "weights", "activations", "all")}
_BAD_SCOPE = ("weight", "both", "1", "none,all")

_TABLE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "TE_BACKEND": ({"torch": "torch", "Nvidia": "nvidia"}, ()),
    "TE_PLUGIN": ({"torch": "torch"}, ()),
    "TE_FALLBACK_BACKEND": ({"torch": "torch"}, ()),
    "TE_FL_STRICT": (_SWITCH, _BAD_SWITCH),
    "TE_FL_DEBUG": (_SWITCH, _BAD_SWITCH),
    "TE_FL_SKIP_CUDA": (_SWITCH, _BAD_SWITCH),
    "TE_FL_PREFER": (
        {"flagos": "flagos", "default": "flagos", "Vendor": "vendor", "reference": "reference"},
        ("torch", "vendors", "1", "flagos,vendor"),
    ),
    "TE_FL_PER_OP": (
        {"relu=torch": {"relu": ("torch",)}, "a=b|c;prim.d=vendor:e ;": {"a": ("b", "c"), "prim_d": ("vendor:e",)}},
        ("relu", "=", "a=", "=b", "a=b|", "a=|b", "a=b;a=c", ";", "a=b;c", "a b"),
    ),
    "TE_FL_ALLOW_VENDORS": ({"NVIDIA": frozenset({"nvidia"}), "a, b ,,a": frozenset({"a", "b"})}, (",", " , ")),
    "TE_FL_DENY_VENDORS": ({"NVIDIA": frozenset({"nvidia"}), "a,Moore Threads": frozenset({"a", "moore threads"})}, (",", ",,")),
    "TE_FL_PLUGIN_MODULES": ({"a": ("a",), " a , b.c ,,": ("a", "b.c"), ",": ()}, ()),
    "FUSIBLE_CPU_LEVEL": ({name: name for name in ("generic", "avx2", "avx512", "avx512bf16", "amx")}, ("avx", "sse", "avx-512", "best")),
    "RANK": ({"0": 0, "3": 3}, ("-1", "1.5", "first")),
    "WORLD_SIZE": ({"1": 1, "8": 8}, ("-1", "1.5", "all")),
    "FUSIBLE_NUM_THREADS": ({"0": 0, "1": 1, "016": 16, "1024": 1024}, ("-1", "1.5", "1025", "9" * 30, "1_0", "all", "0x4", "+2", "\u0661", "1 2")),
    "FUSIBLE_RETURN_MEMORY": (_SWITCH, _BAD_SWITCH),
    "FUSIBLE_RUN": ({"null": None, '{"device": "cpu"}': {"device": "cpu"}}, ("cpu", "{", "--device cpu")),
    "NVTE_PLUGIN": ({"fusible.plugin": "fusible.plugin"}, ()),
    "NVTE_BACKWARD_OVERRIDE": ({"high_precision": "high_precision", "Dequantized": "dequantized"}, ("none", "high", "1")),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": (_SWITCH, _BAD_SWITCH),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": (_SWITCH, _BAD_SWITCH),
    "NVTE_NVFP4_DISABLE_RHT": (_SWITCH, _BAD_SWITCH),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": (_SWITCH, _BAD_SWITCH),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": (_SWITCH, _BAD_SWITCH),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": (_SWITCH, _BAD_SWITCH),
    "NVTE_NVFP4_4OVER6": (_SCOPES, _BAD_SCOPE),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": (_SCOPES, _BAD_SCOPE),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ({"MAE": "MAE", "mse": "MSE"}, ("rmse", "m", "MAE,MSE")),
    "FUSIBLE_LAZY_ENGINE": ({"pjrt": "pjrt", "IREE": "iree"}, ("xla", "tensorrt", "pjrt,iree")),
    "FUSIBLE_LAZY_VERBOSITY": (
        {**{name: (name,) for name in (*LEVELS, *CHANNELS, "ir")}, "Info, timing": ("info", "timing")},
        ("loud", "info,loud", ",", "infotrace"),
    ),
    "FUSIBLE_LAZY_CACHE_DIR": ({"/tmp/Cache Dir": "/tmp/Cache Dir"}, ()),
    "FUSIBLE_LAZY_ERRORS": ({"flat_ir": ("flat_ir",), "Diagnostic,flat_ir": ("diagnostic", "flat_ir")}, ("all", "flat_ir,all", ",")),
}
"""By variable: texts with what they stand for, and texts that stand for nothing. Those without the latter name what is looked for when it is used."""

_AS_WRITTEN = ("FUSIBLE_RUN", "FUSIBLE_LAZY_CACHE_DIR", "NVTE_PLUGIN", "TE_FL_PLUGIN_MODULES", "TE_FL_PER_OP")
"""Paths, modules and functions, whose case means something."""


def test_the_table_has_every_variable() -> None:
    assert list(_TABLE) and set(_TABLE) == set(KNOBS)


@pytest.mark.parametrize("name", _TABLE)
def test_every_text_of_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    knob, (good, bad) = KNOBS[name], _TABLE[name]
    monkeypatch.delenv(name, raising=False)
    assert knob.get() == knob.default and knob.text is None
    for text in ("", " ", "\t \n"):
        monkeypatch.setenv(name, text)
        assert knob.get() == knob.default
    for text, value in good.items():
        cases = (text,) if name in _AS_WRITTEN else (text, text.upper(), text.lower())
        for spelled in (*cases, *(f" {case}\t" for case in cases)):
            monkeypatch.setenv(name, spelled)
            assert knob.get() == value, spelled
    for text in bad:
        monkeypatch.setenv(name, text)
        with pytest.raises(KnobError) as refused:
            knob.get()
        says = f"the environment variable {name}: expected {knob.takes}, got {text.strip()!r}; set it so or unset it."
        assert str(refused.value) == says


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("FUSIBLE_NUM_THREADS", "from fusible import cpp_extensions; cpp_extensions.info()"),
        ("FUSIBLE_LAZY_ENGINE", "from fusible import lazy; lazy.ones((2,)).eval()"),
        ("FUSIBLE_LAZY_ERRORS", "from fusible import lazy; lazy.config.extra_error_information"),
        ("FUSIBLE_LAZY_VERBOSITY", "from fusible import lazy; lazy.ones((2,)).eval()"),
    ],
)
def test_where_a_variable_is_used_it_is_named(name: str, code: str) -> None:
    """In a process of its own: these are read once."""
    environment = {**os.environ, name: "-7"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    last = run.stderr.strip().split("\n")[-1]
    assert run.returncode == 1 and f"the environment variable {name}: expected " in last and ", got '-7'; " in last, run.stderr
