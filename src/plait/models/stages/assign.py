"""Which stage of a pipeline gets which blocks, and computes with which other parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.models.stages.dataflow import Dataflow, trace_dataflow
from plait.plan.stages import StageAssignment, balance_blocks

# The loss and its backward pass over the logits a few times in float32. Measured in products, as all costs
# here, that is what this many hidden units more would cost the head.
_LOSS_AS_HIDDEN_UNITS = 16


def plan_stages(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    num_stages: int,
    *,
    given: tuple[int, ...] | None = None,
    ranks: Sequence[int] | None = None,
) -> StageAssignment:
    """Deals the blocks of a whole model, on meta or not, to stages of like cost; `given`: how many to each.
    `ranks`: of each stage, so that ranks with several are alike.

    Changes nothing. What parameters outside of blocks are used for is seen on a run on meta, see
    models/flow.py; where none is possible, what is registered before the first block is the first stage's,
    what comes after it the last one's. Raises ModelError without blocks, or where they cannot be parted,
    PlanError if they cannot fill the stages or `given` does not add up.
    """
    _check(model, len(blocks), num_stages, given)
    flow = trace_dataflow(model, blocks)
    uses = _Usage.of(model, blocks, flow)
    numbers = given or _balance(model, blocks, uses, num_stages, ranks)
    stops = [sum(numbers[: stage + 1]) for stage in range(num_stages)]
    ranges = tuple((stop - number, stop) for stop, number in zip(stops, numbers, strict=True))
    stage_of = [stage for stage, number in enumerate(numbers) for _ in range(number)]
    stage_of.append(num_stages - 1)  # of the last gap
    _check_skips(flow, ranges, len(blocks))
    stages = {name: sorted({stage_of[gap] for gap in gaps}) for name, gaps in uses.parameters.items()}
    homes = {name: found[0] for name, found in stages.items()}
    homes |= _buffer_homes(model, blocks, uses, stage_of)
    return StageAssignment(
        ranges, homes, {name: tuple(found) for name, found in stages.items() if len(found) > 1}
    )


def _buffer_homes(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], uses: "_Usage", stage_of: Sequence[int]
) -> dict[str, int]:
    """Under each of its names: of a block's the block's stage."""
    places, first_names, homes = _block_indices(model, blocks), dict[int, str](), dict[str, int]()
    for name, buffer in model.named_buffers(remove_duplicate=False):
        first = first_names.setdefault(id(buffer), name)
        place = places[name.rpartition(".")[0]]
        gap = place if 0 <= place < len(blocks) else min(uses.buffers[first])
        homes[name] = stage_of[gap]
    return homes


def _check(model: nn.Module, num_blocks: int, num_stages: int, given: tuple[int, ...] | None) -> None:
    if not num_blocks:
        raise ModelError(
            "the model has no repeated blocks to cut it between",
            given=f"{type(model).__name__} without an nn.ModuleList, nn.Sequential or plait.Chain",
            expected="blocks that are called one after the other",
            hint="blocks=BlockClass, or blocks=[module, ...] in forward order",
        )
    if given is not None and (len(given) != num_stages or sum(given) != num_blocks or min(given) < 1):
        listed = ",".join(map(str, given))
        raise PlanError(
            "the blocks of the stages do not add up to the model's",
            given=f"stages={listed}: {len(given)} stages with {sum(given)} blocks",
            expected=f"{num_stages} numbers of at least 1 with the sum {num_blocks}",
            hint=_even_hint(num_blocks, num_stages) if num_stages <= num_blocks else None,
        )
    if num_stages > num_blocks:
        fitting = [n for n in range(2, num_blocks + 1) if num_blocks % n == 0]
        raise PlanError(
            f"{num_blocks} blocks cannot fill {num_stages} stages",
            given=f"blocks={num_blocks} stages={num_stages}",
            expected="at least one block on every stage",
            hint=f"{' or '.join(map(str, fitting))} stages" if fitting else "no pipeline",
        )


def _even_hint(num_blocks: int, num_stages: int) -> str:
    return f"stages={','.join(map(str, balance_blocks([1.0] * num_blocks, num_stages)))}"


def _check_skips(flow: Dataflow, ranges: Sequence[tuple[int, int]], num_blocks: int) -> None:
    """Raises ModelError where a block needs of an earlier stage more than what its last block returned."""
    for earlier, later in sorted(flow.skips):
        reader = f"block {later}" if later < num_blocks else "the model's result"
        if any(earlier < start <= later for start, _ in ranges):
            raise ModelError(
                f"{reader} takes what block {earlier} computed, past the blocks between them",
                given="stages of blocks " + ", ".join(f"{start} to {stop - 1}" for start, stop in ranges),
                expected="between stages goes what a stage's last block returned, and nothing else",
                hint=f"blocks {earlier} to {min(later, num_blocks - 1)} on one stage, by stages=...; or "
                "blocks that return what later ones need",
            )


@dataclass(frozen=True)
class _Usage:
    """In which gaps (a block counts to the one before it) parameters and buffers are used, by first names."""

    parameters: Mapping[str, set[int]]
    buffers: Mapping[str, set[int]]
    tables: frozenset[str]  # parameters of embeddings alone, or looked up before they are multiplied with

    @classmethod
    def of(cls, model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], flow: Dataflow) -> "_Usage":
        places = _block_indices(model, blocks)
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        return cls(
            _gaps_by_tensor(model.named_parameters(remove_duplicate=False), places, len(blocks), flow),
            _gaps_by_tensor(model.named_buffers(remove_duplicate=False), places, len(blocks), flow),
            frozenset(name for name, p in model.named_parameters() if id(p) in embeddings),
        )


def _block_indices(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[str, int]:
    """Of each module, by name: the number of its block; before the first registered one -1, after it L."""
    places: dict[str, int] = {}
    outside = -1
    for name, _ in model.named_modules(remove_duplicate=False):
        inside = next((i for i, (b, _) in enumerate(blocks) if f"{name}.".startswith(f"{b}.")), None)
        if inside is not None:
            outside = len(blocks)
        places[name] = outside if inside is None else inside
    return places


def _gaps_by_tensor(
    occurrences: Iterable[tuple[str, Tensor]], places: Mapping[str, int], num_blocks: int, flow: Dataflow
) -> dict[str, set[int]]:
    """Where each tensor is used: in its blocks, and where it flows to; by its place if that is not known."""
    first_names: dict[int, str] = {}
    found: dict[str, set[int]] = {}
    outside: dict[str, set[int]] = {}
    for full, tensor in occurrences:
        name = first_names.setdefault(id(tensor), full)
        gaps = found.setdefault(name, flow.gaps_of(name))
        place = places[full.rpartition(".")[0]]
        if 0 <= place < num_blocks:
            gaps.add(place)
        else:
            outside.setdefault(name, set()).add(max(0, place))
    for name, gaps in found.items():
        if not gaps or not flow.is_complete:
            gaps |= outside.get(name, set())
    return found


def _balance(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    uses: _Usage,
    num_stages: int,
    ranks: Sequence[int] | None,
) -> tuple[int, ...]:
    """By the parameters that each token is multiplied with."""
    share = _active_expert_fraction(getattr(model, "config", None))
    costs = [0.0] * (len(blocks) + 1)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        gaps = uses.parameters[name]
        if name in uses.tables:
            gaps = gaps & {len(blocks)}  # what is looked up costs nothing; a tied head does
        for gap in gaps:
            costs[gap] += parameter.numel() * (share if ".experts." in name else 1.0)
    return balance_blocks(costs[:-1], num_stages, last=costs[-1] + _cost_of_loss(model), ranks=ranks)


def _cost_of_loss(model: nn.Module) -> float:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    return float(_LOSS_AS_HIDDEN_UNITS * vocabulary) if isinstance(vocabulary, int) else 0.0


def _active_expert_fraction(config: Any) -> float:
    """Of a block's experts, the share that a token meets, where the configuration says it."""
    used = _config_int(config, ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"))
    held = _config_int(config, ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"))
    return min(1.0, used / held) if used and held else 1.0


def _config_int(config: Any, names: Sequence[str]) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
