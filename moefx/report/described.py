"""What stands for a model that nobody has built yet: a config of transformers by name or file, or a function.

    described("Qwen3MoeConfig", 1, 4096)              its defaults
    described("qwen3-235b.json", 1, 4096)             a config.json, as published with the weights; these are not needed
    described("my.models:large", 1, 4096)             a function that gives a module, or (module, example inputs)
    described("my/models.py:large", 1, 4096)          the same, by its file
    described("Qwen/Qwen3-30B-A3B", 1, 4096)          a folder with a config.json, or a model in the hub's local cache
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moefx.errors import ModelError, MoefxError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SUFFIX = "Config"
_ATTENTION = "sdpa_padded"


@dataclass(frozen=True)
class Described:
    """module: on the meta device, where it was made for this. args, kwargs: of a call, with one tensor of token ids at
    least. batch_dim is 0 in all of them. notes: what of a description was left out."""

    title: str
    module: nn.Module
    args: tuple
    kwargs: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def described(model: Any, batch: int, seq: int, *, layers: int | None = None, dtype: str = "bfloat16") -> Described:
    """What `model` stands for: a module, (module, example inputs), a function of no arguments that gives one of these,
    a config of transformers, or a name as above. batch, seq: of the token ids, where there are no example inputs.
    layers: in place of the config's `num_hidden_layers`. Raises MoefxError with the nearest name."""
    if dtype not in _DTYPES:
        raise MoefxError(f"there is no dtype {dtype!r}", hint=f"one of {', '.join(_DTYPES)}")
    title = str(model) if isinstance(model, (str, Path)) else ""
    if isinstance(model, (str, Path)):
        model = _named(str(model))
    if isinstance(model, Mapping) or type(model).__name__.endswith(_SUFFIX):
        return _of_config(title, model, batch, seq, layers, _DTYPES[dtype])
    if layers is not None:
        raise MoefxError("the number of layers can be changed in configs of transformers alone", where="layers",
                         hint="let the function make a model with fewer")  # fmt: skip
    if not isinstance(model, nn.Module) and callable(model):
        model = _made(model, _DTYPES[dtype])
    module, *example = model if isinstance(model, tuple) else (model,)
    if not isinstance(module, nn.Module):
        raise ModelError(f"a {type(module).__name__} is not an nn.Module", where=title or None,
                         hint="a module, (module, example inputs), or a function that gives one of these")  # fmt: skip
    given = example[0] if example else torch.zeros(batch, seq, dtype=torch.long)
    kwargs = dict(given) if isinstance(given, Mapping) else {}
    args = () if kwargs else tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return Described(title or type(module).__name__, module, args, kwargs)


def _named(name: str) -> Any:
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or (path.is_file() and path.suffix != ".py"):
        return _read(path)
    if ":" in name or path.suffix == ".py":
        return _from_code(*name.rpartition(":")[::2] if ":" in name else (name, ""))
    if "/" in name:
        return _read(_cached(name))
    import transformers

    if not name.endswith(_SUFFIX) or not hasattr(transformers, name):
        known = [each for each in dir(transformers) if each.endswith(_SUFFIX)]
        raise MoefxError(f"transformers has no config class {name!r}",
                         hint=f"{_nearest(name, known)}; a config.json; or module:function")  # fmt: skip
    return getattr(transformers, name)()


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, _configs(path.parent), 1, 0.4)
        raise MoefxError(f"there is no file {path}", hint=f"{path.parent / near[0]}" if near else "a config.json")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MoefxError(f"{path} is no JSON: {error}", hint="a config.json of transformers") from error
    if not _is_config(found):
        raise MoefxError(f"{path} is no config of a model: it has no model_type",
                         hint="a config.json of transformers")  # fmt: skip
    return found


def _from_code(where: str, what: str) -> Any:
    """A name of a module, or of a file of Python."""
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob("*.py")], 1, 0.4)
        raise MoefxError(f"there is no file {where}", hint=f"{path.parent / near[0]}" if near else "a file of Python")
    try:
        module = _loaded(path) if is_file else importlib.import_module(where)
    except Exception as error:  # of whoever wrote it
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise MoefxError(f"{where} cannot be imported: {why}", hint="a module on PYTHONPATH, or file.py") from error
    if not hasattr(module, what):
        known = [each for each in vars(module) if each[0] != "_" and callable(getattr(module, each))]
        words = f"{where} has no {what!r}" if what else f"{where} does not say which function"
        raise MoefxError(words, hint=_nearest(what, known))
    return getattr(module, what)


