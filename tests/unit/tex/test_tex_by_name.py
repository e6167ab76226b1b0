"""``by_name``: a method of a backend that takes its arguments as one object."""

from __future__ import annotations

import pytest

from fusible.tex.interface.declare import by_name


class Backend:
    @by_name
    def multi_tensor_scale(self, call):
        return call.chunk_size, call.noop_flag, call.tensor_lists, call.scale

    @by_name
    def situglu(self, call):
        return call.input, call.quantizer, call.beta1, call.beta2


def test_positions_keywords_and_defaults_meet() -> None:
    backend = Backend()
    assert backend.multi_tensor_scale(1, "flag", tensor_lists=[], scale=2.0) == (1, "flag", [], 2.0)
    assert backend.situglu("x", None) == ("x", None, 4.0, 25.0) and backend.situglu("x", None, beta2=1.0) == ("x", None, 4.0, 1.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (("x",), {}, r"situglu\(\) missing 1 required positional argument: 'quantizer'"),
        (("x", None, 1.0, 2.0, 3.0), {}, r"situglu\(\) takes from 3 to 5 positional arguments but 6 were given"),
        (("x", None), {"beta3": 1.0}, "got an unexpected keyword argument 'beta3'"),
        (("x", None), {"input": 1.0}, "got multiple values for argument 'input'"),
    ],
)
def test_a_call_that_does_not_fit_raises(args, kwargs, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        Backend().situglu(*args, **kwargs)
