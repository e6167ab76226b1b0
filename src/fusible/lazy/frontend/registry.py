"""The registry of the methods of ``Tensor``, which are defined in the files of the operations that they record."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["TENSOR_METHOD_REGISTRY", "TensorMeta"]

F = TypeVar("F", bound=Callable[..., object])


class _Registry:
    """Name to function. ``@TENSOR_METHOD_REGISTRY("tanh")`` makes the function below it the method ``Tensor.tanh`` as well.

    ``constrained`` does so for the names that it is given first.
    """

    def __init__(self) -> None:
        self.methods: dict[str, Callable[..., object]] = {}
        self.classes: list[type] = []

    def __call__(self, *names: str) -> Callable[[F], F]:
        def register(function: F) -> F:
            for name in names:
                assert name not in self.methods, f"Tensor.{name} is registered twice"
                self.methods[name] = function
                for cls in self.classes:
                    setattr(cls, name, function)
            return function

        return register

    def attach(self, cls: type) -> None:
        """Give ``cls`` every method registered so far, and every later one."""
        self.classes.append(cls)
        for name, function in self.methods.items():
            setattr(cls, name, function)


TENSOR_METHOD_REGISTRY = _Registry()


class TensorMeta(type):
    """The class of ``Tensor``: reads the registry, so that methods need no mention in the class. A subclass inherits, and may override, them."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, object]) -> None:
        super().__init__(name, bases, namespace)
        if not any(isinstance(base, TensorMeta) for base in bases):
            TENSOR_METHOD_REGISTRY.attach(cls)
