"""The option `whole_blocks`."""

from __future__ import annotations

from moefx.options.declare import BOOL, option

FIELDS = {"parallel": {"whole_blocks": option(False, BOOL, """
    True cuts whole blocks, attention included, along the batch into `chunks` parts. The exchanges of one part then run
    beside the attention and the experts of another.""")}}  # fmt: skip
