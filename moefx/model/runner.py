"""Calls of one captured module: which program runs them, and the programs that there are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moefx import _torch_compat as compat
from moefx import progress
from moefx.capture.inputs import CallKey, call_key, flatten_call
from moefx.capture.numbers import Key
from moefx.compiler.choosing import Attempt
from moefx.compiler.variant import Variant
from moefx.compiler.variants import Builder
from moefx.errors import UnsupportedUse
from moefx.model import stats
from moefx.model.stats import RegionStats
from moefx.options import Arm
from moefx.planning.planner import Decision
from moefx.rooms import Meter
from moefx.runtime.collectives import check_same_data_start
from moefx.runtime.gradients import GradientBuffers
from moefx.runtime.session import Session
from moefx.runtime.step import StepState

_MOST_VALUES = 8  # of Python's numbers, for which a module is compiled


class Runner:
    """The programs of one module: a whole model, or a block of one that cannot be captured as a whole.

    path: of the module in the model. synchronise: whether the backwards of calls from now on reduce gradients. arm:
    the choices by which calls from now on are run, where they are not those of the options; every arm has programs of
    its own, made when first wanted. meter: who measures them. refused: whether there is another arm, where programs for
    this one cannot be made.
    """

    def __init__(self, module: nn.Module, path: str, session: Session, builder: Builder) -> None:
        self.module, self.path, self.session, self.builder = module, path, session, builder
        self.buffers = GradientBuffers()
        self.synchronise = True
        self.arm: Arm = ()
        self.meter: Meter | None = None
        self.refused: Callable[[Exception], bool] | None = None
        self.last: tuple[Variant, list[Tensor]] | None = None
        self._variants: dict[tuple[Arm, CallKey], list[Variant]] = {}
        self._numbers = itertools.count()
        self._places: set[frozenset[int]] = set()  # of arguments that are numbers and inputs of a program
        self._constant: set[Key] = set()  # numbers that cannot be inputs
        # Walking a ModuleList of experts costs milliseconds in every call; guards.Intact sees what is replaced.
        self._modules, self._params = list(module.modules()), list(module.parameters())

    @property
    def variants(self) -> list[Variant]:
        return [variant for variants in self._variants.values() for variant in variants]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns. Raises DivergenceError or CollectiveError when ranks do not act alike."""
        leaves, spec = flatten_call(args, kwargs)
        variant = self._variant_of_some_arm(leaves, spec)
        leaves = variant.inputs(leaves)
        step = StepState(variant.program.digest, next(self._numbers), self.buffers, synchronise=self.synchronise,
                         meter=self.meter)  # fmt: skip
        self.session.begin_call(step)
        self._check_data(leaves, variant, step)
        outputs, statistics = variant.program.run(leaves, step)
        self.last = variant, statistics
        if self.session.profiler is not None:
            for name, found in self.moe_stats().items():
                self.session.profiler.loads.setdefault(name, []).append(found.load)
        return variant.pack_outputs(outputs, args, kwargs)

    def _check_data(self, leaves: Sequence[Any], variant: Variant, step: StepState) -> None:
        """Ranks along `mp` work on parts of one batch. What a block is given was computed from it: where ranks send
        copies of rows, not to the last bit alike."""
        axis = self.builder.spec.axis("mp")
        if axis:
            is_near = bool(self.path) and any(facts.copies > 1 for facts in variant.program.regions)
            given = [x for x in leaves if isinstance(x, Tensor) and not (is_near and x.is_floating_point())]
            draws = variant.program.draws
            check_same_data_start(self.session, step, given, axis=axis, draws=draws).wait()

    @property
    def trained(self) -> Variant | None:
        """A program of calls with gradients that others can be planned by: of the options, or of an arm that sends the
        same rows."""
        found = [(arm != (), place, variants[0]) for place, ((arm, key), variants) in enumerate(self._variants.items())
                 if key.grad and not {"r", "split"} & dict(arm).keys()]  # fmt: skip
        return min(found, key=lambda each: each[:2])[-1] if found else None

    def variants_of(self, arm: Arm) -> list[Variant]:
        return [variant for (other, _), variants in self._variants.items() if other == arm for variant in variants]

    def _variant_of_some_arm(self, leaves: list[Any], spec: Any) -> Variant:
        """Of another arm, where programs of this one cannot be made."""
        while True:
            try:
                return self._variant(leaves, spec)
            except Exception as error:
                if self.refused is None or not self.refused(error):
                    raise

    def prepare(self, *args: Any, **kwargs: Any) -> Variant:
        """The program for this kind of call, compiled if it was not yet."""
        return self._variant(*flatten_call(args, kwargs))

    def find(self, *args: Any, **kwargs: Any) -> Variant | None:
        """The program for this kind of call, if there is one on this rank."""
        leaves, spec = flatten_call(args, kwargs)
        return self._find(leaves, call_key(self._modules, leaves, spec, self._params))

    def _find(self, leaves: list[Any], key: CallKey) -> Variant | None:
        return next((v for v in self._of_sizes(leaves, key) if v.state.changed() is None), None)

    def _of_sizes(self, leaves: list[Any], key: CallKey) -> list[Variant]:
        return [v for v in self._of_key(key) if v.fits(leaves)]

    def _of_key(self, key: CallKey) -> list[Variant]:
        keys = dict.fromkeys((key, *(key.freed(places) for places in self._places)))
        return [v for each in keys for v in self._variants.get((self.arm, each), [])]

    def _variant(self, leaves: list[Any], spec: Any) -> Variant:
        key = call_key(self._modules, leaves, spec, self._params)
        variant = self._find(leaves, key)
        if variant is None:
            others = self._of_sizes(leaves, key)
            changed = others[-1].state.changed() if others else None
            free = self._to_free(others, key)
            if not free:
                self._check_changes(key)
                self._check_numbers(key)
            what = f"compiling {self.path or type(self.module).__name__} for {key.mode}"
            with progress.task(what), self._making(key):
                variant = self.builder.build(leaves, spec, key, changed, self.arm, free)
            found = self._put(variant, key)
            self._constant |= free - variant.numbers.keys.keys()
            # A rank whose batch also fits a special program must take the general one that the others need.
            found.sort(key=lambda each: len(each.guard.fixed))
        return variant

    @contextlib.contextmanager
    def _making(self, key: CallKey) -> Iterator[None]:
        """Parameters outlive the user's mode; the random numbers of the call are eager's."""
        here = self.session.device
        with (torch.inference_mode(False), torch.set_grad_enabled(key.grad), compat.own_saved_tensors(),
              torch.random.fork_rng([here] if here.type == "cuda" else [])):  # fmt: skip
            yield

    def look(self, *args: Any, **kwargs: Any) -> tuple[Attempt, Decision]:
        """What a program for this kind of call is chosen by, see `Builder.look`."""
        leaves, spec = flatten_call(args, kwargs)
        key = call_key(self._modules, leaves, spec, self._params)
        with self._making(key):
            return self.builder.look(leaves, spec, key)

    def _put(self, variant: Variant, key: CallKey) -> list[Variant]:
        """Among the others, in the place of those that it can stand for; returns these others and itself."""
        keys = variant.numbers.keys
        places = frozenset(each for each in keys if isinstance(each, int))
        self._places.add(places)
        mine = key.freed(places)
        for arm, other in list(self._variants) if places else ():
            if arm == self.arm and other != mine and other.freed(places) == mine:
                del self._variants[arm, other]
        found = self._variants.setdefault((self.arm, mine), [])
        found[:] = [v for v in found if not any(path in keys for path, _ in v.state.seen)]
        found.append(variant)
        return found

    def _to_free(self, others: list[Variant], key: CallKey) -> frozenset[Key]:
        """Numbers that have changed since programs were made for calls like this one: they might be inputs of one."""
        if others:
            path = others[-1].state.changed_number()
            return frozenset({path, *others[-1].numbers.keys} - self._constant) if path else frozenset()
        alike = [other for arm, other in self._variants if arm == self.arm and len(other.leaves) == len(key.leaves)]
        alike = [other for other in alike if other.but_for_numbers == key.but_for_numbers]
        differ = {i for i, pair in enumerate(zip(key.leaves, alike[-1].leaves)) if len({*pair}) > 1} if alike else set()
        return frozenset(differ - self._constant)

    def _check_changes(self, key: CallKey) -> None:
        """What calls like this one found in Python, and no longer do, is counted in programs for whatever sizes: all
        ranks have the same, and refuse together."""
        stale = [(v, path) for v in self._of_key(key) if (path := v.state.changed()) is not None]
        count = len({v.state.told_apart_by for v, _ in stale})
        if count >= _MOST_VALUES:
            raise UnsupportedUse(
                f"the forward reads `{stale[-1][1]}`, which had {count} values before; every one "
                "takes a program of its own", where=self.path or None,
                hint="keep it in a buffer (self.register_buffer), which is read in every call")  # fmt: skip

    def parameters_named(self, name: str) -> Sequence[nn.Parameter]:
        """Those whose gradient is put aside under this name."""
        return self.builder.home.parameters_named(name)

    def _check_numbers(self, key: CallKey) -> None:
        """A number that is passed as an argument is a constant of the program."""
        kinds = [other for arm, other in self._variants if arm == self.arm]
        if key in kinds:  # another size of the tensors
            return
        alike = [other for other in kinds if other.but_for_numbers == key.but_for_numbers]
        if len(alike) >= _MOST_VALUES:
            number = next(mine[1] for mine, other in zip(key.leaves, alike[-1].leaves) if mine != other)
            raise UnsupportedUse(
                f"an argument is {number} in this call and was another number in {len(alike)} kinds of calls before; "
                "each of them needs a program of its own", where=self.path or None,
                hint="pass it as a tensor (torch.tensor(number)), which is read in every call")  # fmt: skip

    def moe_stats(self) -> dict[str, RegionStats]:
        if self.last is None:
            return {}
        variant, statistics = self.last
        found = stats.collect(self.session, variant.program.regions, statistics, self.path)
        if self.path and len(found) == 1:  # the block's own
            return dict(zip([self.path], found.values()))
        return {".".join(part for part in (self.path, name) if part): each for name, each in found.items()}
