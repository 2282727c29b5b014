"""A valid plan for a model: what is decided, and which mistakes are found, without other ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import World
from plait.engine.loss import Loss, check_sums_tokens
from plait.engine.routers import RouterFacts
from plait.errors import ConfigError, ModelError, PlanError, ScheduleError, shown
from plait.models import (
    Blocks,
    Numbering,
    Task,
    blocks_of,
    build_tp_plan,
    check_tokens_apart,
    numbering_of,
    plan_stages,
    task_of,
    with_layout,
)
from plait.models.experts import Experts, divide_over_columns, expert_layers, experts_of
from plait.models.linear_weights import block_linears, expert_weights
from plait.models.reward import is_reward_model
from plait.models.tensors import storage_key
from plait.models.tokens import TracedAttention
from plait.optim.update_kinds import DEFAULT_GROUPS, GroupOptimizer
from plait.parallel.experts.capacity import capacities_of
from plait.parallel.float8 import Float8Layers, check_device
from plait.parallel.quantized_base import quantized_formats
from plait.plan import ExpertDim, Plan, StageAssignment, TPPlan, single_stage
from plait.plan.compile_choice import CompileChoice, without_auto
from plait.plan.context import MethodChoice, heads_of_columns, recomputed_share
from plait.plan.distillation import Distillation
from plait.plan.loss_scaling import LossScaling
from plait.plan.preference import Preference
from plait.plan.schedule import Schedule, check, compile_conflict
from plait.plan.schedule.load import load_schedule

_SMOOTHED = (Task.CAUSAL_LM, Task.IMAGE_LM, Task.ALIGNED_LM)


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of `parallelize`, where they are described; a plan's text is parsed. Raises PlanError for
    a text that is none, ConfigError for an optimizer that is not a class or for invalid clipping limits."""

    model: nn.Module
    plan: Plan
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_args: Mapping[str, Any] = field(default_factory=dict)
    param_groups: Iterable[Any] | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    router_bias_update: float | None = None
    router_z_loss: float | None = None
    loss: Loss | None = None  # also a Preference: then it is `preference`, and this is None
    keep_zeros: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    loss_scaling: LossScaling | None = None
    blocks: Blocks | None = None
    offload_dir: Path | None = None
    tensor_plan: Mapping[str, str] | None = None
    layout: str | None = None
    probe: bool | Mapping[str, Tensor] = False
    example_batch: Mapping[str, Tensor] | None = None
    seed: int = 0
    weights: str | Path | None = None
    world: World | None = None
    preference: Preference | None = None
    distillation: Distillation | None = None

    def __post_init__(self) -> None:
        given: Any = self.loss
        if isinstance(given, Preference):
            vars(self).update(loss=None, preference=given)
        if isinstance(given, Distillation):
            vars(self).update(loss=None, distillation=given)
        self._check_preference()
        optimizer, norm, value = self.optimizer, self.clip_norm, self.clip_value
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise ConfigError(
                "optimizer must be a class",
                given=f"{optimizer if isinstance(optimizer, type) else type(optimizer).__name__}",
                expected="a class, which is built over the shards that each rank owns",
                hint="optimizer=torch.optim.AdamW, optimizer_args={'lr': 1e-3}",
            )
        limits = [("clip_norm", norm, "limit", 1.0), ("clip_value", value, "limit", 1.0)]
        limits.append(("router_bias_update", self.router_bias_update, "rate", 0.001))
        limits.append(("router_z_loss", self.router_z_loss, "coefficient", 0.001))
        for name, number, kind, usual in limits:
            if number is not None and not (isinstance(number, int | float) and number > 0):
                raise ConfigError(
                    f"{name} is not a valid {kind}",
                    given=f"{name}={number}",
                    expected="above 0, or None",
                    hint=f"{name}={usual}",
                )
        if norm is not None and value is not None:
            raise ConfigError(
                "clip_norm and clip_value cannot be combined",
                given=f"clip_norm={norm} and clip_value={value}",
                expected="one of the two",
                hint=f"clip_norm={norm}",
            )
        for name in ("label_smoothing", "z_loss"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is not a valid weight",
                    given=f"{name}={getattr(self, name)}",
                    expected="at least 0, below 1",
                    hint=f"{name}={'0.1' if name == 'label_smoothing' else '1e-4'}",
                )
            has_loss = self.loss is not None or self.preference is not None
            if getattr(self, name) and (has_loss or task_of(self.model) not in _SMOOTHED):
                raise ConfigError(
                    f"{name} is a term of the built-in loss of language models",
                    given=f"{name}=, and {'loss=' if has_loss else type(self.model).__name__}",
                    expected="a language model of transformers, and no loss=",
                    hint=f"a loss= that has the term, without {name}=",
                )
        plan = self.plan if isinstance(self.plan, Plan) else Plan.parse(self.plan)
        folder = None if self.offload_dir is None else Path(self.offload_dir)
        vars(self).update(plan=plan, optimizer_args=self.optimizer_args or {}, offload_dir=folder)

    def _check_preference(self) -> None:
        """Raise ConfigError for a loss of pairs, or one of a teacher, that cannot be computed."""
        if self.distillation is not None and (task_of(self.model) is not Task.CAUSAL_LM or self.probe):
            raise ConfigError(
                "a distillation is that of a language model's loss",
                given=f"{type(self.model).__name__}, loss=Distillation(...)" + ", probe=" * bool(self.probe),
                expected="a causal language model of transformers, without probe=",
                hint="loss= with a function, or no probe",
            )
        if self.preference is None:
            return
        is_reward = self.is_reward
        is_valid = is_reward_model(self.model) if is_reward else task_of(self.model) is Task.CAUSAL_LM
        if not is_valid or self.probe:
            raise ConfigError(
                "the probe has no pairs"
                if is_valid
                else f"this loss of pairs is that of a {'reward' if is_reward else 'language'} model",
                given="probe=, and loss=Preference(...)"
                if is_valid
                else f"{type(self.model).__name__}, loss={self.preference.loss!r}",
                expected="gradients of the loss of tokens, which probe= compares"
                if is_valid
                else "a decoder for sequence classification with num_labels=1, and its layer `score`"
                if is_reward
                else "a causal language model of transformers",
                hint="no probe" if is_valid else "loss= with a function",
            )

    @property
    def is_reward(self) -> bool:
        """True for a loss of a reward model's scores."""
        return self.preference is not None and self.preference.is_reward

    @property
    def loss_terms(self) -> dict[str, Any]:
        """The terms of the built-in loss in training."""
        if self.loss is not None:
            return {}
        of_teacher = {} if self.distillation is None else {"distillation": self.distillation}
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, **of_teacher}

    @property
    def example(self) -> Mapping[str, Tensor] | None:
        """A batch to trace the model with; None: trace with token ids."""
        return self.example_batch or (self.probe if isinstance(self.probe, Mapping) else None)


