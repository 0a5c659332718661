"""Bodies of nested regions that dynamo reuses for equal calls, and what has to be known of them."""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import ChainedSource
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import _disable_current_modes

try:
    from torch._dynamo.guards import GUARD_VALUE_DISPATCH, SKIP_GUARD, GuardCheckSpec
    from torch._dynamo.source import is_from_source
    from torch._dynamo.variables import invoke_subgraph
except ImportError:  # older than reuse
    invoke_subgraph = None

_NEVER_ONE = (bool, int, float, complex, str, bytes, tuple, type(None), type, types.FunctionType, types.MethodType,
              types.BuiltinFunctionType, types.ModuleType, torch.dtype, torch.device)  # fmt: skip


def can_reuse_regions() -> bool:
    """Whether dynamo traces equal calls of one region once. Before, it traced every call."""
    known = inspect.signature(torch.compiler.nested_compile_region).parameters
    return "max_reuse_entries" in known and hasattr(invoke_subgraph, "is_reusable")


def region(function: types.FunctionType, name: str, entries: int) -> Callable:
    """A function that dynamo takes for a region of its own, with at most so many different bodies. Reuse goes by code:
    this one's equals nobody else's, since a decorator has one code for all that it decorates."""
    code = function.__code__.replace(co_consts=(*function.__code__.co_consts, f"moefx region {name}"))
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__, own.__qualname__, own.__module__ = (
        function.__kwdefaults__, function.__qualname__, function.__module__)  # fmt: skip
    own.__dict__.update(function.__dict__)
    return torch.compiler.nested_compile_region(own, max_reuse_entries=entries)


def is_region(target: Any) -> bool:
    """Whether a node of a captured graph calls the body of a region."""
    return target is torch.ops.higher_order.invoke_subgraph


def is_checkpoint(target: Any) -> bool:
    """Whether a node of a captured graph calls the body of an activation checkpoint."""
    return target is torch.ops.higher_order.tag_activation_checkpoint


@dataclass
class Reuse:
    """Calls for which bodies of others were taken, in all tries of one capture."""

    found: list[tuple[Any, dict[str, str]]]  # (dynamo's graph, {what the body's own call read: what this one would})

    def of(self, gm: torch.fx.GraphModule) -> list[dict[str, str]]:
        """In the try that gave a graph. Keys and values are expressions as in `python_reads`."""
        last = self.found[-1][0] if self.found else None
        return [renamed for output, renamed in self.found if output is last]


@contextlib.contextmanager
def watching_reuse() -> Iterator[Reuse]:
    """What dynamo captures in here, it reuses only where all that its body was guarded by holds for the other call:
    dynamo leaves out what it did not look up for the body itself, and who is one and the same object."""
    original, reuse = invoke_subgraph.is_reusable, Reuse([])
    read: dict[int, tuple[Any, _Read]] = {}  # by condition, which lives as long

    def is_reusable(tx: Any, condition: Any, fingerprint: Any, entry: Any) -> bool:
        if not original(tx, condition, fingerprint, entry):
            return False
        moved = invoke_subgraph.build_source_replacement(entry.arg_sources, fingerprint.arg_sources)
        if moved and id(condition) not in read:
            own = [source for source in entry.arg_sources if source is not None]
            read[id(condition)] = condition, _Read(tx, condition, own)
        if moved and not read[id(condition)][1].is_as(moved):
            return False
        if moved:
            reuse.found.append((tx.output, {old.name: new.name for old, new in moved.items()}))
        return True

    with (mock.patch.object(invoke_subgraph, "is_reusable", is_reusable),
          mock.patch.object(ChainedSource, "clone", _once(ChainedSource.clone))):  # fmt: skip
        yield reuse


def _once(clone: Callable) -> Callable:
    """`Source.clone` with others in the place of parts, once for each source: dynamo's copies all that an object is
    read through for every read of it, which took a fifth of capture."""
    made: dict[Any, Any] = {}
    last = None

    def moved(source: Any, other: Callable | None = None) -> Any:
        nonlocal last
        if other is None:
            return clone(source)
        if other is not last:
            last = other
            made.clear()
        if source not in made:
            made[source] = clone(source, other)
        return made[source]

    return moved


