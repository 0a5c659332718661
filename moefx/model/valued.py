"""Values of a compiled module: given to a model on the meta device, loaded, and saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from moefx import progress
from moefx.errors import UnsupportedUse
from moefx.model import state_dicts
from moefx.model.stand_in import StandIn
from moefx.weights import adapters
from moefx.weights import transformers_names as transformers_weights
from moefx.weights import values as weights


class Valued(StandIn):
    """A stand-in whose parameters are spread over the ranks of a session. `_pending`: names of those on the meta
    device."""

    @progress.task("giving the model its values")
    def materialize(self, source: weights.InitFn | str | os.PathLike, *, init_fn: weights.InitFn | None = None,
                    seed: int = 0) -> None:  # fmt: skip
        """Give a model that was compiled on the meta device its values; a collective of all ranks.

        Every rank gets memory for its own experts alone, so models fit that no single machine can build. A program must
        have been compiled, since it decides who holds what: give `moefx.compile` example_inputs.

        source: `init_fn(module)`, which sets the tensors of a module; it is called for every module with tensors of its
            own, in the order of `model.modules()`. All ranks draw from `seed`, so values are those of one device. Or a
            folder (or file) of safetensors, as Hugging Face writes them: every rank reads only what it holds.
        init_fn: with files, for buffers that the files lack (such as rotary frequencies). Models of transformers use
            their own.
        Raises UnsupportedUse (nothing is on the meta device; nothing was compiled; a tensor was left without a value)
        and CheckpointError, on all ranks (files are missing, damaged, or do not fit).
        """
        names = self._pending
        if not names:
            raise UnsupportedUse("no parameter is on the meta device", hint="load_state_dict changes values")
        if not self._variants:
            raise UnsupportedUse(
                "who holds which expert is not known before a program is compiled",
                hint="give moefx.compile example_inputs",
            )
        weights.fill(self._whole.builder.home, names, source, init_fn, seed, self._ranks())
        self._replicas.compare(self._homes)
        self.__dict__["_pending"] = []

    def _check_values(self) -> None:
        if self._pending:
            raise UnsupportedUse(
                "the parameters have no values yet, as the model was compiled on the meta device",
                hint="call compiled.materialize(init_fn), or give it a folder of safetensors files",
            )

    def save_safetensors(self, folder: str | os.PathLike, *, max_file_bytes: int = weights.FILE_BYTES) -> None:
        """Write the model into `folder`, as Hugging Face does, for `from_pretrained` and `materialize`.

        All ranks call this. Parameters are gathered one after the other, and the first rank writes. Raises
        CheckpointError on all ranks, and DivergenceError if copies of parameters differ."""
        self._save(Path(folder), max_file_bytes=max_file_bytes)

    @progress.task("writing the model")
    def _save(self, folder: Path, max_file_bytes: int = weights.FILE_BYTES, replace: bool = False) -> None:
        self._check_values()
        self._replicas.check(self._homes)
        weights.write(self._whole.builder.home, folder, self._ranks(), max_file_bytes, replace)

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **others: Any) -> None:
        """`save_safetensors` under the name that transformers knows. It replaces model files in the folder. Of a model
        that PEFT has adapted: its adapters, as PEFT writes them, with arguments of PEFT's `save_pretrained`.

        All ranks call this; the first one writes. Raises UnsupportedUse for other models and other arguments."""
        given = {name: value for name, value in others.items() if value is not None}
        if not adapters.has_adapters(self._inner):
            transformers_weights.check_saving(self._inner, [name for name, value in given.items() if value])
            self._save(Path(save_directory), replace=True)
            return
        if "state_dict" in given:
            raise UnsupportedUse("save_pretrained(state_dict=..) of a compiled model", hint="leave state_dict out")
        self._save_adapters(Path(save_directory), given)

    @progress.task("writing adapters")
    def _save_adapters(self, folder: Path, given: Mapping[str, Any]) -> None:
        self._check_values()
        self._replicas.check(self._homes)
        adapters.write(self._whole.builder.home, folder, self._ranks(), given)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Parameters and buffers by your names. Parameters are DTensors; `p.full_tensor()`, on all ranks, is plain."""
        if self._pending and not weights.pending(self._inner):  # neither on the meta device nor filled
            self._check_values()
        return self._inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors in place. All ranks call this, with plain whole tensors, the same on every rank, or DTensors.
        Names are those of the model or of its checkpoints. Of a DTensor that is spread over ranks, every rank gives its
        own part, from a copy or from a file of its own.

        Raises CheckpointError, and loads nothing, if something does not fit on one rank or is another rank's part.
        Raises DivergenceError if ranks differ afterwards."""
        if assign:
            raise UnsupportedUse("load_state_dict(assign=True) would replace distributed parameters")
        self._check_values()
        ranks = self._ranks()  # nothing is loaded anywhere unless all can
        state_dict = ranks.each("loading a state dict",
                                lambda: transformers_weights.in_own_names(self._inner, state_dict))  # fmt: skip
        keys = state_dicts.load(self.state_dict(keep_vars=True), state_dict, strict, ranks)
        self._replicas.compare(self._homes)
        return nn.modules.module._IncompatibleKeys(*keys)
