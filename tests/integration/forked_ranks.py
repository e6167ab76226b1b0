"""Processes of ``fusible train``, forked from one that has loaded all modules, and told who they are as ``torchrun`` tells them, whose launcher holds
the store by which they meet. So they begin at once, where a new interpreter takes seconds.

As a program it reads a line of JSON for each command, and says how its processes have ended: for ``Launcher``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from fusible.cli import main
from fusible.cli.training import job  # noqa: F401  # loaded before processes are forked

_STORES: list[dist.TCPStore] = []
_TICK = 0.005


def start(said: Path, commands: Sequence[Sequence[str]], *, folder: Path | None = None, code: str = "") -> list[int]:
    """The ids of the processes that run ``commands``, one each, after ``code`` in Python. What they print is in ``said``, a file for each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _STORES.append(store)
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told["WORLD_SIZE"] = str(len(commands))
    said.mkdir(exist_ok=True)
    return [_fork(said, list(words), {**told, "RANK": str(rank)}, folder, code) for rank, words in enumerate(commands)]


def _fork(said: Path, words: list[str], told: dict[str, str], folder: Path | None, code: str) -> int:
    child = os.fork()
    if child:
        return child
    ended = 1
    try:
        os.environ.update(told)
        for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
            with open(said / f"rank{told['RANK']}.{kind}", "w") as file:
                os.dup2(file.fileno(), stream.fileno())
        os.chdir(folder or os.curdir)
        warnings.simplefilter("ignore")  # torch's own, of what it will change
        exec(code, {})
        ended = main(["train", *words])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)


def exit_codes(processes: Sequence[int], limit: float) -> list[int]:
    """How each has ended: its exit code, or the signal, negative. Raises ``TimeoutError`` where one does not within ``limit`` seconds."""
    found: dict[int, int] = {}
    began = time.monotonic()
    while len(found) < len(processes):
        for process in processes:
            if process not in found and (reaped := os.waitpid(process, os.WNOHANG))[0]:
                found[process] = os.waitstatus_to_exitcode(reaped[1])
        if time.monotonic() - began > limit:
            for process in set(processes) - set(found):
                os.kill(process, signal.SIGKILL)
            raise TimeoutError(f"{len(processes) - len(found)} of {len(processes)} processes wait still")
        time.sleep(_TICK)
    return [found[process] for process in processes]


class Launcher:
    """``with Launcher() as launcher: launcher.run(folder, commands)``: a program that forks the processes of one command after another."""

    def __enter__(self) -> Self:
        self._program = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._program.communicate(timeout=60)

    def run(self, folder: Path, commands: Sequence[Sequence[str]], *, code: str = "", kill_last: bool = False) -> list[tuple[int, str, str]]:
        """For each process its exit code, and what it printed to both streams. ``kill_last``: the last is killed when the first has ended."""
        assert self._program.stdin is not None and self._program.stdout is not None
        with tempfile.TemporaryDirectory() as said:
            request = {"said": said, "commands": [list(words) for words in commands], "folder": str(folder), "code": code, "kill_last": kill_last}
            print(json.dumps(request), file=self._program.stdin, flush=True)
            reply = json.loads(self._program.stdout.readline())
            texts = [[(Path(said) / f"rank{rank}.{kind}").read_text() for kind in ("out", "err")] for rank in range(len(commands))]
        assert isinstance(reply, list), (reply, texts)
        return [(ended, *text) for ended, text in zip(reply, texts, strict=True)]  # type: ignore[misc]


def _serve(request: dict[str, Any]) -> list[int] | str:
    processes = start(Path(request["said"]), request["commands"], folder=Path(request["folder"]), code=request["code"])
    try:
        if not request["kill_last"]:
            return exit_codes(processes, 300)
        first = exit_codes(processes[:1], 300)
        os.kill(processes[-1], signal.SIGKILL)
        return [*first, *exit_codes(processes[1:], 300)]
    except TimeoutError as error:
        return str(error)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)