class _Read:
    """What was read for a body of which dynamo compares nothing. arguments: their sources."""

    def __init__(self, tx: Any, condition: Any, arguments: list[Any]) -> None:
        self.scope = {"G": tx.output.root_tx.f_globals, "L": tx.output.root_tx.f_locals}
        self.cache: dict[Any, Any] = {}
        compared = {id(guard) for *_, guard in condition.guards}
        self.guards = [each for each in tx.output.guards if id(each) not in compared
                       and any(is_from_source(each.originating_source, own) for own in arguments)]  # fmt: skip
        ways: dict[int, list[Any]] = defaultdict(list)  # to find one object
        for source in condition.traced_sources:
            if any(is_from_source(source, own) for own in arguments):
                found = source.get_value(self.scope, {}, self.cache)
                if not isinstance(found, _NEVER_ONE):
                    ways[id(found)].append(source)
        self.ways = [each for each in ways.values() if len(each) > 1]

    def is_as(self, moved: dict[Any, Any]) -> bool:
        """Whether it is the same in a call of which some arguments are others. moved: {source: the other one's}."""
        cache: dict[Any, Any] = {}

        def other(source: Any) -> Any:
            return moved.get(source, source)

        def there(source: Any) -> Any:
            return source.clone(other).get_value(self.scope, {}, cache)

        try:
            return (all(len({id(there(source)) for source in each}) == 1 for each in self.ways)
                    and all(self._holds(guard, there) for guard in self.guards))  # fmt: skip
        except Exception:  # what cannot be looked up is not there
            return False

    def _holds(self, guard: Any, there: Callable[[Any], Any]) -> bool:
        source, given = guard.originating_source, getattr(guard.create_fn, "keywords", {})
        if "source_b" in given:  # two that are one
            return there(source) is there(given["source_b"])
        spec = GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        if not isinstance(spec, GuardCheckSpec):
            return spec is SKIP_GUARD
        here = source.get_value(self.scope, {}, self.cache)
        return spec.eval_fn(there(source), spec.get_metadata_fn(guard, here))


# ---- what was read, of layers that were not traced


_IN_REGION = re.compile(r"(dict\((type\([^()]*\))(?:\.__mro__\[\d+\])?\.__dict__\)\['forward'\])"
                        r"\.__closure__\[0\]\.cell_contents")  # fmt: skip


def without_region(path: str, regions: Sequence[Callable], scope: dict[str, Any]) -> str:
    """Where a forward was in the closure of a region's, while dynamo read it, as it is now."""

    def found(match: re.Match) -> str:
        for now in (match[1], f"{match[2]}.forward"):  # the second: of a base class
            with contextlib.suppress(KeyError, AttributeError):
                if eval(now, dict(scope)) in regions:
                    return now
        return match[0]

    return _IN_REGION.sub(found, path)


class Renamed:
    """Expressions with other ones in the place of a part. renamed: {part: what stands in its place}, several such."""

    def __init__(self, renamed: Iterable[Mapping[str, str]]) -> None:
        self.by_first: dict[str, list[Mapping[str, str]]] = {}
        for each in renamed:
            for part in each:
                self.by_first.setdefault(part, []).append(each)

    def of(self, path: str) -> Iterator[str]:
        """The expression, and one for every set of parts that stands in it. What is of a class is the same for all."""
        yield path
        if path.startswith("dict(type("):
            return
        for first, several in self.by_first.items():
            if first in path:
                for renamed in several:
                    parts = "|".join(f"{re.escape(part)}" for part in sorted(renamed, key=len, reverse=True))
                    found = re.sub(rf"(?:{parts})(?!\w)", lambda each, renamed=renamed: renamed[each[0]], path)
                    if found != path:
                        yield found


# ---- values of copies


def fake_strided(mode: Any, like: Tensor, sizes: tuple, strides: tuple, offset: Any) -> Tensor:
    """A fake of these sizes, and else like another one, without an op on fakes, which takes ten times as long, and
    without `set_`, which asks three times as long how large its memory has to be."""
    with _disable_current_modes(), torch._C._DisableTorchDispatch():  # a graph that is traced is told nothing of this
        meta = Tensor._make_wrapper_subclass(FakeTensor, sizes, strides, offset, dtype=like.dtype, device="meta").data
        torch._functionalize_unsafe_set(meta, torch.empty(0, dtype=like.dtype, device="meta"))
        return FakeTensor(mode, meta, like.device)


def fake_as(mode: Any, like: Tensor, memory: Tensor | None = None) -> Tensor:
    """A fake like another one, over the memory of a third, or its own. Nothing is computed of its sizes, which takes
    twenty times as long where they are symbols; so its own memory does not know how large it is."""
    with _disable_current_modes():
        with in_kernel_invocation_manager(like.fake_mode):
            meta = like.data  # knows nothing of autograd's views
        memory = torch.empty(0, dtype=like.dtype, device="meta") if memory is None else memory
        torch._functionalize_unsafe_set(meta, memory)
        return FakeTensor(mode, meta, like.device)


def same_sizes(mode: Any, symbols: list[Any]) -> dict[Any, Any]:
    """{symbol of a size that only data tells: another one's, of which the same is known}. Nobody waits for these, as
    ops that give such sizes make dynamo do."""
    shapes, new = mode.shape_env, {}
    with shapes.ignore_fresh_unbacked_symbols():
        for old in symbols:
            new[old] = shapes.create_unbacked_symint().node.expr
            shapes.var_to_range[new[old]] = shapes.var_to_range[old]
            if old in shapes.size_like:
                shapes.size_like.add(new[old])
    for old in symbols:
        for said in list(shapes.deferred_runtime_asserts.get(old, ())):
            moved = type(said)(said.expr.xreplace(new), said.msg, said.stack)
            shapes.deferred_runtime_asserts.setdefault(new[old], []).append(moved)
            shapes.num_deferred_runtime_asserts += 1
    return new
