"""Programs that tests run on ranks, and the one-process reference."""

import fcntl
import functools
import hashlib
import io
import math
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.comm import Group, PartialReduceWork, Work, connect
from plait.engine import spec
from plait.models import causal_lm_on_meta

SEQUENCES, LENGTH, VOCABULARY, STEPS = 12, 16, 61, 4
CLIP = 0.05  # well below actual norms: every step is clipped
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


# Batch of a step over all data ranks: all samples, or all micro-batches, those of the first rank first.
Batch = dict[str, Tensor] | list[dict[str, Tensor]]


@contextmanager
def ignoring_batch_statistics() -> Iterator[None]:
    """Build an engine without the warning that BatchNorm's statistics are those of a part of the batch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*BatchNorm computes with the statistics")
        yield


@dataclass
class Trace:
    """Results of a run: loss, norm and gradients of each step, and the first and last weights."""

    first_weights: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def llama(
    *,
    on_meta: bool = True,
    tied: bool = False,
    exact: bool = True,
    hidden: int = 32,
    ffn: int = 56,
    layers: int = 2,
) -> nn.Module:
    """Build a small unmodified Llama; with `exact`, its norms compute in their input's dtype."""
    model: Any = causal_lm_on_meta(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
        }
    )
    if not on_meta:
        model = type(model)(model.config)
    return with_exact_norms(model) if exact else model


