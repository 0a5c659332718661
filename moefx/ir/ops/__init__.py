"""The dialect: importing this package registers every op under `torch.ops.moefx`."""

from moefx.ir.ops import (
    activations,
    copies,
    dense,
    exchange,
    expert_layers,
    experts,
    gathers,
    layers,
    order,
    parameters,
    placement,
    regions,
    routing,
    sharding,
    shares,
    transport,
    vocabulary,
    weights,
)
from moefx.ir.ops.parameters import materialize

__all__ = ["activations", "copies", "dense", "exchange", "expert_layers", "experts", "gathers", "layers", "materialize",
           "order", "parameters", "placement", "regions", "routing", "sharding", "shares", "transport",
           "vocabulary", "weights"]  # fmt: skip
