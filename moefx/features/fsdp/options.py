"""The option `shard_dense`."""

from __future__ import annotations

from moefx.options.declare import BOOL, option

FIELDS = {"parallel": {"shard_dense": option(False, BOOL, """
    True keeps a share of every parameter outside the experts on each rank, with its gradient and the optimizer's state
    (FSDP, ZeRO-3). A layer's parameters are gathered before it runs. Not with `mp`.""")}}  # fmt: skip