def with_exact_norms(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(exact_rms_norm, module)
    return model


def exact_rms_norm(self: Any, x: Tensor) -> Tensor:
    """RMSNorm in the input's dtype: transformers uses float32, too coarse for tolerances of 1e-9."""
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def tied_llama(on_meta: bool = True) -> nn.Module:
    return llama(on_meta=on_meta, tied=True)


def rough_llama(on_meta: bool = True) -> nn.Module:
    return llama(on_meta=on_meta, exact=False)


def wide_llama(on_meta: bool = True) -> nn.Module:
    """Llama so wide that the padding of its units is below 1 %."""
    return llama(on_meta=on_meta, exact=False, hidden=128, ffn=352)


class Branches(nn.Module):
    """Plain module that is hard for data parallelism: a branch that only some samples take, a module used
    twice, an unused parameter, a scalar and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24) for _ in range(3)])
        self.rare = nn.Linear(24, 24)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(24, VOCABULARY, bias=False)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 24), requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) * self.frozen
        for block in (*self.blocks, self.blocks[0]):
            x = x + torch.tanh(block(x))
        if int(input_ids[0, 0]) % 2:  # differs between ranks and micro-batches
            x = x + self.rare(x)
        return self.head(x * self.scale)


def branches(on_meta: bool = False) -> nn.Module:
    assert not on_meta, "plain modules come with their weights"
    torch.manual_seed(5 + connect().rank)  # weights differ by rank: the engine must broadcast rank 0's
    return Branches()


def summed_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Next-token cross entropy of logits or of an output with logits: sum and count, in plain torch."""
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    targets = batch["labels"][:, 1:].reshape(-1)
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def batches(
    steps: int = STEPS, *, sequences: int = SEQUENCES, length: int = LENGTH
) -> list[dict[str, Tensor]]:
    """Global batches with unevenly masked labels: from none to all of a sequence."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (sequences, length), generator=generator)
        share = torch.linspace(0.0, 1.0, sequences)[torch.randperm(sequences, generator=generator), None]
        masked = torch.rand(sequences, length, generator=generator) < share
        found.append({"input_ids": ids, "labels": ids.masked_fill(masked, -100)})
    return found


@dataclass(frozen=True)
class Task:
    """A training task, shared by the parallel program and the reference.

    Functions are top-level, so that ranks can import them. `blocks` and `groups` take the model and return
    parallelize's `blocks` and `param_groups`; `prepare` modifies the model before the first step, in both
    programs. The second step has the first one's weights, optimizer states and orders of communications; more
    are for tasks whose steps differ.
    """

    build: Callable[..., nn.Module]
    data: Callable[[int], Sequence[Batch]] = batches
    optimizer: str = "AdamW"
    arguments: dict[str, Any] = field(default_factory=lambda: ADAMW)
    clip_norm: float | None = CLIP
    clip_value: float | None = None
    router_bias_update: float | None = None
    router_z_loss: float | None = None
    blocks: Callable[[nn.Module], Any] | None = None
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    steps: int = 2
    probe: Batch | None = None
    offload_dir: str | None = None
    own_loss: bool = False  # plait's own causal language model loss; else `loss`
    loss: Callable[[Any, Any], tuple[Tensor, Tensor]] = summed_loss
    tensor_plan: dict[str, str] | None = None
    reuses_traces: bool = True  # see `reused_traces`; not where what is traced is changed by a test


def train(build: Callable[[], nn.Module], plan: str, optimizer: str = "AdamW") -> Trace:
    """Train the parallel program on every rank of the plan; rank 0's trace is complete."""
    return train_task(_plain_task(build, optimizer), plan)


def train_task(task: Task, plan: str, muted_ops: tuple[str, ...] = ()) -> Trace:
    """Train a task's parallel program. `muted_ops`: operations that do not communicate during steps."""
    engine = engine_of(task, plan)
    trace = Trace(first_weights=engine.full_parameters())
    if task.prepare is not None:
        task.prepare(engine.model)
    for batch in task.data(task.steps):
        with muted(*muted_ops):
            result = engine.step(share_of(batch, engine))
        assert not result.skipped
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append(engine.full_gradients())
    trace.weights = engine.full_parameters()
    return trace


def engine_of(task: Task, plan: str, seed: int = 3, world: Any = None) -> plait.Engine:
    """Build the engine of a task under a plan, on this rank."""
    torch.set_default_dtype(torch.float64)  # dtype of plain modules; meta models are cast
    try:
        model = task.build()
        options: dict[str, Any] = {} if task.blocks is None else {"blocks": task.blocks(model)}
        options |= {} if task.groups is None else {"param_groups": task.groups(model)}
        options |= {} if task.clip_value is None else {"clip_value": task.clip_value}
        options |= {} if task.router_bias_update is None else {"router_bias_update": task.router_bias_update}
        options |= {} if task.router_z_loss is None else {"router_z_loss": task.router_z_loss}
        options |= {} if task.probe is None else {"probe": task.probe}
        options |= {} if task.tensor_plan is None else {"tensor_plan": task.tensor_plan}
        with reused_traces(task):
            return plait.parallelize(
                model,
                plan,
                optimizer=getattr(torch.optim, task.optimizer, None) or getattr(plait, task.optimizer),
                optimizer_args=task.arguments,
                clip_norm=task.clip_norm,
                loss=None if task.own_loss else task.loss,
                seed=seed,
                offload_dir=task.offload_dir,
                world=world,
                **options,
            )
    finally:
        torch.set_default_dtype(torch.float32)


_TRACES: dict[Any, Any] = {}


@contextmanager
def reused_traces(task: Task) -> Iterator[None]:
    """Inside the context, `parallelize` takes a tensor plan or stages from an earlier engine of this process,
    or from another rank of the pool, if the model is built by the same function, and the arguments are the
    same.

    They are values that follow from the model's code, and to trace a model on meta for them takes half of an
    engine's time. With an example batch they are traced each time.
    """
    try:
        build = pickle.dumps(task.build)
    except (pickle.PicklingError, AttributeError, TypeError):  # a function that has no name
        build = b""
    with ExitStack() as patches:
        for name in ("build_tp_plan", "plan_stages") if task.reuses_traces and build else ():
            reusing = functools.partial(_reusing, getattr(spec, name), build)
            patches.enter_context(mock.patch.object(spec, name, reusing))
        yield


def _reusing(function: Callable[..., Any], build: bytes, model: nn.Module, *args: Any, **given: Any) -> Any:
    trace = functools.partial(function, model, *args, **given)
    if given["batch"] is not None:
        return trace()
    key = function.__name__, build, _comparable(args), _comparable(given)
    if key not in _TRACES:
        _TRACES[key] = _of_one_rank(key, trace)
    return _TRACES[key]


def _of_one_rank(key: Any, trace: Callable[[], Any]) -> Any:
    """The trace of the first rank that asks for it, which the others of the pool wait for and read."""
    digest = _digest(key)
    if "PLAIT_RENDEZVOUS_FILE" not in os.environ or digest is None:
        return trace()
    path = Path(os.environ["PLAIT_RENDEZVOUS_FILE"]).parent / f"trace-{digest}"
    with path.open("ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if text := file.read():
            return pickle.loads(text)
        found = trace()
        file.write(pickle.dumps(found))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file, too
        return found


def _digest(key: Any) -> str | None:
    """The same in all processes; None if a part of the key has no name in another process."""
    text = io.BytesIO()
    pickler = _ByName(text)
    pickler.fast = True  # as which parts of a key are one object differs between processes
    try:
        pickler.dump(key)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return hashlib.sha256(text.getvalue()).hexdigest()


class _ByName(pickle.Pickler):
    """Writes classes by their names, also those that a function makes."""

    def persistent_id(self, value: Any) -> Any:
        return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else None


def _comparable(value: Any) -> Any:
    """The value with tuples for its containers, and types for modules, which are named there."""
    if isinstance(value, Mapping):
        return tuple((key, _comparable(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    return type(value) if isinstance(value, nn.Module) else value


def _plain_task(build: Callable[..., nn.Module], optimizer: str) -> Task:
    return Task(build, optimizer=optimizer, arguments=ADAMW if optimizer == "AdamW" else {"lr": 0.3})


@contextmanager
def muted(*operations: str) -> Iterator[None]:
    """Replace operations of `plait.comm` in all parallel modules: they do their local part and do not
    communicate. Fails for an operation that no module uses."""
    with ExitStack() as patches:
        for operation in operations:
            original = getattr(plait.comm, operation)
            users = [
                module
                for name, module in sys.modules.items()
                if name.startswith("plait.parallel") and getattr(module, operation, None) is original
            ]
            assert users, f"no module of plait.parallel uses {operation}"
            for module in users:
                patches.enter_context(mock.patch.object(module, operation, MUTED[operation]))
        yield


def _muted_reduce(tensor: Tensor, group: Group, *_: Any, **__: Any) -> Work:
    return Work()


def _muted_all_gather(out: Tensor, shard: Tensor, group: Group, *_: Any, **__: Any) -> Work:
    local = shard.clone()  # the shard may be a view of `out`
    out.zero_().view(group.size, -1)[group.rank].copy_(local)
    return Work()


def _muted_reduce_scatter(full: Tensor, group: Group, *_: Any, **__: Any) -> PartialReduceWork:
    return PartialReduceWork([full.view(group.size, -1)[group.rank]], Work())


def _muted_all_reduce(*_: Any, **__: Any) -> None:
    return None


MUTED = {
    "all_reduce": _muted_all_reduce,
    "start_all_reduce": _muted_reduce,
    "start_all_gather": _muted_all_gather,
    "start_scattered_sum": _muted_reduce_scatter,
}


def share_of(batch: Batch, engine: plait.Engine) -> Any:
    if isinstance(batch, list):
        number = len(batch) // engine.data_ranks
        return batch[engine.data_rank * number :][:number]
    return {key: value.chunk(engine.data_ranks)[engine.data_rank] for key, value in batch.items()}


def one_process(
    build: Callable[..., nn.Module], first_weights: dict[str, Tensor], micros: int, optimizer: str = "AdamW"
) -> Trace:
    """Train the reference: plain torch, full batch, one model, no plait code in the training loop.

    `micros`: number of micro-batches per forward; it only matters to branches that depend on values.
    """
    return one_process_task(_plain_task(build, optimizer), first_weights, micros)


def one_process_task(
    task: Task,
    first_weights: dict[str, Tensor],
    micros: int,
    *,
    divides_gradients: bool = False,
    stepper_of: Callable[..., torch.optim.Optimizer] | None = None,
) -> Trace:
    """Train the reference of a task; see `one_process`. `divides_gradients`: by the number of targets, as
    plait does, in place of the loss. It matters where gradients are rounded. `stepper_of`: the optimizer of
    parameters by name and their groups."""
    model = task.build(on_meta=False).double()
    model.load_state_dict(first_weights, strict=False)
    named = dict(model.named_parameters())
    assert named.keys() == first_weights.keys(), named.keys() ^ first_weights.keys()
    if task.prepare is not None:
        task.prepare(model)
    groups = decay_groups(named) if task.groups is None else task.groups(model)
    stepper: torch.optim.Optimizer
    if stepper_of is not None:
        stepper = stepper_of(named, groups)
    elif task.optimizer == "Lion":
        stepper = PlainLion(groups, task.arguments)
    else:
        stepper = getattr(torch.optim, task.optimizer)(groups, **{"foreach": False} | task.arguments)
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    trace = Trace(first_weights=first_weights)
    for batch in task.data(task.steps):
        stepper.zero_grad()
        loss, num_targets = _summed_loss(model, batch, micros, task.loss)
        mean = loss / num_targets
        (loss if divides_gradients else mean).backward()
        for parameter in trainable.values():  # plait updates unused parameters with a zero gradient
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad /= num_targets if divides_gradients else 1
        limit = float("inf") if task.clip_norm is None else task.clip_norm
        norm = nn.utils.clip_grad_norm_(trainable.values(), limit, foreach=False)
        if task.clip_value is not None:
            nn.utils.clip_grad_value_(trainable.values(), task.clip_value, foreach=False)
        trace.norms.append(norm.item())
        trace.losses.append(mean.item())
        trace.gradients.append({name: p.grad.clone() for name, p in trainable.items()})
        stepper.step()
    trace.weights = {name: p.detach().clone() for name, p in named.items()}
    return trace


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, line by line, parameter by parameter."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for w in group["params"]:
                g, m = w.grad, self.state[w].get("m", torch.zeros_like(w))
                c = beta1 * m + (1 - beta1) * g
                w.copy_(w - lr * (torch.sign(c) + decay * w))
                self.state[w]["m"] = beta2 * m + (1 - beta2) * g


def mean_loss(model: nn.Module, batch: Batch, micros: int) -> Tensor:
    loss, num_targets = _summed_loss(model, batch, micros)
    return loss / num_targets


def _summed_loss(
    model: nn.Module, batch: Batch, micros: int, loss_of: Callable[..., Any] = summed_loss
) -> tuple[Tensor, float]:
    """The loss summed over micro-batches, and its number of targets, or the sum of their weights."""
    if not isinstance(batch, list):
        chunks = {key: value.chunk(micros) for key, value in batch.items()}
        batch = [{key: parts[micro] for key, parts in chunks.items()} for micro in range(micros)]
    num_targets, loss = 0.0, torch.zeros((), dtype=torch.float64)
    for micro in batch:
        inputs = {key: value for key, value in micro.items() if key not in ("labels", "loss_weights")}
        if hasattr(model, "config"):
            inputs["use_cache"] = False
        summed, count = loss_of(model(**inputs), micro)
        loss, num_targets = loss + summed, num_targets + float(count)
    return loss, num_targets


def decay_groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    decay = [p for name, p in named.items() if p.requires_grad and _decays(name, p)]
    others = [p for name, p in named.items() if p.requires_grad and not _decays(name, p)]
    return [{"params": decay}, {"params": others, "weight_decay": 0.0}]


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")


def largest_difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """Largest difference of any tensor, relative to the largest element of all, and the tensor's name."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    scale = max(float(t.abs().max()) for t in reference.values())
    found = {n: float((ours[n] - reference[n]).abs().max()) / scale for n in reference}
    return max((math.inf if math.isnan(d) else d, n) for n, d in found.items())  # max() would drop a NaN


def assert_same(ours: Trace, reference: Trace, tolerance: float = 1e-9) -> None:
    for step, (local, theirs) in enumerate(zip(ours.gradients, reference.gradients, strict=True)):
        difference, name = largest_difference(local, theirs)
        assert difference <= tolerance, f"step {step}: gradient of {name} differs by {difference:.1e}"
    difference, name = largest_difference(ours.weights, reference.weights)
    assert difference <= tolerance, f"weight {name} differs by {difference:.1e}"
    for local, theirs in zip(ours.losses + ours.norms, reference.losses + reference.norms, strict=True):
        assert abs(local - theirs) <= tolerance * abs(theirs), f"loss or norm {local} against {theirs}"


def check_parity(pool: Any, task: Task, plan: str) -> None:
    """Compare a plan's training, on a `Pool`, with one process from the same weights."""
    ours, *others = pool.run(train_task, plait.Plan.parse(plan).num_ranks, task, plan)
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    assert_same(ours, one_process_task(task, ours.first_weights, 1))
