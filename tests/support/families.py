"""Every family of MoE causal language models in transformers, as a tiny random model.

Sizes follow from the names of a configuration's fields, and what is special about a family stands in `SPECIAL`. A
family that transformers adds is found by itself.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moefx import explain
from tests.support.handmade import VOCAB
from tests.support.models import Case
from tests.support.parity import TOLERANCE, Numbers, compare, distance, reference_step
from tests.support.ranks import RanksError, run_ranks
from tests.support.scenarios import EP2, Layout, Step, compiled_case, reads, steps_of, values_of

EAGER = {"experts_implementation": "eager"}  # the others take no double precision
EXPERTS, TOP_K, WIDTH, LAYERS = 8, 2, 16, 3
MP2: Layout = ((2,), ("mp",))
SHAPES = [[(2, 8), (2, 8)], [(1, 6), (3, 10)]]  # of the batches of both ranks, by step
NOISE = 1e-2  # what differs more than that is not rounding

# Sizes by the name of the field, in every configuration that has it.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": WIDTH, "intermediate_size": 24,
    "dense_intermediate_size": 24, "num_hidden_layers": LAYERS, "num_layers": LAYERS, "max_position_embeddings": 64,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "use_cache": False,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window": 4, "sliding_window_size": 4, "rotary_dim": 4,
    "q_lora_rank": 8, "kv_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "qk_head_dim": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4,
    "index_block_size": 4, "index_topk_blocks": 2, "d_rel": 4, "rel_extent": 16,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_head_dim": 8, "linear_num_heads": 2, "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 8,
    "mamba_head_dim": 8, "mamba_d_state": 4, "ssm_state_size": 4, "mamba_dt_rank": 4, "mamba_chunk_size": 4,
    "chunk_size": 4, "n_groups": 1, "use_mamba_kernels": False,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "num_experts_per_token": TOP_K, "moe_topk": TOP_K, "moe_k": TOP_K,
    "moe_top_k": TOP_K, "top_k_experts": TOP_K, "zero_expert_num": 2, "moe_intermediate_size": 12,
    "expert_ffn_hidden_size": 12, "ffn_hidden_size": 24, "shared_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "shared_experts_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 12, "n_group": 1, "topk_group": 1, "num_expert_group": 1,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "num_dense_layers": 1,
    "first_k_dense_replace": 1, "router_hidden_size": 8,
}  # fmt: skip

_MIXED = ["dense", "sparse", "sparse"]
SPECIAL: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": _MIXED},
    "dbrx": {"d_model": WIDTH, "n_heads": 2, "n_layers": 2, "max_seq_len": 64,
             "attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.0, "rope_theta": 1e4, "clip_qkv": 8.0},
             "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": 12, "moe_num_experts": EXPERTS,
                            "moe_top_k": TOP_K}},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note_text": {"head_dim": 8,
                        "per_layer_config": {"02": {"num_attention_heads": 4, "num_key_value_heads": 4}}},
    "doge": {"is_moe": True, "num_experts": 16},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "hy_v4": {"index_topk": 64},  # with fewer, its indexer chooses among equal scores
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"mlp_layer_types": _MIXED,
                    "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"num_layers": 2},
    "jetmoe": {"kv_channels": 8},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

RANDOM = ("phimoe",)  # in training its router draws, on every rank anew: those are compared as in evaluation


@cache
def families() -> tuple[str, ...]:
    """The model types whose code has experts, one for each model class."""
    found: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if model_type not in CONFIG_MAPPING:
            continue
        folder = Path(inspect.getfile(CONFIG_MAPPING[model_type])).parent
        code = "".join(path.read_text() for path in sorted(folder.glob("modeling_*.py")))
        has_experts = re.search(r"class \w*(Experts|MoE|Moe)\w*\(", code)
        if has_experts and "text_config" not in CONFIG_MAPPING[model_type]().to_dict():  # that is one of its own
            found.setdefault(name if isinstance(name, str) else name[0], model_type)
    return tuple(sorted(found.values()))


def tiny_config(family: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[family]
    known = set(config_class().to_dict())
    sizes = {name: size for name, size in SIZES.items() if name in known}
    if "qk_rope_head_dim" in sizes:  # there the head's size is that of its rotary part
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    return config_class(**{**sizes, **SPECIAL.get(family, {})})


def tiny_model(family: str, **how: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(tiny_config(family), **how)


def case_of(family: str) -> Case:
    return Case(family, partial(tiny_model, family), edit=nn.Module.eval if family in RANDOM else None)


def moe_layers(model: nn.Module) -> list[str]:
    """The layers with parameters of experts: stacked ones, or some that are called so, or doge's embeddings."""
    convolutions = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    found = {}
    for name, parameter in model.named_parameters():
        layer = re.match(r".*?\.\d+(?=\.)", name)
        stacked = parameter.dim() == 3 and name not in convolutions
        if layer and (stacked or ".experts." in name or ".mlp.up_embed." in name):
            found[layer.group()] = None
    return list(found)