@dataclass(frozen=True)
class TrainingSpec:
    """How a model is sharded and its weights are updated.

    given     the arguments, without the parameters of `param_groups`, which would be held in memory
    job       the plan, with its number of ranks
    plan      of the engine: the job's, or what one of its workers of parameter servers runs by itself
    groups    options of each optimizer group
    numbering positions of tokens without position ids; None without cp
    cp_choice why attention reaches other ranks' tokens as it does; None without cp
    compile_choice  why `compile=auto` is off whatever the times; None otherwise
    heads     (heads, kv heads) of each attention, with cp
    experts   those that ep divides
    formats   of quantized parameters, by name
    kept_zeros  parameters whose elements that are zero stay zero
    routers   of a mixture of experts
    group_of  index of a parameter's group, by name; None: grouped by whether weight decay applies
    """

    given: Arguments
    job: Plan
    plan: Plan
    blocks: Sequence[tuple[str, nn.Module]]
    groups: Sequence[Mapping[str, Any]]
    group_of: Mapping[str, int] | None
    tensor: TPPlan
    stages: StageAssignment
    schedule: Schedule
    loss_scaling: LossScaling | None
    float8: Float8Layers
    numbering: Numbering | None
    experts: tuple[Experts, ...]
    routers: RouterFacts
    heads: Sequence[tuple[int, int]]
    formats: Mapping[str, str]
    kept_zeros: frozenset[str] = frozenset()
    cp_choice: MethodChoice | None = None
    compile_choice: CompileChoice | None = None

    @cached_property
    def parts(self) -> dict[str, ExpertDim]:
        """The dim of the experts in each parameter that ep divides, by name."""
        return _parts(self.experts)

    @cached_property
    def optimizers(self) -> list[GroupOptimizer]:
        """The optimizer of each group."""
        return GroupOptimizer.of_groups(self.given.optimizer, self.given.optimizer_args, self.groups)


