"""One finding of a lint."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Lint:
    """name: of the lint, such as "softmax-twice". what: one sentence. where: module or parameter, and file:line. why:
    what it leads to. hint: what to do."""

    name: str
    what: str
    where: str
    why: str
    hint: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.name}: {self.what}\n  at {self.where}\n  why: {self.why}\n  try: {self.hint}"
