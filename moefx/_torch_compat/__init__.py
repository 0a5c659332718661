"""The only importer of private torch names, with files beside it. One function per name, with why. Torch 2.11, 2.13."""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.decorators import maybe_mark_dynamic
from torch._functorch._aot_autograd import descriptors
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # its code is made when it is called
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from moefx._torch_compat.capture import (
    EVERY,
    Trust,
    capture_graph,
    fake_cache,
    faking,
    global_written,
    is_collective,
    is_data_dependent,
    is_of_functorch,
    python_reads,
    trusting,
)
from moefx._torch_compat.dtensors import (
    allow_lists,
    become,
    dtensor_spec,
    join_dims,
    local_tensor,
    new_dtensor,
    strided_shard,
)
from moefx._torch_compat.graphs import put_back
from moefx._torch_compat.inductor import by_inductor, conditions_of, inductor_missing, is_watched
from moefx._torch_compat.kept import global_scope, module_of_alias, settings, size_functions, traced_code
from moefx._torch_compat.numbers import free_numbers, sources_of_numbers, symbol_of
from moefx._torch_compat.operators import mend_operators
from moefx._torch_compat.origins import after_optimizer_load, keep_origins, on_mesh, place, spread_dims
from moefx._torch_compat.process_groups import (
    abort_groups,
    all_gather_flat,
    all_gather_several,
    default_store,
    fake_store,
    is_group_open,
    new_named_group,
)
from moefx._torch_compat.regions import (
    can_reuse_regions,
    fake_as,
    fake_strided,
    is_checkpoint,
    is_region,
    region,
    same_sizes,
    watching_reuse,
)
from moefx._torch_compat.sharding import forget_meshes, sharding_rules
from moefx._torch_compat.sizes import conditions, learned_sizes, new_symbol, range_of, several_rows, size_hints
from moefx._torch_compat.subclasses import let_subclasses_dispatch

__all__ = [  # what is passed on to the importers of this module
    "EVERY",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LazyGraphModule",
    "OpOverload",
    "ShapeEnv",
    "TorchDispatchMode",
    "Trust",
    "abort_groups",
    "after_optimizer_load",
    "all_gather_flat",
    "all_gather_several",
    "allow_lists",
    "become",
    "by_inductor",
    "can_reuse_regions",
    "capture_graph",
    "conditions",
    "conditions_of",
    "default_store",
    "descriptors",
    "dtensor_spec",
    "fake_as",
    "fake_cache",
    "fake_store",
    "fake_strided",
    "faking",
    "flash_groups_keys",
    "forget_meshes",
    "free_numbers",
    "global_scope",
    "global_written",
    "inductor_missing",
    "is_checkpoint",
    "is_collective",
    "is_data_dependent",
    "is_group_open",
    "is_of_functorch",
    "is_region",
    "is_watched",
    "join_dims",
    "keep_origins",
    "learned_sizes",
    "let_subclasses_dispatch",
    "local_tensor",
    "mend_operators",
    "module_of_alias",
    "new_dtensor",
    "new_named_group",
    "new_symbol",
    "on_mesh",
    "place",
    "put_back",
    "python_reads",
    "range_of",
    "region",
    "same_sizes",
    "settings",
    "several_rows",
    "sharding_rules",
    "size_functions",
    "size_hints",
    "sources_of_numbers",
    "spread_dims",
    "statically_known_true",
    "strided_shard",
    "symbol_of",
    "traced_code",
    "trusting",
    "watching_reuse",
]

grad_mode_setter = torch._C._set_grad_enabled  # what dynamo records for `with torch.no_grad()`
enter_autocast, exit_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


LOG_API_USAGE = torch._C._log_api_usage_once  # dynamo puts calls of it into graphs


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask for a symbol; the model may still fix the size."""
    maybe_mark_dynamic(tensor, dim)


def fake_like(
    mode: FakeTensorMode, tensor: Tensor, shape: tuple[int, ...] | None = None, device: torch.device | None = None
) -> Tensor:
    """A fake tensor of the given tensor's dtype and, unless given, device, sizes and strides."""
    device = device or tensor.device
    with mode:
        if shape is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return torch.empty(shape, dtype=tensor.dtype, device=device)


def export_joint(
    stack: contextlib.ExitStack, module: torch.fx.GraphModule, args: tuple, fake_mode: FakeTensorMode
) -> tuple[torch.fx.GraphModule, list[int]]:
    """AOTAutograd's joint graph (forward only if nothing requires a gradient), inputs and outputs described in
    meta["desc"]; and the inputs whose shape or strides it changes in place. Unbacked symbols of the capture are only
    known inside its own tracing context."""
    stack.enter_context(tracing(TracingContext(fake_mode)))
    joint = aot_export_joint_with_descriptors(stack, module, args)
    changed = [i for i, info in enumerate(joint._aot_state.fw_metadata.input_info) if info.mutates_metadata]
    return LazyGraphModule.from_graphmodule(joint.graph_module), changed


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """Where programs, which hold their casts, are made and run: torch would cast what is in single precision on
    purpose. Switching what is off already costs more than asking."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def own_saved_tensors() -> Iterator[None]:
    """What is differentiated in here saves its tensors itself, not by the hooks of an activation checkpoint outside."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return tensor._is_view()


