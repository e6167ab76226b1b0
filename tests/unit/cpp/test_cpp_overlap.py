"""What a compiled kernel writes lies nowhere else in the call, or in place of what it reads: right, or refused before anything is written.

The cases run in a child, for indices that are written over while they are followed end a process. Run as a program it prints how many were so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
from cpp_calls import CALLS, WRITTEN, invoke, tensors, with_argument
from torch import Tensor

from fusible.errors import FusibleError


def raw(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def outcome(call: str, places: tuple[str, str], shift: int) -> str:
    arguments = CALLS[call]()
    found = tensors(arguments)
    x, y = (found[place] for place in places)
    if not (x.is_contiguous() and y.is_contiguous() and x.numel() and y.numel()):
        return "no case"
    step = max(x.element_size(), y.element_size())
    first = 8 * step
    buffer = torch.zeros(max(x.nbytes, y.nbytes) + 2 * first, dtype=torch.uint8)
    laid = [buffer[at : at + like.nbytes].view(like.dtype).view(like.shape) for like, at in ((x, first + shift * step), (y, first))]
    laid[0].copy_(x)
    laid[1].copy_(y)
    apart, before = [each.clone() for each in laid], buffer.clone()
    try:
        invoke(call, with_argument(with_argument(CALLS[call](), places[0], apart[0]), places[1], apart[1]))
    except FusibleError:
        return "no case"
    try:
        invoke(call, with_argument(with_argument(arguments, places[0], laid[0]), places[1], laid[1]))
    except FusibleError as error:
        names = [place.split("/")[0] for place in places]
        told = any(f"{a}: expected memory of its own, got that of {b}; " in str(error) for a, b in (names, names[::-1]))
        return "refused" if told and torch.equal(before, buffer) else f"{call} {places} {shift}: {error}"
    read = places[1].split("/")[0] not in WRITTEN[call]
    right = torch.equal(raw(laid[0]), raw(apart[0])) and (read or torch.equal(raw(laid[1]), raw(apart[1])))
    return "right" if right else f"{call} {places} {shift}: wrong"


def main() -> None:
    counts: Counter[str] = Counter()
    for call, make in CALLS.items():
        found = tensors(make())
        for place in found:
            if place.split("/")[0] in WRITTEN[call]:
                for other in found:
                    for shift in (0, 1, -1) if other != place else ():
                        print(call, place, other, shift, file=sys.stderr, flush=True)  # so that a crash is named
                        counts[outcome(call, (place, other), shift)] += 1
    print(json.dumps(counts))


def test_every_written_tensor_in_the_place_of_every_other() -> None:
    finished = subprocess.run([sys.executable, __file__], cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=600)
    assert finished.returncode == 0, finished.stderr[-500:]
    counts = json.loads(finished.stdout)
    assert set(counts) <= {"right", "refused", "no case"}, counts
    assert counts["refused"] > 700 and counts["right"] > 50, counts


if __name__ == "__main__":
    main()
