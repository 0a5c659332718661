"""What decides a program, as far as it can be told before the model is captured: the name of its entry.

Told are the tree of modules (classes with their code, flags, attributes; parameters and buffers by name, shape,
strides, dtype, device, ties), the kind of call, the sizes that are traced, options, mesh, machine, the versions of
torch, Python, the model's libraries and the source files of moefx itself, and the settings of torch that change what it
traces. What only a capture knows, such as global variables that a function reads, is kept in the entry and compared
when it is read (`entries.py`).
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moefx import _torch_compat as compat
from moefx.compiler.cache.told import Teller, Untold, digest
from moefx.link import implementations
from moefx.options import NAMES, Options

_SKIPPED = ("_parameters", "_buffers", "_modules", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
            "_state_dict_hooks", "_state_dict_pre_hooks")  # fmt: skip
_QUIET = ("MOEFX_CACHE", "MOEFX_DUMP", "MOEFX_VERIFY", "MOEFX_TRACEBACK")  # which decide nothing about a program
_OWN = {option: frozenset(names()) for option, (_, names) in NAMES.items()}  # before users register theirs


def teller_of(model: nn.Module) -> Teller:
    """Modules, parameters and buffers of the model are told by their first names."""
    places: dict[int, str] = {}
    for kind, found in (("module", model.named_modules()), ("parameter", model.named_parameters()),
                        ("buffer", model.named_buffers())):  # fmt: skip
        for name, each in found:
            places.setdefault(id(each), f"{kind} {name}")
    return Teller(places)


def of_model(model: nn.Module, teller: Teller) -> str:
    """Raises Untold."""
    if "forward" in vars(model):
        raise Untold("a forward that is set on the model itself")
    found: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        found += [path, teller.places[id(module)], teller.of_class(type(module))]
        for tensors in (module._parameters, module._buffers):
            found += [f"{name}: {_tensor(each, teller)}" for name, each in tensors.items()]
        for name, each in vars(module).items():
            if name in _SKIPPED:
                continue
            try:
                hooks = "_hooks" in name and isinstance(each, dict)
                found.append(f"{name}: {teller.told(list(each.values()) if hooks else each)}")
            except Untold as error:
                raise Untold(f"{path or 'the model'}.{name} holds {error}") from error
    return digest(*found)


def _tensor(found: Any, teller: Teller) -> str:
    if found is None:
        return "None"
    shape = tuple(found.shape), tuple(found.stride()), found.dtype, found.device.type, found.requires_grad
    return f"{teller.places[id(found)]} {shape}"


def of_options(options: Options) -> str:
    """Raises Untold for what users registered, whose code may stand anywhere."""
    for option, own in _OWN.items():
        found = options.value_of(option)
        for name in (found,) if isinstance(found, str) else found or ():
            if name not in own:
                raise Untold(f"the {NAMES[option][0]} '{name}', which was registered")
    for path in implementations.registered_kernels():
        raise Untold(f"the kernel {path}, which was registered")
    return repr(sorted(options.told().items()))


@functools.cache
def of_moefx() -> str:
    """Of all its source files, and of the versions below it."""
    folder = Path(__file__).parents[2]
    files = [(str(path.relative_to(folder)), path.read_bytes()) for path in sorted(folder.rglob("*.py"))]
    return digest(*(part for pair in files for part in pair))


def of_surroundings(device: torch.device, model: nn.Module) -> str:
    """Versions, processor, environment variables of moefx, and settings of torch."""
    homes = sorted({type(module).__module__.partition(".")[0] for module in model.modules()} | {"numpy", "sympy"})
    found = [sys.version, torch.__version__, str(torch.version.git_version), of_moefx(), platform.machine()]
    found.append(f"triton {implementations.triton_version()}")
    found += [f"{home} {getattr(sys.modules.get(home), '__version__', '')}" for home in homes]
    found += [f"{name}={text}" for name, text in sorted(os.environ.items())
              if name.startswith("MOEFX_") and name not in _QUIET]  # fmt: skip
    cuda = torch.backends.cuda
    found.append(repr((
        torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device()), cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        torch.backends.mkldnn.enabled, torch.backends.cpu.get_cpu_capability(), torch.version.cuda,
    )))  # fmt: skip
    if device.type == "cuda":
        found += [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    return digest(*found, compat.settings())


def of_call(key: Any, tree: Any, sizes: Any, fixed: str, skip: frozenset[str]) -> str:
    """The kind of a call, and the sizes that it is traced with."""
    leaves = [repr(leaf) for leaf in key.leaves]
    return digest(key.structure, str(tree), *leaves, repr((
        key.training, key.train_flags, key.grad, key.autocast, key.default_dtype, key.requires_grad, sizes, fixed,
        sorted(skip),
    )))  # fmt: skip


