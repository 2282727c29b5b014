"""Assign a model's blocks and other parameters to pipeline stages, and check batches against it."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.models.blocks import config_int
from plait.models.stages.dataflow import Dataflow, trace_dataflow
from plait.models.task import label_keys
from plait.plan.stages import LOSS_AS_HIDDEN_UNITS, StageAssignment, balance_blocks, stage_of_gap


def plan_stages(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    num_stages: int,
    *,
    given: tuple[int, ...] | None = None,
    ranks: Sequence[int] | None = None,
    batch: Mapping[str, Tensor] | None = None,
    loss: Callable[[Any, Mapping[str, Tensor]], Any] | None = None,
) -> StageAssignment:
    """Assign the blocks of a full model, on meta or not, to stages of similar cost.

    `given`: the number of blocks of each stage. `ranks`: the rank of each stage, to balance ranks that have
    several. The model is not changed. The use of parameters outside of blocks is traced in a run on meta, see
    models/stages/dataflow.py, of an example `batch` and the user's `loss`. If the inputs are not known yet,
    those registered before the first block belong to the first stage, those after it to the last one, which
    `DataflowCheck` verifies. The first and the last stage may have no blocks if that is `given`; or if it
    makes the slowest rank faster, or there are more stages than blocks, and the model can be split so. Raises
    ModelError without blocks, or where the model cannot be split, PlanError if the blocks cannot fill the
    stages or `given` does not add up.
    """
    _check(model, len(blocks), num_stages, given)
    flow = trace_dataflow(model, blocks, batch, loss)
    if flow.error is not None and batch is not None:
        raise untraceable(flow.error, is_models=flow.is_models)
    if flow.error is None and flow.calls != [*range(len(blocks))]:
        called = ", ".join(blocks[number][0] for number in flow.calls) or "none of them"
        raise out_of_order(f"a run on meta called {called[:200]}")
    indices = _block_indices(model, blocks)
    gaps_of = _gaps_by_tensor(model.named_parameters(remove_duplicate=False), indices, len(blocks), flow)
    if given is not None:
        return _assigned(model, flow, indices, gaps_of, given)
    balance = partial(_balance, model, len(blocks), gaps_of, num_stages, ranks)
    if num_stages > len(blocks):
        return _assigned(model, flow, indices, gaps_of, balance(bare_ends=True))
    knows_reads = flow.error is None and not flow.changing  # the result may read what the last block has set
    if knows_reads and not all(counts := balance(bare_ends=True)):
        with suppress(ModelError, PlanError):
            return _assigned(model, flow, indices, gaps_of, counts)
    return _assigned(model, flow, indices, gaps_of, balance(bare_ends=False))


def _assigned(
    model: nn.Module,
    flow: Dataflow,
    indices: Mapping[str, int],
    gaps_of: Mapping[str, set[int]],
    counts: Sequence[int],
) -> StageAssignment:
    """The stages with so many blocks each. `gaps_of`: of parameters."""
    num_blocks = sum(counts)
    stops = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    ranges = tuple((stop - count, stop) for stop, count in zip(stops, counts, strict=True))
    check_flow(flow, ranges)
    stages = {name: sorted({stage_of_gap(ranges, gap) for gap in gaps}) for name, gaps in gaps_of.items()}
    _check_registered(model, indices, ranges, stages)
    _check_bare_ends(counts, {user for users in stages.values() for user in users})
    homes = {name: users[0] for name, users in stages.items()}
    gaps_of = _gaps_by_tensor(model.named_buffers(remove_duplicate=False), indices, num_blocks, flow)
    first_names: dict[int, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):  # under each of its names
        first = first_names.setdefault(id(buffer), name)
        index = indices[name.rpartition(".")[0]]  # a block's buffers belong to its stage
        gap = index if 0 <= index < num_blocks else min(gaps_of[first])
        homes[name] = stage_of_gap(ranges, gap)
    shared = {name: tuple(users) for name, users in stages.items() if len(users) > 1}
    # A loss may refer to the engine, which exists in the first step: it is traced again then.
    is_traced = flow.error is None and flow.loss_error is None
    return StageAssignment(
        ranges, homes, shared, frozenset(flow.changing), frozenset(flow.skip_reads), is_traced=is_traced
    )


def _check(model: nn.Module, num_blocks: int, num_stages: int, given: tuple[int, ...] | None) -> None:
    if not num_blocks:
        raise ModelError(
            "the model has no repeated blocks to split it between",
            given=f"{type(model).__name__} without an nn.ModuleList, nn.Sequential or plait.Chain",
            expected="blocks that are called in sequence",
            hint="blocks=BlockClass, or blocks=[module, ...] in forward order",
        )
    most = num_blocks + 2
    inner = () if given is None else given[1:-1]
    if given is not None and (
        len(given) != num_stages or sum(given) != num_blocks or min(given) < 0 or min(inner, default=1) < 1
    ):
        listed = ",".join(map(str, given))
        even = balance_blocks([1.0] * num_blocks, num_stages, bare_ends=True) if num_stages <= most else ()
        raise PlanError(
            "the stages' blocks do not add up to the model's",
            given=f"stages={listed}: {len(given)} stages with {sum(given)} blocks",
            expected=f"{num_stages} numbers with the sum {num_blocks}, of at least 1; the first and the last "
            "may be 0",
            hint=f"stages={','.join(map(str, even))}" if even else f"pp={num_blocks}",
        )
    if num_stages > most:
        fitting = [n for n in range(2, num_blocks + 1) if num_blocks % n == 0]
        raise PlanError(
            f"{num_blocks} blocks cannot fill {num_stages} stages",
            given=f"blocks={num_blocks} stages={num_stages}",
            expected="at least one block on every stage but the first and the last",
            hint=f"{' or '.join(map(str, fitting))} stages" if fitting else "no pipeline",
        )


def _check_bare_ends(counts: Sequence[int], used: Set[int]) -> None:
    """Raise PlanError for an end without blocks and parameters. `used`: stages that have parameters."""
    for stage, part in ((0, "before its first block"), (len(counts) - 1, "after its last block")):
        if not counts[stage] and stage not in used:
            raise PlanError(
                f"stage {stage} would have nothing to compute",
                given=f"stages={','.join(map(str, counts))}, and a model without parameters {part}",
                expected="a stage with blocks, or with an embedding or a head",
                hint=f"at least one block on stage {stage}",
            )


def check_flow(flow: Dataflow, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise ModelError if a block needs the graph of a block of an earlier stage, or what it has computed but
    not returned; or if the forward changes a parameter, which other stages have too or alone."""
    if flow.written:
        raise ModelError(
            "the model's forward changes a parameter outside of the blocks",
            given=", ".join(sorted(flow.written)[:2]),
            expected="weights that only the engine changes: its master weights would overwrite other changes",
            hint="a buffer; or a function of the parameter, such as weight.clamp(min=0)",
        )
    num_blocks = len(flow.read_by_gap) - 1
    texts = [f"{start} to {stop - 1}" if start < stop else "none" for start, stop in ranges]
    stages = "stages of blocks " + ", ".join(texts)
    for earlier, later in sorted(flow.gradients):
        if any(earlier < start <= later for start, _ in ranges[1:]):
            passed = f"{max(0, earlier)} to {min(later, num_blocks - 1)}"
            raise ModelError(
                "torch.autograd.grad in the forward or the loss passes through blocks of several stages",
                given=f"a gradient through blocks {passed}; {stages}",
                expected="gradients through blocks of one stage: its graph ends at what it receives",
                hint="no pipeline",
            )
    for earlier, later in sorted(flow.hidden_reads):
        if any(earlier < start <= later for start, _ in ranges):
            raise bypassing(
                (earlier, later),
                num_blocks,
                given=stages,
                expected="stages that receive only what blocks of earlier stages return",
                hint="no pipeline, or blocks that return what later ones need"
                if earlier == 0 and later >= num_blocks - 1
                else f"blocks {earlier} to {min(later, num_blocks - 1)} on one stage, by stages=...; or "
                "blocks that return what later ones need",
            )


