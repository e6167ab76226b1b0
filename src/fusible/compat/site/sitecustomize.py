"""What Python looks for first in the processes that a program under ``fusible run`` starts: they are served as it is.

Nothing is imported before the program itself asks for torch, or for a name that leads to Fusible. The ``sitecustomize`` that this one hides runs too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

LEAD_HERE = ("transformer_engine", "transformer_engine_torch", "transformer_engine_fl_torch", "tripy", "nvtripy")


class _ThenServe(importlib.abc.Loader):
    """Torch's loader; once torch is there, the process is served."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # pyright: ignore[reportOptionalMemberAccess]
        self._loader.exec_module(module)
        from fusible.compat.script import serve_child  # noqa: PLC0415 - it brings torch, which is there from here on

        serve_child()


class _Waiting(importlib.abc.MetaPathFinder):
    """Waits for the first import that matters."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenServe(spec.loader)
            return spec
        if name in LEAD_HERE:
            importlib.import_module("torch")
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            return next((spec for spec in found if spec is not None), None)
        return None


def _run_the_hidden_one():
    here = os.path.dirname(os.path.abspath(__file__))
    places = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":  # imported by any other name, it is a module like the others
    _run_the_hidden_one()
    sys.meta_path.insert(0, _Waiting())
