"""Records of the queries about a platform. Only the type of an answer is checked, as its value depends on the backend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fusible.conformance.table import Arguments, Output, Sample, record

__all__ = []

_ANSWERS: dict[str, type] = {
    "get_cublasLt_version": int,
    "get_cudnn_version": int,
    "get_num_cublas_streams": int,
    "get_stream_priority_range": tuple,
    "device_supports_multicast": bool,
    "ubuf_built_with_mpi": bool,
    "nvte_built_with_cublasmp": bool,
}


def answering(generator: torch.Generator, dtype: torch.dtype, kind: type) -> Iterator[Sample]:
    def fits(result: Any, arguments: Arguments) -> Any:
        return result if type(result) is kind else f"an answer of type {kind.__name__}"

    yield Sample("", {}, (Output(None, fits),))


for _name, _kind in _ANSWERS.items():
    record(_name, dtypes=(torch.float32,))(partial(answering, kind=_kind))