def bypassing(skip: tuple[int, int], num_blocks: int, **parts: str) -> ModelError:
    """The error of a block's result that later blocks use, and their stage does not receive."""
    earlier, later = skip
    reader = f"block {later}" if later < num_blocks else "the model's result"
    fact = f"{reader} uses a result of block {earlier}, bypassing the blocks between them"
    return ModelError(fact, **parts)


def untraceable(error: Exception, *, is_models: bool = False) -> ModelError:
    """The error of a model whose flow of values between blocks is unknown. `is_models`: on the CPU too."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if is_models:
        return ModelError(
            "the model's own forward fails, so its values cannot be traced between stages",
            given=f"{text}, on the CPU with zeros for weights",
            expected="a model that runs with this batch in one process",
            hint="model(**batch) in plain torch; if that runs: no pipeline, or a plait.Chain of modules",
        )
    return ModelError(
        "cannot trace which values the stages need from each other",
        given=f"the model or the loss cannot run on meta tensors: {text}",
        expected="code that does not read values of tensors, as .numpy() and .tolist() do",
        hint="no pipeline, or a plait.Chain of modules",
    )


def out_of_order(given: str) -> ModelError:
    """The error of a model that calls its blocks in another way than stages do."""
    return ModelError(
        "the model does not call each of its blocks once, in order",
        given=given,
        expected="a forward that calls all blocks, in the order in which they are assigned to stages",
        hint="no layerdrop; use_reentrant=False if the model checkpoints its blocks; blocks=[module, ...] in "
        "forward order; or no pipeline",
    )


def _block_indices(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[str, int]:
    """The index of each module's block, by name: -1 before the first registered block, L after it."""
    indices: dict[str, int] = {}
    outside = -1
    for name, _ in model.named_modules(remove_duplicate=False):
        inside = next((i for i, (b, _) in enumerate(blocks) if f"{name}.".startswith(f"{b}.")), None)
        if inside is not None:
            outside = len(blocks)
        indices[name] = outside if inside is None else inside
    return indices


