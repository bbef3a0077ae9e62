"""All causal language models of the installed transformers, and what Narrowboat makes of each.

    python -m tests.promises.models > docs/models.md

Each class gets a miniature with the defaults of its own configuration. It is refused by name, or its gradients under
each kind of plan are those of plain autograd, and with its own dropout those of the plan that keeps everything.
Computed in float64, so that what differs is wrong and not rounded; a class that asks for float32 gets it, and twice the
tolerance.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from narrowboat.errors import AnatomyError, first_line
from narrowboat.memory.arguments import takes
from narrowboat.memory.attention import Switch
from narrowboat.memory.contract import Contract
from narrowboat.memory.dropout import PlacedFunctions, Whereabouts
from narrowboat.memory.install import install
from narrowboat.memory.installed import Installed
from narrowboat.memory.trusted import contract_for
from narrowboat.model.classes import class_and_config
from narrowboat.model.experts import experts_of
from narrowboat.model.inner_transformers import supports_sdpa
from narrowboat.model.miniature import FIRST_TEXT_ID, VOCABULARY, miniature
from narrowboat.plan import MemoryPlan

TOLERANCE = 1e-5
NUM_TOKENS = 26
PLANS = {
    "recompute": MemoryPlan(layers="recompute", chunk_tokens=7),
    "stream": MemoryPlan(layers="stream", tile_tokens=5, chunk_tokens=7),
    "stream with a stride": MemoryPlan(layers="stream", tile_tokens=8, input_stride=2),
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}}
ROPES = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), SECTIONS["rope_parameters"])}
STATED: dict[str, dict[str, Any]] = {
    **{name: {"text_config": SECTIONS | {"head_dim": 128}} for name in ("qwen2_vl", "qwen2_5_vl")},
    **{name: {"head_dim": 64} for name in ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")},
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "cohere_compass_text": ROPES,
    "xmod": {"default_language": "en_XX"},
    "cohere_compass": {"text_config": ROPES},
}
"""What real configurations state where defaults leave it open."""


NO_MODEL = "its defaults make no model"


@dataclass(frozen=True)
class Outcome:
    """What came of one family.

    Attributes:
        family: as transformers calls it.
        model: the class.
        refused: why the class is refused; empty if it is not.
        plans: right ones, by name, and for the others why they are refused.
        separates: whether documents may share a row.
        whole: kinds of layers that no tile runs.
        experts: whether it has routed experts that ``lora.experts`` adapts.
        wrong: plans whose gradients are others, and by how much.
        broke: an error that is no refusal.
    """

    family: str
    model: str = ""
    refused: str = ""
    plans: Mapping[str, str] | None = None
    separates: bool = True
    whole: tuple[str, ...] = ()
    experts: bool = False
    wrong: Mapping[str, float] | None = None
    broke: str = ""


def families(auto: Any = AutoModelForCausalLM) -> list[str]:
    """Those for which transformers has a class."""
    return sorted(auto._model_mapping._model_mapping)


def _made(kind: Any, config: Any) -> Any:
    """A miniature; where none can be made, a model without weights, which is then refused."""
    empty = config.__class__.from_dict(config.to_dict())
    config._attn_implementation = "sdpa" if supports_sdpa(kind) else "eager"
    try:
        return miniature(kind, config)
    except Exception:
        with torch.device("meta"):
            return kind._from_config(empty)


def outcome(family: str) -> Outcome:
    """Try one family."""
    try:
        config = CONFIG_MAPPING[family](**STATED.get(family, {}))
        if hasattr(config, "is_decoder"):
            config.is_decoder = True
        kind, config = class_and_config(config)
        model = _made(kind, config)
    except Exception as error:  # defaults of which nobody made a model
        return Outcome(family, broke=f"{NO_MODEL}: {type(error).__name__}: {first_line(error)}")
    try:
        contract = contract_for(model)
    except AnatomyError as error:
        return Outcome(family, kind.__name__, refused=str(error))
    try:
        wrong = _wrong(model, contract)
    except Exception as error:
        return Outcome(family, kind.__name__, broke=f"{type(error).__name__}: {first_line(error)}")
    plans = {layers: contract.refused.get(layers, "") for layers in ("keep", "recompute", "stream")}
    whole = tuple(layer.why for layer in contract.layers.values() if layer.tiles == "none")
    return Outcome(family, kind.__name__, "", plans, contract.separates, whole, bool(experts_of(model)), wrong)


def _wrong(model: nn.Module, contract: Contract) -> dict[str, float]:
    try:
        return _above(TOLERANCE, _differences(model.double(), contract))
    except RuntimeError:  # of a class that computes in float32 whatever it is given
        return _above(2 * TOLERANCE, _differences(model.float(), contract))


def _above(tolerance: float, differences: Mapping[str, float]) -> dict[str, float]:
    return {name: off for name, off in differences.items() if not off <= tolerance}


def _differences(model: nn.Module, contract: Contract) -> dict[str, float]:
    """By plan, from the gradients that are right."""
    ids = torch.randint(FIRST_TEXT_ID, VOCABULARY, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(7))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    model.train()
    truth = _gradients(model, batch, contract=contract)
    plans = {name: plan for name, plan in PLANS.items() if plan.layers not in contract.refused}
    found = {name: _difference(_gradients(model, batch, plan, contract), truth) for name, plan in plans.items()}
    seeded = batch | {"dropout_seeds": [3, 4]}
    kept = _gradients(model, seeded, MemoryPlan(layers="keep"))
    found |= {
        f"{name}, with dropout": _difference(_gradients(model, seeded, plan), kept) for name, plan in plans.items()
    }
    return found


def _gradients(
    model: nn.Module, batch: Mapping[str, Any], plan: MemoryPlan | None = None, contract: Contract | None = None
) -> torch.Tensor:
    """Of all parameters; with a contract nothing is dropped, and without a plan it is plain autograd."""
    with ExitStack() as stack:
        if plan is None:
            stack.enter_context(PlacedFunctions(Whereabouts(is_off=True)))
            stack.enter_context(Switch(model).to("eager"))
            if takes(model.forward, "use_cache") or takes(model.forward, "kwargs"):
                batch = {**batch, "use_cache": False}
        elif contract is None:
            stack.enter_context(install(model, plan))
        else:
            stack.enter_context(Installed(model, plan, contract, drops=False))
        torch.manual_seed(0)
        model(**batch).loss.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([gradient.flatten() for gradient in found])


def _difference(mine: torch.Tensor, truth: torch.Tensor) -> float:
    return float((mine - truth).norm() / truth.norm().clamp(min=1e-30))


def outcomes(names: Sequence[str], num_processes: int = 1) -> list[Outcome]:
    """Of all these families, in their order."""
    if num_processes == 1:
        return [_quietly(name) for name in names]
    with ProcessPoolExecutor(num_processes, get_context("spawn"), partial(torch.set_num_threads, 1)) as pool:
        return list(pool.map(_quietly, names, chunksize=4))


def _quietly(family: str) -> Outcome:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(family)


def page(text: Sequence[Outcome], pictures: Sequence[Outcome]) -> str:
    """The table, in Markdown."""
    lines = [HEAD.format(transformers=transformers.__version__, torch=torch.__version__.partition("+")[0])]
    for title, some in (("Models of text", text), ("Text of models for pictures and text", pictures)):
        lines += [
            f"## {title}",
            "",
            _counts(some),
            "",
            "| family | class | recompute | stream | rows | experts | remarks |",
        ]
        lines += ["|---|---|---|---|---|---|---|", *map(_line, some), ""]
    return "\n".join(lines)


HEAD = """# Models