def is_dynamo_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` wrapped the module or was applied to it in place."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


@functools.cache
def _argument_access(func: torch._ops.OpOverload) -> tuple[tuple[str, bool], ...]:
    """(name, whether it is written) of the arguments that the operator writes to or returns views of."""
    arguments = func._schema.arguments
    return tuple((a.name, a.alias_info.is_write) for a in arguments if a.alias_info is not None)


@functools.cache
def _argument_positions(func: torch._ops.OpOverload) -> dict[str, int]:
    return {argument.name: index for index, argument in enumerate(func._schema.arguments)}


def _accessed(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], written: bool) -> list[Tensor]:
    found: list[Tensor] = []
    for name, is_write in _argument_access(func):
        position = _argument_positions(func)[name]
        value = args[position] if position < len(args) else kwargs.get(name)
        if is_write is written and value is not None:
            found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found


def written_arguments(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this call writes to (schemas are private)."""
    return _accessed(func, args, kwargs, written=True)


def viewed_arguments(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that this call returns views of."""
    return _accessed(func, args, kwargs, written=False)


def is_pointwise_list_op(func: torch._ops.OpOverload) -> bool:
    """In-place or functional `_foreach_*` and in-place `_fused_*` operators: pointwise except for a few reductions."""
    name = func._schema.name
    if name.startswith("aten::_fused_"):
        return name.endswith("_")
    return name.startswith("aten::_foreach_") and name[len("aten::_foreach_") :] not in ("norm", "max", "powsum")


def copy_hooks(source: Tensor, target: Tensor) -> None:
    """Let the hooks of one leaf run for another: they hang on the C++ tensor, not on the Python object. The dicts are
    shared, so that the handles which `source` gave out still remove them."""
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def after_zero_grad(follower: Callable[[torch.optim.Optimizer], None]) -> None:
    """Call this after every `optimizer.zero_grad()` of the process, for which torch has no hook."""
    original = torch.optim.Optimizer.zero_grad

    @functools.wraps(original)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        follower(self)

    torch.optim.Optimizer.zero_grad = zero_grad


def check_all_layouts_for_inf() -> None:
    """Let GradScaler find an inf in gradients of any layout: torch reduces what it found over the ranks by the layout
    of the first gradient alone."""
    handlers, op = DTensor._op_dispatcher._custom_op_handlers, _UNSCALE
    original = handlers.get(op)
    if original is None or getattr(original, "by_layout", False):
        return

    def by_layout(op: OpOverload, args: tuple, kwargs: dict) -> None:
        alike: dict[Any, list[DTensor]] = {}
        for grad in args[0]:
            alike.setdefault((grad.device_mesh, grad.placements), []).append(grad)
        for grads in alike.values():
            original(op, (grads, *args[1:]), kwargs)

    by_layout.by_layout = True
    handlers[op] = by_layout


def on_call(module: nn.Module, instead: Callable[..., Any] | None) -> None:
    """What is run when the module is called, as after `module.compile()`; None: the module."""
    module.__dict__.pop("_compiled_call_impl", None)
    if instead is not None:
        module.__dict__["_compiled_call_impl"] = instead


# Attributes that wrappers look for at a module before they do anything to it.
ASKED_BY_WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_initialize_hook": "torch.compile",
}


_UNSCALE = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to the module."""
    return isinstance(module, torch.distributed.fsdp.FSDPModule)


def allow_builtins(gm: torch.fx.GraphModule) -> None:
    """The captured bytecode may use builtins, which torch 2.11 looks for among the globals of the traced function."""
    for replay in (gm._dynamo_bytecode_flatten, gm._dynamo_bytecode_unflatten):
        replay.f_globals = {**vars(builtins), **replay.f_globals}


def remember_bytecode(gm: torch.fx.GraphModule) -> None:
    """What the captured bytecode refers to is looked up once. Dynamo disassembles the code on every call, which takes
    milliseconds a step."""
    captured = gm._dynamo_bytecode_unflatten.out.graph_capture_output
    found = captured.get_runtime_env()
    captured.get_runtime_env = lambda: found


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return torch._C._current_graph_task_id() != -1


def numpy_twin(target: object) -> Callable[..., Any] | str | None:
    """The operator, or the name of the method, that dynamo wrapped to be called on numpy's arrays; None: it is none."""
    if isinstance(target, dynamo_utils.numpy_operator_wrapper):
        return target.op
    return target.method if isinstance(target, dynamo_utils.numpy_method_wrapper) else None


def defining_module(op: Callable[..., object]) -> str | None:
    """The module whose import registers a custom op that was defined in Python; None if nobody knows."""
    name = op.name() if isinstance(op, OpOverload) else getattr(op, "_qualified_op_name", "")
    definition = OPDEFS.get(name.split(".")[0])
    return None if definition is None else definition._init_fn.__module__


@functools.cache
def flash_groups_keys() -> bool:
    """Whether torch's flash attention on the CPU takes fewer heads of keys than of queries; else it would keep all
    scores. Which kernel is taken nothing public says."""
    query, keys = torch.ones(1, 2, 4, 8), torch.ones(1, 1, 4, 8)
    found = torch._fused_sdp_choice(query, keys, keys, is_causal=True, enable_gqa=True)
    return found == SDPBackend.FLASH_ATTENTION.value