@dataclass(frozen=True)
class Found:
    """What came of a family. layers: those with an MoE. verdict: see benchmarks/coverage.py. why: one line,
    details: all of it; empty if all is well. cut and whole: patterns of parameters that are cut over `mp`, and of those
    of other products, with the reason."""

    layers: int
    verdict: str
    why: str = ""
    details: str = ""
    cut: tuple[str, ...] = ()
    whole: tuple[tuple[str, str], ...] = ()


def try_family(family: str, timeout: float = 300.0, run: Callable[..., Any] = run_ranks, layout: Layout = EP2) -> Found:
    """Compile it for two ranks and compare two steps with the reference; where they differ, both with the reference in
    double precision, and where that does not explain it, all in double precision. run: `run_ranks` or `run_sharing`."""
    case = case_of(family)
    layers = len(moe_layers(case.build()))
    readers = 1 + max(reads(rank, layout) for rank in range(2))
    steps = steps_of(case, [sizes[:readers] for sizes in SHAPES])
    limits = ""
    try:
        try:
            ranks = run(2, _run, case, steps, layout, timeout=timeout)
        except (RanksError, RuntimeError) as error:
            if "no single program fits the input sizes" not in str(error):
                raise
            limits, steps = "batches of equal length alone: the model fixes it", steps[:1]
            ranks = run(2, _run, case, steps, layout, timeout=timeout)
    except (RanksError, RuntimeError) as error:
        return Found(layers, *_verdict(str(error)), str(error))
    regions, _, cut, whole = ranks[0]
    if regions < layers:
        return Found(layers, "wrong", f"{regions} MoEs were raised")
    worst, verdict = [], "equal"
    for number, (batches, expected) in enumerate(steps):
        exact = None
        for rank, (_, actual, *_) in enumerate(ranks):
            wanted = expected.of(reads(rank, layout))
            differing = compare(actual[number], wanted)
            if not differing.wrong:
                continue
            exact = exact or reference_step(replace(case, make=partial(tiny_model, family, **EAGER)).build().double(),
                                            batches)  # fmt: skip
            verdict = "rounding" if verdict == "equal" else verdict
            truths = exact.of(reads(rank, layout))
            usual = _worst(wanted, truths)
            for name in differing.wrong:
                mine, eager, truth = actual[number].get(name), wanted.get(name), truths.get(name)
                if mine is None or eager is None or truth is None or mine.shape != truth.shape:
                    verdict = "wrong"
                    worst.append((True, float("inf"), f"{name}: {differing.wrong[name]}"))
                    continue
                off, noise = max(distance(mine, truth)), max(distance(eager, truth))
                is_wrong = not off <= max(TOLERANCE, min(max(2 * noise, usual), NOISE))
                if is_wrong:
                    verdict = "wrong"
                worst.append((is_wrong, off, f"{name} is off by {off:.1e}, in eager by {noise:.1e}"))
    why = max(worst)[-1] if worst else limits  # of what is wrong, or else of what is rounding
    if verdict == "wrong" and (off := _off_in_double(family, len(steps), timeout, run, layout)) < 1e-9:
        verdict, why = "rounding", f"{why}; all is off by {off:.1e} at most if both are in double precision"
    return Found(layers, verdict, why, "\n".join(line for *_, line in worst), cut, whole)