What Narrowboat makes of each causal language model of transformers {transformers} (PyTorch {torch}), written by
`python -m tests.promises.models > docs/models.md`. A class is right under a plan where its gradients are those of plain
autograd to 1e-5 (2e-5 where a class computes in float32 alone), on a miniature with the defaults of its configuration,
with its own dropout as well. Everything else is refused by name, before a weight is read. `keep` is right wherever a
class is not refused.

rows: `packed` where several documents may share a row without seeing each other; `single` where a row has to be one
document. Every class takes adapters on its linear layers (`lora.targets`), in float32, bfloat16 or float16.
experts: `yes` where it has routed experts that can carry adapters as well (`lora.experts: all`).
"""


def _counts(some: Sequence[Outcome]) -> str:
    right = [one for one in some if one.plans]
    streamed = [one for one in right if not (one.plans or {}).get("stream")]
    return (
        f"{len(some)} families: {len(right)} are trained, {len(streamed)} of them under `stream` as well "
        f"({len(streamed) / len(some):.0%} of all); "
        f"{sum(bool(one.refused) for one in some)} are refused; of {sum(bool(one.broke) for one in some)} the defaults "
        "make no model here."
    )


def _line(one: Outcome) -> str:
    if one.plans is None:
        return f"| {one.family} | {one.model} | | | | | {_cell(one.refused or one.broke)} |"
    marks = ["" if one.plans[layers] else "yes" for layers in ("recompute", "stream")]
    remarks = [f"{layers}: {why}" for layers, why in one.plans.items() if why]
    if one.whole and marks[1]:
        remarks.append("some layers run whole rows")
    experts = "yes" if one.experts else ""
    rows = "packed" if one.separates else "single"
    return (
        f"| {one.family} | {one.model} | {marks[0]} | {marks[1]} | {rows} | {experts} | {_cell('; '.join(remarks))} |"
    )


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def main() -> int:
    """Write the page; 1 if anything is wrong."""
    text = families()
    pictures = [name for name in families(AutoModelForImageTextToText) if name not in text]
    found = outcomes([*text, *pictures], num_processes=2)
    print(page(found[: len(text)], found[len(text) :]))
    wrong = [one for one in found if one.wrong or (one.broke and NO_MODEL not in one.broke)]
    for one in wrong:
        print(f"{one.family}: {one.wrong or one.broke}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