def validate(
    given: Arguments,
    num_ranks: int | None = None,
    device: torch.device | None = None,
    host_size: int | None = None,
) -> TrainingSpec:
    """Return what the plan means for the model.

    Without `num_ranks` the plan is not resolved, and without `device` not checked against one. `host_size`:
    ranks on each host; None: all on one. Raises PlanError, ScheduleError, ModelError or ConfigError.
    """
    model, plan, example = given.model, given.plan, given.example
    if num_ranks is not None:
        plan = plan.resolved(num_ranks)
        plan.check_ranks(num_ranks)
    if plan.precision != "fp16" and given.loss_scaling is not None:
        raise ConfigError(
            "loss_scaling needs precision=fp16",
            given=f"precision={plan.precision}",
            expected="loss_scaling=None for the other dtypes",
            hint="precision=fp16, or no loss_scaling",
        )
    schedule = _schedule(plan)
    has_experts, splits = bool(expert_layers(model)), bool(schedule.split)
    plan, compiles = without_auto(plan, splits=splits, has_experts=has_experts)
    _check_device(plan, device)
    _check_dtypes(model)
    routers, blocks = _routers(given, plan), _find_blocks(model, plan, given.blocks, example)
    choice, heads = None, list[tuple[int, int]]()
    if plan.cp > 1:
        plan, choice, heads = _with_method(plan, given, host_size, device if num_ranks else None)
    groups = _groups(given.param_groups)
    own = DEFAULT_GROUPS if groups is None else groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in own]
    tensor = _tensor_plan(model, plan, blocks, with_layout(given.tensor_plan, given.layout), example)
    stages = _stages(model, plan, blocks, schedule, example, given.loss)
    if given.probe:
        plan.check_no_servers("probe")
    _check_weights(given)
    return TrainingSpec(
        given=replace(given, param_groups=None),
        job=plan,
        plan=plan.of_worker,
        blocks=blocks,
        groups=options,
        group_of=_group_of(model, groups),
        tensor=tensor,
        stages=stages,
        schedule=schedule,
        loss_scaling=(given.loss_scaling or LossScaling()) if plan.precision == "fp16" else None,
        float8=Float8Layers.select(blocks, tensor, plan) if plan.is_float8 else Float8Layers(),
        numbering=numbering_of(model, example) if plan.cp > 1 else None,
        heads=heads,
        cp_choice=choice,
        compile_choice=compiles,
        experts=(experts := _experts(model, plan, stages) if plan.ep > 1 else ()),
        formats=quantized_formats(model, blocks, tensor, plan, _parts(experts)),
        kept_zeros=_kept_zeros(model, blocks, plan) if given.keep_zeros else frozenset(),
        routers=replace(routers, capacities=capacities_of(plan.capacity, plan.cols, experts, tensor)),
    )


