"""The platform functions, the classes of the interface, and what coverage says of every function."""

from __future__ import annotations

import inspect

import pytest
import torch

from fusible import tex
from fusible.errors import NotServedError
from fusible.tex.interface.declare import DECLARATIONS

UNSERVED = {
    **dict.fromkeys(
        "init_nvshmem_backend create_nvshmem_tensor nvshmem_send_on_current_stream nvshmem_wait_on_current_stream nvshmem_finalize".split(), "NVSHMEM"
    ),
    **dict.fromkeys("cusolvermp_ctx_create cusolvermp_ctx_destroy newton_schulz".split(), "cuSOLVERMp"),
    **dict.fromkeys(
        "ep_initialize ep_finalize ep_get_zero_copy ep_zero_copy_supported ep_handle_mem_size ep_prepare ep_dispatch ep_prepare_and_dispatch "
        "ep_combine ep_dispatch_bwd ep_combine_bwd".split(),
        "expert-parallel",
    ),
    "bulk_overlap_ag_with_external_gemm": "userbuffers",
}
COMMUNICATORS = "CommOverlap CommOverlapBase CommOverlapCore CommOverlapHelper CommOverlapP2P CommOverlapP2PBase".split()


def test_exactly_these_functions_are_declared_as_served_by_nobody_here() -> None:
    assert {name for name, declaration in DECLARATIONS.items() if declaration.unserved} == UNSERVED.keys()


@pytest.mark.parametrize(("name", "needs"), UNSERVED.items(), ids=UNSERVED)
def test_calling_one_says_what_it_needs(name: str, needs: str) -> None:
    function = getattr(tex, name)
    required = [p for p in inspect.signature(function).parameters.values() if p.default is inspect.Parameter.empty]
    with pytest.raises(NotImplementedError, match=f"^{name} not implemented: it needs .*{needs}") as caught:
        function(*(torch.zeros(1) for _ in required))
    assert isinstance(caught.value, NotServedError)


def test_queries_are_answered_everywhere() -> None:
    assert tex.get_cublasLt_version() >= 120103 and tex.get_cudnn_version() >= 91800 and tex.get_num_cublas_streams() == 1
    assert tex.get_stream_priority_range() == tex.get_stream_priority_range(device_id=0) == (0, 0)
    assert not (tex.device_supports_multicast() or tex.ubuf_built_with_mpi() or tex.nvte_built_with_cublasmp())


@pytest.mark.parametrize("name", COMMUNICATORS)
def test_a_communicator_says_in_one_sentence_why_it_cannot_be_made(name: str) -> None:
    with pytest.raises(NotServedError, match=f"tex.{name}: expected NVIDIA's native library, got none") as caught:
        getattr(tex, name)([4, 4], torch.bfloat16, None, 2)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_the_record_of_scales_is_empty_at_first_and_can_be_written() -> None:
    meta = tex.FP8TensorMeta()
    assert (meta.scale, meta.scale_inv, meta.amax_history) == (None, None, None)
    meta.scale = torch.ones(3)
    assert meta.scale.shape == (3,) and tex.FP8TensorMeta().scale is None


def test_fifteen_enumerations_and_seven_classes_are_exported() -> None:
    assert len(tex.enums.__all__) == 15 and len(tex.classes.__all__) == 7
    assert {*tex.enums.__all__, *tex.classes.__all__} <= set(tex.__all__)


def test_coverage_has_every_function_and_backend_and_no_reason_where_one_serves() -> None:
    covered = tex.coverage()
    assert covered.keys() == DECLARATIONS.keys()
    names = [row["name"] for row in tex.list_backends()]
    assert all(list(row) == names for row in covered.values())
    assert all(covered[name]["torch"] is None for name in DECLARATIONS if name not in UNSERVED)
    assert "NVSHMEM" in (covered["nvshmem_finalize"]["torch"] or "")
    assert covered["prim_add"]["nvidia"] == "not implemented by it"


def test_a_vendor_may_serve_what_nobody_here_does() -> None:
    @tex.register_backend
    class Shares(tex.TEXBackendBase):
        NAME = "shares"

        def nvshmem_finalize(self):
            return "done"

    try:
        assert tex.nvshmem_finalize() == "done"
        assert tex.coverage()["nvshmem_finalize"]["shares"] is None
    finally:
        tex.registry.unregister_backend("shares")
