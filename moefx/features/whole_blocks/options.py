"""The option `whole_blocks`."""

from __future__ import annotations

from moefx.options.declare import Allowed, option

AUTO = "auto"

FIELDS = {"parallel": {"whole_blocks": option(False, Allowed(lambda v: v is True or v is False or v == AUTO,
                                                             "True, False or 'auto'"), """
    True cuts whole blocks into `chunks` parts of the batch, or of the sequence if it has fewer samples. Exchanges of
    one part run beside attention and experts of another. "auto" does so, in as many parts as pay, if a step is
    predicted to be faster then. It needs a machine.""")}}  # fmt: skip
