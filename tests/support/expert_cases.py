"""Random cases of expert parallelism: a plan, a small mixture, a routing and what else a training may do."""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait import Engine
from plait.errors import PlaitError
from plait.plan import Plan
from support import hf_models, programs

# Small mixtures, and the name of their number of experts.
FAMILIES = {
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
}
ROUTINGS = ("own", "own", "first half", "first choices", "one expert", "last rank", "no expert")
FROZEN = ("", "", "", "experts", "gate|router", "self_attn", "embed_tokens")
WORDS = {
    "tp": "1 1 1 2",
    "pp": "1 2",
    "cp": "1 1 1 2",
    "zero": "0 1 2 3 3",
    "micro": "1 2 3 4",
    "accumulate": "auto auto unsharded sharded",
    "prefetch": "1 1 0 2",
    "reshard": "use use step",
    "recompute": "none none full selective every=2",
    "offload": "none none none cpu",
    "schedule": "1f1b gpipe interleaved bfs zb-h1 zbv dualpipev",
    "chunks": "0 0 2",
    "cp_method": "auto allgather ring ulysses",
    "deterministic": "false false true",
}


@dataclass(frozen=True)
class Case:
    """A training. `then`: the plan that goes on after the first step; `frozen`: a part of the names of
    parameters that are not trained."""

    plan: str
    family: str
    experts: int
    choices: int
    routing: str
    then: str = ""
    frozen: str = ""
    tied: bool = False
    sequences: int = 12
    padded: bool = False
    evaluates: bool = False
    optimizer: str = "AdamW"
    clip_value: bool = False

    def build(self) -> Any:
        """`build` of a `programs.Task`."""
        keys = self.family, self.experts, self.choices, self.routing, self.frozen
        return functools.partial(_model, *keys, tied=self.tied)

    @property
    def task(self) -> programs.Task:
        data = functools.partial(_batches, sequences=self.sequences, padded=self.padded)
        arguments = programs.ADAMW if self.optimizer == "AdamW" else {"lr": 0.3}
        clip = {"clip_norm": None, "clip_value": 1e-3} if self.clip_value else {}
        task = programs.Task(self.build(), data=data, own_loss=True, steps=3, **clip)
        return replace(task, optimizer=self.optimizer, arguments=arguments)


def _model(
    family: str, experts: int, choices: int, routing: str, frozen: str, *, tied: bool, on_meta: bool = True
) -> nn.Module:
    sizes: dict[str, Any] = {
        FAMILIES[family]: experts,
        "num_experts_per_tok": choices,
        "num_hidden_layers": 4,
    }
    if family == "gpt_oss":
        sizes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    model = hf_models.model_of(family, on_meta=on_meta, tie_word_embeddings=tied, **sizes)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(functools.partial(_rerouted, routing, experts))
    for name, parameter in model.named_parameters():
        if frozen and any(part in name for part in frozen.split("|")):
            parameter.requires_grad_(False)
    return model