def dense_weights(family: str) -> dict[str, int]:
    """Entries of the weights of linear layers outside of experts, without head and router, in the family's own sizes,
    by pattern of the name."""
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
        except (AttributeError, ValueError, TypeError):  # transformers cannot make it either
            model = tiny_model(family)
    head, found = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_product = isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding)
        is_router = re.search(r"(router|\bgate|\bwg|gate\.wg|classifier)(\.|$)", name) and "gate_proj" not in name
        if is_product and not is_router and module is not head and not re.search(r"\bexperts\.", name):
            pattern = pattern_of(f"{name}.weight")
            found[pattern] = found.get(pattern, 0) + weight.numel()
    return found


def pattern_of(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _worst(wanted: Numbers, truths: Numbers) -> float:
    """How far eager is from double precision in its worst tensor."""
    pairs = [(wanted.get(name), truth) for name, truth in truths.items() if truth is not None]
    return max(max(distance(a, b)) for a, b in pairs if a is not None and a.is_floating_point() and a.shape == b.shape)


def _off_in_double(family: str, steps: int, timeout: float, run: Callable[..., Any], layout: Layout) -> float:
    """The largest relative difference from the reference with everything in double precision; infinite if it does not
    run, as grouped matmuls do not."""
    edit = _double_and_eval if family in RANDOM else nn.Module.double
    case = Case(family, partial(tiny_model, family, **EAGER), edit=edit)
    found = [0.0]
    try:
        readers = 1 + max(reads(rank, layout) for rank in range(2))
        # Sums over mp are in another order than eager's: also those that the model asks for in single precision.
        with contextlib.nullcontext() if layout == EP2 else _without_single_precision(family):
            wanted = steps_of(case, [sizes[:readers] for sizes in SHAPES[:steps]])
            ranks = run(2, _run, case, wanted, layout, timeout=timeout)
    except (RanksError, RuntimeError):
        return float("inf")
    for number, (_, expected) in enumerate(wanted):
        for rank, (_, actual, *_) in enumerate(ranks):
            for name, want in expected.of(reads(rank, layout)).items():
                have = actual[number].get(name)
                if (have is None) != (want is None):
                    return float("inf")
                if want is not None and want.is_floating_point():
                    found.append(max(distance(have, want)))
    return max(found)


@contextlib.contextmanager
def _without_single_precision(family: str) -> Iterator[None]:
    """The model's code with casts to double precision in place of those to single. For ranks that are threads."""
    module = inspect.getmodule(type(tiny_model(family)))
    before, source = dict(vars(module)), inspect.getsource(module)
    for single, double in (("torch.float32", "torch.float64"), ("torch.float)", "torch.float64)"),
                           (".float()", ".double()")):  # fmt: skip
        source = source.replace(single, double)
    try:
        exec(compile(source, module.__file__, "exec"), vars(module))
        yield
    finally:
        vars(module).update(before)


def _double_and_eval(model: nn.Module) -> None:
    model.double().eval()


def _run(rank: int, world: int, case: Case, steps: list[Step], layout: Layout,
         ) -> tuple[int, list[Numbers], tuple, tuple]:  # fmt: skip
    """The number of regions that were raised, what each step computes, and what is cut over `mp`, or not, and why."""
    with contextlib.closing(compiled_case(case, layout)) as compiled:
        values = [values_of(compiled, batches[reads(rank, layout)]) for batches, _ in steps]
        regions = regions_of(compiled)
        reports = explain(compiled).programs
        return (regions, values, tuple(name for report in reports for name, _ in report.cut_over_mp),
                tuple(each for report in reports for each in report.whole_over_mp))  # fmt: skip


def regions_of(compiled: Any) -> int:
    """How many mixtures were raised."""
    programs = {variant.path: variant.program for variant in compiled._variants}
    return sum(len({facts.of for facts in program.regions}) for program in programs.values())


def _verdict(text: str) -> tuple[str, str]:
    """(verdict, the line that says why) of ranks that failed: the first error that is not of a torn connection."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"(moefx\.errors\.\w+|\w*(\.\w+)*Error): ?", line)]
    refusals = [line for line in errors if line.startswith("moefx.errors.") and "DivergenceError" not in line]
    if refusals:
        return "refused", refusals[0].removeprefix("moefx.errors.")
    if any(line.startswith("AssertionError") for line in errors):
        place = next(i for i, line in enumerate(lines) if line.startswith("AssertionError"))
        return "wrong", " ".join(lines[place : place + 2])
    hung = [line for line in lines if "hung: killed after" in line]
    return "broken", (errors or hung or lines[-1:])[0]