def _loaded(path: Path) -> Any:
    """What a file of Python makes, as a module of its name, beside which it finds others."""
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where its own dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def _cached(name: str) -> Path:
    """The config.json of a model of the hub in the local cache. Nothing is downloaded."""
    from transformers.utils import cached_file

    try:
        return Path(cached_file(name, "config.json", local_files_only=True))
    except (OSError, ValueError) as error:
        raise MoefxError(f"there is no folder {name}, and the local cache has no such model of the hub",
                         hint=f"a config.json; or first: hf download {name} config.json") from error  # fmt: skip


def _configs(folder: Path) -> list[str]:
    """Names of a folder's configs. Plans and machines are JSON, too, but no models."""
    found = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            if _is_config(json.loads(path.read_text(encoding="utf-8"))):
                found.append(path.name)
    return found


def _is_config(found: Any) -> bool:
    return isinstance(found, dict) and "model_type" in found


def _nearest(name: str, known: list[str]) -> str:
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), lower, 1, 0.3)
    return f"did you mean {lower[near[0]]}?" if near else f"one of {', '.join(sorted(known)[:8])}"


def _made(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            found = make()
    finally:
        torch.set_default_dtype(before)
    if isinstance(found, tuple):  # the inputs are of this machine, whatever they hold
        return found[0], torch.utils._pytree.tree_map_only(torch.Tensor, _here, found[1])
    return found


def _here(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else x


def _flash() -> str:
    """The name of an attention for transformers: `sdpa`, and where values are narrower than keys, padded ones, as its
    flash attention does. torch has no fused kernel for them on CPU, where a plan is made, and would keep all scores."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def padded(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        width = value.shape[-1]
        if query.shape[-1] != width:
            value = torch.nn.functional.pad(value, [0, query.shape[-1] - width])
        rows, scores = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return rows[..., :width], scores

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, padded)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, sdpa_mask)
    return _ATTENTION


def _of_config(title: str, config: Any, batch: int, seq: int, layers: int | None, dtype: torch.dtype) -> Described:
    from transformers import AutoConfig

    notes = []
    if isinstance(config, Mapping):
        given = dict(config)
        kind = given.pop("model_type", None)
        if given.pop("quantization_config", None):
            notes.append(f"the config's quantization is left out: weights are {str(dtype).removeprefix('torch.')}")
        for left_out in ("auto_map", "architectures", "torch_dtype", "dtype", "transformers_version"):
            given.pop(left_out, None)
        try:
            config = AutoConfig.for_model(kind, **given)
        except ValueError as error:
            from transformers import CONFIG_MAPPING

            raise MoefxError(f"transformers knows no model_type {kind!r}", where=title or None,
                             hint=_nearest(str(kind), list(CONFIG_MAPPING))) from error  # fmt: skip
    if layers is not None:
        config.num_hidden_layers = layers
        for name, found in vars(config).items():
            if isinstance(found, list) and len(found) > layers and name.endswith("types"):
                setattr(config, name, found[:layers])
    config.use_cache = False
    module = _of(config, dtype, title, notes)
    if not title:
        title = type(config).__name__
    ids = torch.zeros(batch, seq, dtype=torch.long)
    notes.append("the call has input_ids and labels: the loss is part of the step")
    return Described(title, module, (), {"input_ids": ids, "labels": ids.clone()}, tuple(notes))


def _of(config: Any, dtype: torch.dtype, title: str, notes: list[str]) -> nn.Module:
    """Without weights. Not every model may have its attention replaced."""
    from transformers import AutoModelForCausalLM

    complaint = None
    for attention in (_flash(), "eager"):
        try:
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        except ValueError as error:
            complaint = complaint or error
        else:
            if complaint is not None:
                notes.append("attention is the model's own, which keeps all scores: flash attention needs less")
            return module
    raise MoefxError(f"transformers makes no language model of a {type(config).__name__}: {str(complaint)[:200]}",
                     where=title or None, hint="name a config of a causal language model") from complaint  # fmt: skip
