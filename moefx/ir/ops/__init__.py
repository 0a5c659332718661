"""The dialect: importing this package registers every op under `torch.ops.moefx`."""

from moefx.ir.ops import dense, exchange, experts, order, parameters, regions, routing, sharding, transport, vocabulary
from moefx.ir.ops.parameters import materialize

__all__ = ["dense", "exchange", "experts", "materialize", "order", "parameters", "regions", "routing", "sharding",
           "transport", "vocabulary"]  # fmt: skip
