"""A compiled pass reads the memory of tensors as it lies, and leaves them as free as they were."""

from __future__ import annotations

import pytest
import torch

import fusible


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_a_compiled_pass_has_read_can_be_freed(dtype: torch.dtype) -> None:
    """As FSDP2 frees parameters, and gives them memory again."""
    model = fusible.Sequential(fusible.Linear(32, 48), fusible.GELU(), fusible.Linear(48, 32)).to(dtype).compile("xla")
    x = torch.randn(16, 32, dtype=dtype, requires_grad=True)
    wanted = model(x)
    wanted.sum().backward()
    for tensor in (x, *model.parameters()):
        with torch.no_grad():
            storage, values = tensor.untyped_storage(), tensor.clone()
            nbytes = storage.nbytes()
            storage.resize_(0)
            storage.resize_(nbytes)
            tensor.copy_(values)
    assert torch.equal(model(x), wanted)


def test_inputs_that_do_not_lie_as_their_values_are_read_by_these() -> None:
    """Strided, at odd addresses, and with a sign that is yet to be turned."""
    model = fusible.Sequential(fusible.Linear(32, 48)).compile("xla")
    turned = torch.randn(16, 32, dtype=torch.complex64).conj().imag
    whole = torch._neg_view(torch.randn(16, 32))
    assert turned.is_neg() and whole.is_neg() and whole.is_contiguous()
    for x in (turned, whole, torch.randn(32, 16).t(), torch.randn(16 * 32 + 1)[1:].view(16, 32), torch.randn(16, 64)[:, ::2], torch.empty(0, 32)):
        torch.testing.assert_close(model(x), model(x.clone().resolve_neg().contiguous()), rtol=0, atol=0)
