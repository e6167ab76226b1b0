"""``OpTraits``: the declarations of a class of ops."""

from __future__ import annotations

from typing import ClassVar

from fusible import nvte

__all__ = ["OpTraits"]


class OpTraits:
    """Declarations that hold for an op wherever it stands: most are its class's, some follow from the options that it was made with. A plan reads
    them and never writes them; only the router (``compute_pipeline.sides``) names side values anew.

    ``side_inputs`` and ``side_outputs`` name values that pass beside ``x``: an output goes to the next op that takes an input of the name, and its
    gradient comes back. An op with side outputs returns ``(y, ctx, {name: value})`` from forward and gets their gradients as keywords of
    backward; one with side inputs gets them as keywords of forward and inference, and returns ``(dx, grads, {name: gradient})`` from backward.
    An op that may stand in a pipeline several times is told the names when it is made, and takes the keywords as ``**sides``. None stands for the
    gradient of a side output that nobody took, and of a side input that is ``unwanted``.
    ``call_inputs`` names values of the whole call (``sequences``, ``seed``), keywords of all three passes.
    """

    side_inputs: tuple[str, ...] = ()
    side_outputs: tuple[str, ...] = ()

    @property
    def call_inputs(self) -> tuple[str, ...]:
        return ()

    sides_keep_padding: ClassVar[bool] = False
    """Whether its side inputs are tensors of their own, and not rows beside x's: they come as the caller gave them, padding and all."""

    quantizes_y: ClassVar[bool] = False
    """Whether y can be written in an 8-bit type directly; otherwise the consumer casts."""
    quantizes_dx: ClassVar[bool] = False
    """Whether dx can be written in an 8-bit type directly; otherwise the consumer casts."""
    overridable: ClassVar[bool] = False
    """Whether backward can compute in high precision after a forward in 8 bits, as ``override`` says."""

    @property
    def transparent(self) -> bool:
        """Whether quantized rows of x are, as they are, those of y, and those of dy dx's, but perhaps for their scales: then the op takes the 8-bit
        type that its neighbour asks for, and passes it on."""
        return False

    def passes(self, type: nvte.Type) -> bool:
        """Whether a transparent op passes on tensors that are quantized to ``type``."""
        return True

    rows_alone: ClassVar[bool] = False
    """Whether each row of y hangs on the same row of x and of side values alone, so that processes can share the rows out."""

    effects: bool = False
    """Whether a pass of it hands something over beside what it returns: then it can be neither replayed nor compiled."""
    delays_wgrad: bool = False
    """Whether backward may return None for a parameter's gradient that is wanted, and the op's owner gives it later (``delay_wgrad_compute`` in
    NVIDIA's interface). From any other op such a None is refused: the parameter would not be trained. What is handed over is an effect."""

    @property
    def direct_only(self) -> bool:
        """Whether every pass must call the op itself: what it does is not all in its nvte calls, or not all in what it returns."""
        return self.effects or self.delays_wgrad