def _kept_zeros(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], plan: Plan) -> frozenset[str]:
    """The trained weights of linear layers and experts. Raises PlanError, ModelError."""
    plan.check_no_servers("keep_zeros")
    if plan.offload == "disk":
        raise PlanError(
            "zeros are not kept in weights on a disk",
            given="keep_zeros, offload=disk",
            expected="master weights in memory",
            hint="offload=cpu",
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not (names := trained & {*block_linears(model, blocks), *expert_weights(model)}):
        raise ModelError(
            "keep_zeros has no effect: the model has no such weights that are trained",
            given=type(model).__name__,
            expected="nn.Linear in the model's blocks, not frozen",
            hint="no keep_zeros; an adapter leaves its base as it is",
        )
    return frozenset(names)


def _routers(given: Arguments, plan: Plan) -> RouterFacts:
    rate, z_loss = given.router_bias_update, given.router_z_loss
    facts = RouterFacts.of_model(given.model, has_loss=given.loss is not None, bias_rate=rate, z_loss=z_loss)
    if facts.losses:
        plan.check_no_servers("output_router_logits=True" if z_loss is None else "router_z_loss")
    if facts.losses and plan.compile and plan.recompute == "selective":
        raise PlanError(
            "losses of routers are not computed under this plan",
            given=f"{', '.join(facts.losses)}, compile=true recompute=selective",
            expected="logits that are kept outside of compiled blocks",
            hint="recompute=full, no compile; or no output_router_logits and no router_z_loss",
        )
    if plan.router_balance == "step" and not facts.losses:
        raise PlanError(
            "router_balance has no effect without a loss of routers",
            given=f"router_balance=step, {type(given.model).__name__}",
            expected="output_router_logits=True in the model's configuration, and no loss=; or router_z_loss",
            hint="no router_balance",
        )
    if rate is not None and (
        plan.local_steps or plan.num_servers or (plan.compile and plan.recompute == "selective")
    ):
        raise PlanError(
            "biases of routers are not updated under this plan",
            given=f"router_bias_update={rate}, {plan}",
            expected="ranks that train in one step, and loads that are counted outside of compiled blocks",
            hint="no local_steps, servers or compile=true recompute=selective; or no router_bias_update",
        )
    return facts


def _experts(model: nn.Module, plan: Plan, stages: StageAssignment) -> tuple[Experts, ...]:
    found = experts_of(model, plan.ep)
    shared = [each.name for each in found if {*each.parameters} & stages.shared.keys()]
    if shared:
        raise ModelError(
            "ep does not divide experts that blocks of several stages share",
            given=f"{shared[0]}, ep={plan.ep} pp={plan.pp}",
            expected="experts of one stage",
            hint="no pp, or no ep",
        )
    if plan.capacity != "none" and plan.compile and plan.recompute == "selective":
        raise PlanError(
            "dropped choices of experts are not counted under this plan",
            given=f"capacity={plan.capacity} compile=true recompute=selective",
            expected="choices that are counted outside of compiled blocks",
            hint="recompute=full, no compile or no capacity",
        )
    others = [each.name for each in found if each.name not in expert_layers(model)]
    if others and plan.capacity != "none":
        raise ModelError(
            "capacity does not work with these experts",
            given=f"{others[0]} ({type(model.get_submodule(others[0])).__name__}), capacity={plan.capacity}",
            expected="one module with use_experts_implementation, whose choices are counted",
            hint="no capacity",
        )
    return found


def _parts(experts: Sequence[Experts]) -> dict[str, ExpertDim]:
    return {name: part for each in experts for name, part in each.parameters.items()}


def _with_method(
    plan: Plan, given: Arguments, host_size: int | None, device: torch.device | None
) -> tuple[Plan, MethodChoice, list[tuple[int, int]]]:
    """The plan with its way of context parallelism, and why; (heads, kv heads) of each attention. Raises
    ModelError if tokens meet outside of attention, or in a loss."""
    task = task_of(given.model)
    if given.loss is None and task not in _OF_TOKENS:
        raise ModelError(
            "the loss of this model's task is no sum over tokens",
            given=f"{type(given.model).__name__}: {task.value if task else 'no known task'}, cp={plan.cp}",
            expected=" or ".join(known.value for known in _OF_TOKENS),
            hint="loss=, a sum over tokens, or a plan without cp",
        )
    trace = check_tokens_apart(given.model, given.example)
    if given.loss is not None:
        check_sums_tokens(given.loss, trace, {*map(storage_key, given.model.parameters())}, device)
    own = [heads for each in trace.attentions for heads in _heads_of_columns(each, plan)]
    recomputed = recomputed_share(plan.recompute)
    choice = MethodChoice.of(plan.cp_method, own, plan.cp, plan.cp_on_host(host_size), recomputed)
    heads = [(each.heads, each.kv_heads) for each in trace.attentions]
    return replace(plan, cp_method=choice.method), choice, heads


# Tasks whose losses are sums over the tokens of a row.
_OF_TOKENS = (Task.CAUSAL_LM, Task.ALIGNED_LM, Task.TOKEN_CLASSIFICATION)


def _heads_of_columns(attention: TracedAttention, plan: Plan) -> list[tuple[int, int, int]]:
    """(heads, kv heads, width of a key and a value) of an attention on each column of `tp`."""
    width = sum(attention.head_sizes)
    return [(*heads, width) for heads in heads_of_columns(attention.heads, attention.kv_heads, plan.cols)]


def _check_device(plan: Plan, device: torch.device | None) -> None:
    """Raise PlanError for what is impossible or useless on this device."""
    if device is None:
        return
    if plan.algorithm != "auto" and device.type != "cpu":
        raise PlanError(
            "named all-reduce algorithms need CPU ranks",
            given=f"algorithm={plan.algorithm} on {device}",
            expected="algorithm=auto: NCCL selects its own",
            hint="no algorithm; NCCL_ALGO=Ring or NCCL_ALGO=Tree in the environment",
        )
    if plan.tf32 and device.type == "cpu":
        raise PlanError(
            "tf32 needs GPUs",
            given=f"{plan} on {device}",
            expected="float32 products in full precision on CPUs",
            hint="no tf32",
        )
    if plan.precision == "fp16" and (device.type == "cpu" or torch.cuda.is_available()):
        _check_fp16(device)
    check_device(plan, device)


def _check_fp16(device: torch.device) -> None:
    """Raise PlanError if the device cannot train in fp16."""
    try:
        x = torch.ones(2, 1, 8, 8, dtype=torch.float16, device=device, requires_grad=True)
        nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True).sum().backward()
    except RuntimeError as error:
        raise PlanError(
            "this device cannot train in fp16",
            given=f"precision=fp16 on {device}: {str(error).splitlines()[0]}",
            expected="products and attention in float16, forward and backward",
            hint="precision=bf16",
        ) from error


