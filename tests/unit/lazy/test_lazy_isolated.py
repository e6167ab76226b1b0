"""What ``import fusible.lazy`` brings."""

from __future__ import annotations

import subprocess
import sys


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr


def test_no_torch_ever_and_no_jaxlib_before_lowering() -> None:
    _run(
        "import sys\n"
        "import fusible.lazy as lazy\n"
        "y = lazy.full((2, 3), 0.5).tanh()\n"
        "str(lazy.Trace([y]).to_flat_ir())\n"
        "assert not {'torch', 'jaxlib', 'jax'} & set(sys.modules), sorted(sys.modules)\n"
        "y.eval()\n"
        "assert 'jaxlib' in sys.modules and not {'torch', 'jax'} & set(sys.modules)\n"
    )


def test_a_child_forked_before_any_execution_may_execute() -> None:
    _run(
        "import os\n"
        "import fusible.lazy as lazy\n"
        "x = lazy.full((2,), 0.5)\n"
        "str(lazy.Trace([x]).to_flat_ir().to_stablehlo())\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    os._exit(0 if (x + 1.0).tolist() == [1.5, 1.5] else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
