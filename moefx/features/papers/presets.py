"""What each published system does, and where its paper says so."""

from __future__ import annotations

from typing import Any, NamedTuple


class Preset(NamedTuple):
    """options: of `moefx.Options`. says: what the system does, and where its paper says so."""

    options: dict[str, Any]
    says: str


_WHOLE = {"chunks": 1, "alltoall": "direct"}
_IN_TURN = {**_WHOLE, "scheduler": "sequential"}

PRESETS: dict[str, Preset] = {
    "deepspeed": Preset(_IN_TURN, """
        DeepSpeed-MoE (Rajbhandari et al., ICML 2022; v0.8.1, which Parm and Tutel measure): rows are exchanged whole
        and directly, and computation waits for every exchange."""),
    "tutel": Preset({"alltoall": ("direct", "2dh"), "scheduler": "optsche", "tune": "online", "formula": "tutel"}, """
        Tutel (Hwang et al., MLSys 2023). Adaptive parallelism: for batches of each size to how many parts of an expert
        a token goes, r, out of all divisors and, within a `memory_limit`, 0, by

            T(r) = 4 (a_A + b_A r f V) + 3 (a_G + b_G (P / r) (1 - E r / W)),    T(0) = 3 b_G E P (1 - 1 / W)

        with V bytes of rows, P of an expert, E experts on W ranks: a copy of a row goes to each of r parts, and weights
        are gathered for that. Parameters stay where they are. Adaptive pipelining:
        the degree, out of 1, 2, 4 and 8, and the all-to-all, linear or 2DH (section 3.4), chosen together.
        `tune="online"`: the best by the model of a `machine` are measured in real steps, without one both all-to-alls
        with a few degrees; `tune="model"`: the best by the model. Experts see all rows of a chunk at once, however many
        ranks sent them (flexible all-to-all, 3.1). Capacity factors may be others in every step."""),
    "tutel-pipeline": Preset({"chunks": 2, "alltoall": "2dh", "scheduler": "optsche"}, """
        Tutel without anything adaptive: a pipeline of two chunks, 2DH all-to-all (3.4): rows for one node are put
        together within a node first, then exchanged between nodes."""),
    "fastermoe": Preset({"chunks": 2, "alltoall": "direct", "scheduler": "optsche", "placement": "fastermoe"}, """
        FasterMoE (He et al., PPoPP 2022). Dynamic shadowing: behind every gate, by the rows that there
        are, all ranks get the experts for which its performance model says that it pays (`moefx.placement.shadowing`
        has the equations), and work on their own rows for these; gradients go home. Without a `machine` rows alone
        count. `copies` bounds how many. Smart scheduling: a pipeline of two, S0 S1 R0 R1 beside C0 C1. Its parts
        are groups of ranks, each an exchange with one other group; here they are halves of the tokens, each exchanged
        with all ranks. Its topology-aware gate is a model's matter."""),
    "pipemoe": Preset({"alltoall": "direct", "scheduler": "optsche", "tune": "model"}, """
        PipeMoE (Shi et al., INFOCOM 2023): tokens are cut into as many parts as a performance model of products and
        all-to-alls says is fastest for batches of their size, and exchanges hide behind computation: all ways out come
        first, then all ways back. It needs a `machine`; without one `chunks=4, tune="off"`, for example, says how
        many."""),
    "mpipemoe": Preset({"alltoall": "direct", "scheduler": "optsche", "tune": "online", "formula": "mpipemoe"}, """
        MPipeMoE (Zhang et al., IPDPS 2023). The degree is found by trying for batches of each size, and larger batches
        get as many parts or more (Algorithm 1, whose ranges may overlap, mended in `moefx.costmodel.granularity`).
        Rows that arrive, and those between the experts' products, have memory for two chunks (section 3D): what the
        backward reads of them is restored as S1, S2, S3 or S4 does (table 2), by the least cost

            C = max(q1 v_comp / W_comp, q2 v_comm / W_comm, q3 v_mem / W_mem)        (equation 10)

        of forward and backward, with rates under interference. It needs a `machine`; without one `chunks=4,
        keep="mpipemoe-s4", tune="off"`, for example, names what is to be had."""),
    "schemoe": Preset({"chunks": 2, "alltoall": "pipe", "scheduler": "optsche", "codec": "zfp"}, """
        ScheMoE (Shi et al., EuroSys 2024): two chunks in the order of OptSche (equation 12), C1 of all, then D1 E C2
        chunk by chunk, then D2, beside A1 of all, then A2 of all; Pipe-A2A (section 5), which sends within nodes and
        between them at the same time; ZFP (sections 3.1 and 6.2), which changes numbers."""),
    "parm-baseline": Preset({**_IN_TURN, "split": "baseline"}, """
        What Parm (Pan et al., INFOCOM 2024) compares with, DeepSpeed-MoE with expert sharding (equation 1): ranks
        along `esp` gather their tokens, exchange rows over `ep`, sum results over `esp`, and exchange them back. Ranks
        along `mp` all do the same."""),
    "parm-s1": Preset({**_IN_TURN, "split": "s1"}, """
        Parm's S1 (section 3B, equation 13): every rank along `mp` takes its share of the tokens, before the gate;
        rows go over `ep` and `esp` in one exchange, a copy for each part of their expert; results are summed where the
        tokens are, and gathered over `mp`. Layers with capacities have a capacity for each share."""),
    "parm-s2": Preset({**_WHOLE, "split": "s2"}, """
        Parm's S2 (section 3B, equation 14): the same, but tokens are split behind the gate, along the capacity of every
        expert; and SAA (figure 5): blocks come back in phases, each gathered over `mp` while the next is on its way.
        Layers without capacities are split by tokens, and gather at the end."""),
    "parm": Preset({**_WHOLE, "formula": "parm"}, """
        Parm: of every layer S1 or S2, by its Algorithm 1; it needs a `machine`. As printed the algorithm has T with
        a factor M too many, takes q for q / N_MP in the exchange, and counts S2's gather twice (equation 14). From the
        right t_D1 = t_D2 follows: S2 where an expert has less than

            T* = (beta_AG B L M + alpha_AG (1 - omega)) / (omega beta_AG E M)

        tokens, with omega the share of its gather that S2 does not hide (`moefx.costmodel.ways`)."""),
    "hecate": Preset({**_WHOLE, "placement": "hecate", "rehome_every": 100}, """
        Hecate's FSSDP: before a call copies of experts with much load, as many as attention hides the sending of, go
        where Algorithm 1 says (section 4.2), by the mean of the loads of five steps; rows go to a copy on their rank,
        else on their node, else evenly to all (section 4.4); every 100 steps homes move as Algorithm 2 says (section
        4.3). One chunk, direct all-to-all. A `machine` tells how much attention hides."""),
}  # fmt: skip