def _check_weights(given: Arguments) -> None:
    """Raise ModelError for files of weights next to a model that has some."""
    if given.weights is not None and not all(parameter.is_meta for parameter in given.model.parameters()):
        raise ModelError(
            "the model already has weights",
            given=f"weights={given.weights}",
            expected="a model on the meta device",
            hint="with torch.device('meta') around the construction, or no weights",
        )


def _check_dtypes(model: nn.Module) -> None:
    """Raise ModelError for complex parameters that are trained: units are real."""
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise ModelError(
                "a complex parameter cannot be trained",
                given=f"{name}, {str(parameter.dtype).removeprefix('torch.')}",
                expected="real parameters; frozen ones may be complex",
                hint="nn.Parameter(torch.view_as_real(values)), and torch.view_as_complex of it in forward",
            )


def _find_blocks(
    model: nn.Module, plan: Plan, given: Blocks | None, batch: Mapping[str, Tensor] | None
) -> list[tuple[str, nn.Module]]:
    """The model's blocks. Raises PlanError if there are none and the plan has a per-block option."""
    blocks = blocks_of(model, given, batch, one_list=plan.sp or plan.rows > 1)
    options = {
        f"recompute={plan.recompute}": plan.recompute != "none",
        "compile=true": plan.compile is True,
        f"precision={plan.precision}": plan.is_float8,
        f"base={plan.base}": plan.base != "none",
    }
    for option, is_used in options.items():
        if is_used and not blocks:
            raise PlanError(
                f"{option} needs repeated blocks",
                given=f"the model has none: {type(model).__name__}",
                expected="an nn.ModuleList or nn.Sequential of blocks",
                hint="precision=bf16" if option.startswith("precision") else f"no {option.partition('=')[0]}",
            )
    return blocks


