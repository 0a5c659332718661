"""The option `fp8`."""

from __future__ import annotations

from dataclasses import dataclass

from moefx.options.declare import BOOL, Group, documented, group, option


@documented
@dataclass(frozen=True, repr=False)
class Fp8(Group):
    """Which products are of numbers of 8 bits."""

    wanted: bool = option(False, BOOL, """
        True multiplies rows by experts' weights in fp8 (e4m3), forward and for the gradients of rows. Each row has a
        scale, and so has each output of a weight. This changes numbers: an entry is off by at most 1/16 of itself.
        Gradients of weights are products of the rows as they were. On CUDA it needs a GPU of capability 9.0 or 10.0,
        and bfloat16.""")


FIELDS = {None: {"fp8": group(Fp8, "whether experts multiply numbers of 8 bits, which changes results.")}}
