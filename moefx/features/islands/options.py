"""The option `islands`."""

from __future__ import annotations

from dataclasses import dataclass

from moefx.options.declare import BOOL, Group, documented, group, option


@documented
@dataclass(frozen=True, repr=False)
class Islands(Group):
    """Which ops become functions that Inductor compiles."""

    wanted: bool = option(False, BOOL, """
        True: PyTorch's Inductor compiles the ops between exchanges, attention and matrix products (norms, rotary,
        activations, casts), one function for each kind of run. Compiling takes longer, a step less.""")


FIELDS = {None: {"islands": group(Islands, "whether Inductor compiles the ops between exchanges and products.")}}