def _rerouted(routing: str, experts: int, _: nn.Module, args: Any) -> Any:
    """Other choices than the router's, with its weights; a token may choose an expert twice."""
    x_TH, chosen_Tk, weights_Tk = args
    number_k = torch.arange(chosen_Tk.shape[-1], device=chosen_Tk.device)
    rerouted = {
        "own": chosen_Tk,
        "first half": chosen_Tk % (experts // 2),
        "first choices": (chosen_Tk * 0 + number_k) % experts,
        "one expert": chosen_Tk * 0 + 1,
        "last rank": experts - 1 - chosen_Tk % 2,
        "no expert": torch.where(chosen_Tk % 3 == 1, experts, chosen_Tk),
    }[routing]
    # A choice of no expert has no weight; its gradient is not masked.
    weights_Tk = torch.where(rerouted == experts, weights_Tk - weights_Tk.detach(), weights_Tk)
    return x_TH, rerouted, weights_Tk


def _batches(steps: int, *, sequences: int, padded: bool) -> list[dict[str, Tensor]]:
    found = programs.batches(steps, sequences=sequences)
    for batch in found if padded else ():
        shares = torch.arange(sequences)[:, None] * 7 % programs.LENGTH  # 0 to 15 tokens of a row
        mask = torch.arange(programs.LENGTH) < programs.LENGTH - shares
        batch["attention_mask"] = mask.long()
        batch["labels"] = batch["labels"].masked_fill(~mask, -100)
    return found


def drawn(number: int) -> Case:
    """A case that there can be."""
    rng = random.Random(f"experts {number}")
    while True:
        most_ranks = rng.choice([4, 4, 4, 8])
        experts = rng.choice([4, 4, 6, 8])
        ep = rng.choice([degree for degree in (2, 2, 3, 4) if experts % degree == 0])
        plan = _plan(rng, ep, most_ranks)
        other = _plan(rng, rng.choice([1, 2, ep]), most_ranks) if rng.random() < 0.2 else ""
        if plan is None or other is None:
            continue
        family, routing = rng.choice([*FAMILIES]), rng.choice(ROUTINGS)
        return Case(
            plan,
            family,
            experts,
            rng.choice([1, 2, 2, 3, experts]),
            "own" if family == "gpt_oss" and routing == "no expert" else routing,  # which it does not know
            other,
            rng.choice(FROZEN),
            tied=rng.random() < 0.2,
            sequences=rng.choice([24, 24, 25, 29]),
            padded=rng.random() < 0.2,
            evaluates=rng.random() < 0.3,
            optimizer=rng.choice(["AdamW", "AdamW", "SGD"]),
            clip_value=rng.random() < 0.1,
        )


def _plan(rng: random.Random, ep: int, most_ranks: int) -> str | None:
    words = {key: rng.choice(options.split()) for key, options in WORDS.items()}
    words = {key: word for key, word in words.items() if rng.random() < 0.7}
    dp = ep * rng.choice([1, 1, 2])
    shard = [f"shard={ep}"] * (dp > ep and rng.random() < 0.5)
    text = " ".join([f"dp={dp} ep={ep}", *shard, *(f"{key}={word}" for key, word in words.items())])
    try:
        plan = Plan.parse(f"{text} precision=fp64")
    except PlaitError:
        return None
    return str(plan) if plan.num_ranks <= most_ranks else None


def trained(case: Case, plan: str, steps: range, folder: Path) -> programs.Trace:
    """Train some of the steps. A training that does not begin with the first loads the folder's checkpoint;
    one that does not end with the last saves it."""
    task = case.task
    engine = programs.engine_of(task, plan)
    if steps.start:
        engine.load(folder / f"step-{steps.start:08d}")
    trace = programs.Trace(first_weights=engine.full_parameters())
    data = task.data(task.steps)
    for step in steps:
        if case.evaluates:
            engine.evaluate(_share(data[step], engine, 1)[0])
        result = engine.step(_share(data[step], engine, engine.plan.micro))
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append(engine.full_gradients())
    if steps.stop < task.steps:
        engine.save(folder)
    trace.weights = engine.full_parameters()
    return trace


def _share(batch: Mapping[str, Tensor], engine: Engine, micro: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches, of which some have one sample more."""
    number = engine.data_ranks * micro
    parts = {key: value.tensor_split(number) for key, value in batch.items()}
    own = range(engine.data_rank * micro, (engine.data_rank + 1) * micro)
    return [{key: parts[key][index] for key in batch} for index in own]


def trace_of(
    pool: Any,
    case: Case,
    folder: Path,
    function: Callable[..., programs.Trace] = trained,
    *args: Any,
    timeout_s: float = 150,
) -> programs.Trace:
    """Train the case on a `Pool`, by `trained` or a function that takes more arguments before its own. All
    ranks have the same losses and norms."""
    parts = [(case.plan, range(3))] if not case.then else [(case.plan, range(1)), (case.then, range(1, 3))]
    traces = []
    for plan, steps in parts:
        given = *args, case, plan, steps, folder
        ours, *others = pool.run(function, Plan.parse(plan).num_ranks, *given, timeout_s=timeout_s)
        same = all(f"{other.losses, other.norms}" == f"{ours.losses, ours.norms}" for other in others)
        assert same, "ranks have other losses or norms"
        traces.append(ours)
    first, last = traces[0], traces[-1]
    joined = (
        [x for trace in traces for x in getattr(trace, key)] for key in ("losses", "norms", "gradients")
    )
    return programs.Trace(first.first_weights, last.weights, *joined)
