"""Triton forms of what `runtime.kernels`, `runtime.grouped`, `runtime.glu` and `transport.codecs` mean: one pass over
the rows each.

T tokens, K choices per token, N = T*K pairs, R rows, D width, S slots. Every function takes what the ATen form takes,
and gives what it gives, up to rounding: sums are in float32 and are rounded once. All are deterministic, and none reads
a size on the host: where sizes are data, the grid is an upper bound. `link.implementations` decides who runs; nothing
else imports this package, since it needs triton.
"""

from moefx.runtime.triton_kernels.activations import gated, gated_backward, glu, glu_backward
from moefx.runtime.triton_kernels.codecs import decode, encode
from moefx.runtime.triton_kernels.layer import expert_layer, expert_layer_backward
from moefx.runtime.triton_kernels.matmul import finished_linear, grouped_linear, grouped_wgrad
from moefx.runtime.triton_kernels.order import route
from moefx.runtime.triton_kernels.rows import combine, combine_backward, dispatch
from moefx.runtime.triton_kernels.segments import expert_rows, expert_rows_backward, finish_rows

__all__ = [
    "combine", "combine_backward", "decode", "dispatch", "encode", "expert_layer", "expert_layer_backward",
    "expert_rows", "expert_rows_backward", "finish_rows", "finished_linear", "gated", "gated_backward", "glu",
    "glu_backward", "grouped_linear", "grouped_wgrad", "route",
]  # fmt: skip
