"""Forward and backward of one program, with what their inputs and outputs mean."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule


@dataclass
class StepGraphs:
    """The graphs of a step. Every index below counts from 0 in the flat list it speaks of.

    forward: takes the program's inputs (in the order of the placed graph's placeholders) and returns
        [new values of mutated inputs..., user outputs..., statistics..., saved values...].
    backward: takes [saved values..., tangents...] and returns the gradients of `grad_inputs`; None: nothing wants one.
    """

    forward: GraphModule
    backward: GraphModule | None
    mutated_inputs: list[int] = field(default_factory=list)
    num_user_outputs: int = 0
    num_statistics: int = 0
    saved: list[str] = field(default_factory=list)  # names of the saved values, in order
    tangent_outputs: list[int] = field(default_factory=list)  # which user output each tangent belongs to
    grad_inputs: list[int] = field(default_factory=list)  # which input each gradient belongs to
    differentiable_outputs: list[int] = field(default_factory=list)

    @property
    def graphs(self) -> dict[str, GraphModule]:
        both = {"forward": self.forward}
        if self.backward is not None:
            both["backward"] = self.backward
        return both

    def note_sources(self, whole: GraphModule) -> None:
        """Let every program input say where its value comes from, as the inputs of the placed graph do. Values that
        the backward gets anew from the forward are inputs of the backward only; they say nothing."""
        before = whole.graph.find_nodes(op="placeholder")
        after = self.forward.graph.find_nodes(op="placeholder")
        for old, new in zip(before, after, strict=True):
            new.meta["moefx"] = old.meta["moefx"]
        for node in self.backward.graph.find_nodes(op="placeholder") if self.backward is not None else ():
            node.meta.pop("moefx", None)