def _gaps_by_tensor(
    occurrences: Iterable[tuple[str, Tensor]], indices: Mapping[str, int], num_blocks: int, flow: Dataflow
) -> dict[str, set[int]]:
    """The gaps in which each tensor is used: its blocks, and those it flows to; by position if unknown."""
    first_names: dict[int, str] = {}
    gaps_of: dict[str, set[int]] = {}
    outside: dict[str, set[int]] = {}
    for full, tensor in occurrences:
        name = first_names.setdefault(id(tensor), full)
        gaps = gaps_of.setdefault(name, flow.gaps_of(name))
        index = indices[full.rpartition(".")[0]]
        if 0 <= index < num_blocks:
            gaps.add(index)
        else:
            outside.setdefault(name, set()).add(index)
    for name, gaps in gaps_of.items():
        if not gaps or flow.error is not None:
            gaps |= outside.get(name, set())
    return gaps_of


def _check_registered(
    model: nn.Module,
    indices: Mapping[str, int],
    ranges: Sequence[tuple[int, int]],
    stages: Mapping[str, Sequence[int]],
) -> None:
    """Raise ModelError for a parameter that a stage reads, but that is registered in others' blocks only."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, set[int]] = {}
    for full, parameter in model.named_parameters(remove_duplicate=False):
        index = indices[full.rpartition(".")[0]]
        is_in_block = 0 <= index < ranges[-1][1]
        own = {stage_of_gap(ranges, index)} if is_in_block else range(len(ranges))
        owners.setdefault(names[id(parameter)], set()).update(own)
    for name, users in stages.items():
        for stage in sorted({*users} - owners[name]):
            raise ModelError(
                "a block's parameter is read outside of the block, on another stage",
                given=f"{name} of stage {min(owners[name])}, on stage {stage}",
                expected="parameters that the model also registers where it reads them",
                hint=f"self.shared = the parameter {name}, read as self.shared; or no pipeline",
            )


def _balance(
    model: nn.Module,
    num_blocks: int,
    gaps_of: Mapping[str, set[int]],
    num_stages: int,
    ranks: Sequence[int] | None,
    *,
    bare_ends: bool,
) -> tuple[int, ...]:
    """Balance the blocks by the number of parameters that each token is multiplied with."""
    config = getattr(model, "config", None)
    used = config_int(config, "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
    total = config_int(config, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    fraction = min(1.0, used / total) if used and total else 1.0  # of a block's experts, for a token
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # tied to a head or not
    costs = [0.0] * (num_blocks + 2)  # before the blocks, of each, and after them
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        gaps = gaps_of[name]
        if id(parameter) in tables:
            gaps = gaps & {num_blocks}  # a lookup costs nothing; a tied head does
        for gap in gaps - ({-1} if 0 in gaps else set()):
            costs[gap + 1] += parameter.numel() * (fraction if ".experts." in name else 1.0)
    loss = LOSS_AS_HIDDEN_UNITS * config_int(config, "vocab_size")
    ends = {"first": costs[0], "last": costs[-1] + loss}
    return balance_blocks(costs[1:-1], num_stages, **ends, ranks=ranks, bare_ends=bare_ends)


# --- batches that the stages are given

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class DataflowCheck:
    """Traces each new kind of batch through a copy of the model on meta, before the stages run it.

    A model may compute differently with other inputs: build a mask, or return a loss of its experts. Ranks of
    a pipeline have the same batches, so all of them raise, or none.
    """

    def __init__(
        self,
        meta_model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        assignment: StageAssignment,
        batch: Mapping[str, Tensor] | None,
    ) -> None:
        """`batch`: the example that the assignment was traced with; None: token ids."""
        self.meta_model = meta_model
        self._blocks = [(name, self.meta_model.get_submodule(name)) for name, _ in blocks]
        self._assignment = assignment
        inputs = ("input_ids",) if batch is None else self._inputs(batch)
        self._checked: set[Hashable] = {frozenset(inputs)} if assignment.is_traced else set()
        self._has_hooks = any(_remove_hooks(module) for module in self.meta_model.modules())

    def check(self, batch: Mapping[str, Tensor], loss: Callable[..., Any] | None) -> None:
        """Raise ModelError if the stages would not compute the same as the model for this kind of batch."""
        inputs = frozenset(self._inputs(batch))
        if inputs in self._checked:
            return
        if self._has_hooks and not self._assignment.is_traced:
            raise ModelError(
                "cannot trace the values that the hooks of the model's modules collect",
                given=f"forward hooks, and inputs {', '.join(sorted(inputs))}",
                expected="an example of a batch before the model is split",
                hint="parallelize(..., example_batch=batch), or remove the hooks",
            )
        flow = trace_dataflow(self.meta_model, self._blocks, batch, loss)
        if (error := flow.error or flow.loss_error) is not None:
            raise untraceable(error, is_models=flow.is_models)
        check_flow(flow, self._assignment.blocks)
        self._check_carried(flow)
        self._check_parameters(flow)
        unexpected = {key for key in flow.changing - self._assignment.changing if not key.startswith("_")}
        if unexpected:
            raise _changing_error(sorted(unexpected)[0])
        self._checked.add(inputs)

    def _inputs(self, batch: Mapping[str, Tensor]) -> list[str]:
        labels = label_keys(self.meta_model)
        return [key for key in batch if key not in labels]

    def _check_carried(self, flow: Dataflow) -> None:
        for skip in sorted(flow.skip_reads):
            needed = replace(self._assignment, skips=frozenset({skip}))
            for stage in range(needed.num_stages):
                if not {*needed.carried_into(stage)} <= {*self._assignment.carried_into(stage)}:
                    raise bypassing(
                        skip,
                        len(self._blocks),
                        given="stages that were assigned without an example of a batch like this one",
                        expected="an example of a batch, to trace what the stages need from each other",
                        hint="parallelize(..., example_batch=batch)",
                    )

    def _check_parameters(self, flow: Dataflow) -> None:
        for name, _ in self.meta_model.named_parameters():
            for gap in flow.gaps_of(name):
                stage = stage_of_gap(self._assignment.blocks, gap)
                if stage not in self._assignment.stages_with(name):
                    raise ModelError(
                        f"stage {stage} computes with {name}, which was assigned to another stage",
                        given=f"{name} on stage {self._assignment.owner[name]}, where it is registered",
                        expected="an example of a batch, to trace the use of parameters before the split",
                        hint="parallelize(..., example_batch=batch)",
                    )


def _changing_error(name: str) -> ModelError:
    return ModelError(
        "with these inputs a block's forward sets an attribute that other stages may read",
        given=name,
        expected="an example of a batch with all inputs, before the model is split",
        hint="parallelize(..., example_batch=batch)",
    )


def _remove_hooks(module: nn.Module) -> bool:
    """Remove a user's hooks, and return whether there were any."""
    found = False
    for key in _HOOKS:
        hooks = getattr(module, key)
        for number, hook in list(hooks.items()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                del hooks[number]
                found = True
    return found
