"""What a user may choose. Every field has a default that is right for most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Options of `moefx.compile`.

    verify: 0 nothing, 1 structure and meaning of every graph after every pass (default), 2 also runs every graph
        before and after each pass on random inputs and compares. None reads MOEFX_VERIFY.
    timeout_s: seconds after which a rank that waits in a collective gives up and names who it waits for.
    keep: what the forward keeps for the backward: "eager" keeps what eager autograd keeps, less the outputs of
        activation functions whose inputs are kept anyway; "lean" recomputes every elementwise result it can.
    dump_dir: folder to write every graph and the emitted code to; None reads MOEFX_DUMP.
    """

    verify: int | None = None
    timeout_s: float = 600.0
    keep: str = "eager"
    dump_dir: str | None = None
