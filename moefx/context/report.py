"""What users are told of a compilation beside its program."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Report:
    """Each with the reason. left: MoEs that stay as they are, by their routing or place. nearly: what was taken for an
    MoE at first, and is none. kept_whole: weights of experts that every rank has all of. whole_over_esp: regions whose
    experts are not cut over `esp`. whole_over_mp: parameters that are not cut over `mp`; cut_over_mp: how
    those are that are cut. schedules: by module of a region, its schedule, and why it is no other. rows: by module,
    whether its rows stay cut over `mp` behind it, and why not. drifting: buffers by which ranks come to choose apart.
    reductions: of gradients, in how many collectives they travel, and when these begin.
    """

    left: dict[str, str] = field(default_factory=dict)
    nearly: list[str] = field(default_factory=list)
    kept_whole: dict[str, str] = field(default_factory=dict)
    whole_over_esp: dict[int, str] = field(default_factory=dict)
    whole_over_mp: dict[str, str] = field(default_factory=dict)
    cut_over_mp: dict[str, str] = field(default_factory=dict)
    schedules: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    drifting: dict[str, str] = field(default_factory=dict)
    reductions: dict[str, str] = field(default_factory=dict)