def _schedule(plan: Plan) -> Schedule:
    """The plan's schedule, validated. Raises ScheduleError."""
    schedule = load_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks)
    check(schedule)
    if not schedule.trains:
        raise ScheduleError(
            "the schedule has no backwards",
            given=f"schedule={plan.schedule}",
            expected="a backward of each forward",
            hint="schedule=1f1b",
        )
    if schedule.split and plan.compile is True:  # from a file, which the plan has not read
        raise compile_conflict(f"schedule={plan.schedule}")
    return schedule


def _stages(
    model: nn.Module,
    plan: Plan,
    blocks: list[tuple[str, nn.Module]],
    schedule: Schedule,
    batch: Mapping[str, Tensor] | None,
    loss: Loss | None,
) -> StageAssignment:
    if schedule.num_stages == 1 and plan.blocks_per_stage is None:
        tensors = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
        return single_stage((name for name, _ in tensors), len(blocks))
    ranks = [schedule.rank_of[stage] for stage in range(schedule.num_stages)]
    given = plan.blocks_per_stage
    return plan_stages(model, blocks, schedule.num_stages, given=given, ranks=ranks, batch=batch, loss=loss)


def _tensor_plan(
    model: nn.Module,
    plan: Plan,
    blocks: list[tuple[str, nn.Module]],
    given: Mapping[str, str] | None,
    batch: Mapping[str, Tensor] | None,
) -> TPPlan:
    """How layers are sharded. On a 1x1 grid any model will do, but a given tensor_plan is still checked."""
    if plan.rows == plan.cols == 1 and given is None:
        return TPPlan(1, 1)
    tensor = build_tp_plan(
        model, plan.rows, plan.cols, sequence=plan.sp, blocks=blocks, given=given, batch=batch
    )
    experts = experts_of(model, plan.ep) if plan.ep > 1 else ()
    return divide_over_columns(tensor, model, experts, plan.ep)


def _groups(given: Iterable[Any] | None) -> list[Mapping[str, Any]] | None:
    """Parameter groups as dicts: plain parameters become one group without options."""
    groups = None if given is None else list(given)
    if groups is None or all(isinstance(entry, Mapping) for entry in groups):
        return groups
    if any(isinstance(entry, Mapping) for entry in groups):
        raise ConfigError(
            "param_groups mixes parameters and dicts",
            given=", ".join(sorted({type(entry).__name__ for entry in groups})),
            expected="parameters, or dicts",
            hint="model.parameters(), or [{'params': some}, {'params': others, 'weight_decay': 0.0}]",
        )
    return [{"params": groups}]


def _group_of(model: nn.Module, groups: Sequence[Mapping[str, Any]] | None) -> dict[str, int] | None:
    """The index of each trainable parameter's group. Raises ConfigError unless each is in exactly one."""
    if groups is None:
        return None
    group_index: dict[int, int] = {}
    for index, group in enumerate(groups):
        params = group.get("params", ())
        if not isinstance(params, Iterable):
            raise ConfigError(
                "a group's params are not parameters",
                given=f"params={shown(params)}",
                expected="a parameter, or several",
                hint="{'params': model.parameters()}",
            )
        for entry in [params] if isinstance(params, Tensor) else params:
            parameter = entry[1] if isinstance(entry, tuple) else entry  # torch takes (name, parameter) too
            if group_index.setdefault(id(parameter), index) != index:
                raise ConfigError(
                    "a parameter is in two param_groups",
                    given=f"{group_index[id(parameter)]}, {index}",
                    expected="each parameter in one group",
                    hint=f"leave it out of group {index}",
                )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unknown = group_index.keys() - {id(p) for p in model.parameters()}
    missing = [name for name, p in named.items() if id(p) not in group_index]
    if unknown or missing:
        raise ConfigError(
            "param_groups do not match the model's trainable parameters",
            given=f"no group contains {missing[0]}"
            if missing
            else f"{len(unknown)} parameters that are not the model's",
            expected="every parameter that requires a gradient, in one group",
            hint="model.parameters()",
        )
    return {name: group_index[id(p)] for name, p in named.items()}
