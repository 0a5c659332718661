"""What a Builder asks of the cache: whether a program is there already, and to keep the one that it made.

    second start:  facts of the model, options, mesh, versions, .. -> name -> entry
                   files, functions and values of Python as the entry has them?  -> a program that runs
    else:          capture, passes, .., and the first rank of every node writes an entry

Ranks compare what they found before one of them uses it: the program of an entry runs where all have the same one, and
else all compile. A cache never makes a call fail: what goes wrong is told in the log, and the program is compiled.
What cannot be told by its name is not kept, see `facts.py` and `entries.py`, and the log says why (level INFO).

Programs are executed that stand in the folder: `folder.py` says who may write there. Nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moefx import rooms
from moefx.capture import transformers_support
from moefx.compiler import records
from moefx.compiler.cache import entries, facts
from moefx.compiler.cache.again import Again
from moefx.compiler.cache.entries import Stale
from moefx.compiler.cache.folder import Folder, Refused, chosen
from moefx.compiler.cache.told import Teller, Untold, digest
from moefx.compiler.checks import chosen_level
from moefx.compiler.variant import LOCK, Call, Variant
from moefx.link.emit import load

if TYPE_CHECKING:
    from moefx.compiler.variants import Builder

log = logging.getLogger("moefx")

Relink = Callable[[str, tuple[int, ...], bool], tuple[Callable, str, list[int]]]


class Shelf:
    """The cache as one Builder sees it. is_open: whether all ranks can use it, for the program that is built now."""

    def __init__(self) -> None:
        folder = chosen()
        self.folder = None if folder is None else Folder(folder)
        self.is_open = False
        self._history: list[str | None] = []  # what was built before decides what comes next
        self._facts: str = ""
        self._teller: Teller | None = None
        self._tried: tuple[str, Call] | None = None

    def begins(self, builder: Builder) -> bool:
        """Whether this rank can use it for the program that is built next."""
        self._tried = None
        if self.folder is None:
            return False
        try:
            with LOCK:
                self._facts = self._told(builder)
        except Untold as error:
            log.info("no program is taken from the cache, nor kept: %s", error)
            return False
        except Exception as error:
            log.warning("no program is taken from the cache, nor kept: %s: %s", type(error).__name__, error)
            return False
        return True

    def _told(self, builder: Builder) -> str:
        home, options = builder.home, builder.options
        for why, is_so in (
            ("programs are dumped", records.dump_folder(options) is not None),
            ("programs are run before and after every pass", chosen_level(options) > 1),
            ("the model is compiled block by block", builder.path != ""),
            ("loops over hit experts are rewritten", bool(builder.forwards)),
            ("choices follow batch sizes", rooms.choose(options)),
            ("numbers of Python are to be inputs", bool(builder.free)),
            ("a program before was not told", None in self._history),
        ):  # fmt: skip
            if is_so:
                raise Untold(why)
        with transformers_support.prepared(builder.root):
            pass  # a first capture leaves hooks behind, which a later start would lack
        self._teller = facts.teller_of(builder.root)
        machine = "" if builder.machine is None else builder.machine.digest()
        spec = builder.spec
        return digest(
            facts.of_model(builder.root, self._teller), facts.of_options(options),
            facts.of_surroundings(home.session.device, builder.root), machine,
            repr((dict(spec.root), dict(spec.roles), spec.ranks_per_node, builder.refold is not None)),
            repr((sorted(home.layouts.items()), sorted(home.memory.items(), key=str), sorted(home.whole))),
            *map(str, self._history),
        )  # fmt: skip

    def find(self, builder: Builder, call: Call) -> Variant | None:
        """The program of an entry, if there is one that is right."""
        name = digest(self._facts, facts.of_call(call.key, call.tree, call.sizes, call.fixed, call.skip))
        self._tried = name, call
        try:
            data = self.folder.read(name)
            if data is None:
                return None
            if data["name"] != name:
                raise Refused(f"the entry {name} is of another program")
            again = Again(builder, call, data["digest"])
            variant = entries.read(data, builder.home, call.key, self._teller, again)
            variant.program.code.relink = self._relink(name, data["digest"], lambda *what: again().relink(*what),
                                                       data["relinked"], _writes(builder))  # fmt: skip
        except Stale as error:
            log.info("a program is in the cache and is compiled again: %s", error)
        except Refused as error:
            log.warning("a program is not taken from the cache: %s", error)
        except Exception as error:
            log.warning("an entry of the cache is not to be read: %s: %s", type(error).__name__, error)
        else:
            log.info("a program came from the cache: %s", name)
            return variant
        return None

    def keep(self, builder: Builder, variant: Variant) -> None:
        """The program that all ranks have. One rank of every node writes it."""
        tried = self._tried if self.is_open else None
        self._history.append(tried and tried[0])
        if tried is None or variant.origin is None or not _writes(builder):
            return
        name, call = tried
        try:
            data = entries.written(variant, call.leaves, call.tree, self._teller, name)
            path = self.folder.write(name, data)
        except Untold as error:
            log.info("the program is not kept in the cache: %s", error)
        except (Refused, OSError) as error:
            log.warning("the program is not kept in the cache: %s", error)
        except Exception as error:
            log.warning("the program is not kept in the cache: %s: %s", type(error).__name__, error)
        else:
            log.info("the program is kept in the cache: %s", path)
            code = variant.program.code
            code.relink = self._relink(name, variant.program.digest, code.relink, {}, True)

    def _relink(self, name: str, number: int, make: Relink, known: dict[str, Any],
                writes: bool) -> Relink:  # fmt: skip
        """What other backwards a program needs is kept with it."""

        def relink(graph: str, absent: tuple[int, ...], profiled: bool) -> tuple[Callable, str, list[int]]:
            which = f"{graph} {','.join(map(str, absent))}"
            if which in known and not profiled:
                source, unread = known[which]
                return load(source, graph), source, list(unread)
            found = make(graph, absent, profiled)
            if not profiled and writes:
                self._add(name, number, which, found[1:])
            return found

        return relink

    def _add(self, name: str, number: int, which: str, found: tuple[str, list[int]]) -> None:
        try:
            data = self.folder.read(name)
            if data is not None and data["digest"] == number and which not in data["relinked"]:
                data["relinked"][which] = list(found)
                self.folder.write(name, data)
        except Exception as error:
            log.info("a backward is not kept in the cache: %s", error)


def _writes(builder: Builder) -> bool:
    session = builder.home.session
    return session.index(builder.spec.everyone) == 0 or os.environ.get("LOCAL_RANK") == "0"
