"""The plans that are searched: all plans of N devices that the product runs, as its own checks decide.

[Note: searched keys]
Keys that change time or memory, and not the numbers: `pp`, `tp`, `cp`, `dp`, `ep`, `micro`, `sp`,
`recompute`, `schedule`, `chunks`, `zero`, `shard`, `accumulate`, `reshard` and `offload`. All others have
their defaults or pinned values. Ranks are placed in the one order of axes that the product has
(`plan.grid.AXES`): which axis crosses hosts follows from the degrees, and `shard` decides which part of dp
stays within hosts. `ep` is a divisor of the experts, of dp and of `shard`.
A rank of `cp` has at least LEAST_TOKENS of a sequence: with half of it, plans of an 8B model for sequences of
16,384 tokens and more are at most 1 % faster.

A wide space has more chunks, and `recompute=every=2` and `every=4`: about twice the time.

Not searched, but can be pinned: other `recompute=every=k`, `offload=disk`, more than MAX_CHUNKS chunks, and
`gpipe` and `bfs` without zero=3, which take the time of `1f1b` and `interleaved` and keep the activations
of all micro-batches."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, lru_cache
from itertools import islice, product
from operator import attrgetter
from typing import Any

from plait.errors import PlanError, ScheduleError
from plait.plan import Plan
from plait.plan.plan import MAX_NUMBER, canonical_tp, check_choices, check_type, show_value
from plait.plan.quantized import BLOCK
from plait.plan.schedule.action import MAX_ACTIONS, too_large
from plait.plan.schedule.generators import GENERATORS, Generator
from plait.plan.sharding import split_heads, split_width
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape, attention_method
from plait.planner.workload import Workload

MAX_CHUNKS, MAX_WIDE_CHUNKS = 8, 16
WIDE_RECOMPUTE = ("every=2", "every=4")
LEAST_TOKENS = 8192  # of a sequence on each rank of cp
DEFAULT_PRECISION = "bf16"
_MOST_TRIED, _MOST_SHOWN = 2000, 6  # plans, and values, of a hint


class Decided(IntEnum):
    """How much of a plan is decided. The keys of later levels have their defaults."""

    NOTHING = 0
    DEGREES = 1  # pp, tp, cp, dp, ep, micro
    COMPUTATION = 2  # sp, recompute
    SCHEDULE = 3  # schedule, chunks
    SIMULATED = 4  # nothing more: the schedule's time is not bounded any more, but simulated
    STATES = 5  # zero, offload
    ALL = 6  # shard, accumulate, reshard


# Values of the keys that do not depend on the number of devices.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "sp": (False, True),
    "recompute": ("none", "selective", "full"),
    "schedule": tuple(name for name, generator in GENERATORS.items() if generator.trains),
    "zero": (0, 1, 2, 3),
    "offload": ("none", "cpu"),
}
SEARCHED = ("pp", "tp", "cp", "cp_method", "dp", "ep", "micro", "sp", "recompute", "schedule", "chunks")
DECIDED_AT = {
    **dict.fromkeys(("pp", "tp", "cp", "ep"), Decided.DEGREES),
    **dict.fromkeys(("sp", "recompute"), Decided.COMPUTATION),
    "schedule": Decided.SCHEDULE,
    **dict.fromkeys(("zero", "offload"), Decided.STATES),
}
SHARDING = ("zero", "shard", "accumulate", "reshard", "offload", "prefetch")


def read_pins(text: str) -> dict[str, Any]:
    """Read `tp=8 zero=3`: values that all plans of a search have. Raises PlanError for an invalid one."""
    pins = Plan.read_values(text)
    defaults = Plan()
    types = {each.name: each.type for each in defaults.__dataclass_fields__.values()}
    for key, value in pins.items():
        check_type(key, types[key], value)
    check_choices(pins)
    for key in ("zero", "schedule"):
        Plan(**{key: pins.get(key, getattr(defaults, key))})
    if "tp" in pins:
        pins["tp"] = canonical_tp(pins["tp"])
    if pins.get("dp") == 0:  # auto
        del pins["dp"]
    return pins


@dataclass
class Refusals:
    """Plans that the product refuses: how many, and the first, by the fact of the error."""

    first: dict[str, PlanError] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, error: PlanError, *, by: str = "") -> None:
        """Count a refusal; `by`: the rule, if the fact has numbers."""
        rule = by or error.fact
        self.first.setdefault(rule, error)
        self.counts[rule] = self.counts.get(rule, 0) + 1


def with_defaults(*keys: str, **others: Any) -> Callable[[Plan], Plan]:
    """Return a function of plans that sets these keys to their defaults, and `others` to these values. Plans
    that differ in these keys only get the same one."""
    kept = [key for key in Plan.__dataclass_fields__ if key not in keys and key not in others]
    make = lru_cache(maxsize=1 << 14)(
        lambda values: _ANY.changed(**dict(zip(kept, values, strict=True)), **others)
    )
    values_of = attrgetter(*kept)
    return lambda plan: make(values_of(plan))


_ANY = Plan()


@dataclass(frozen=True)
class Space:
    """All plans of `num_devices` for a batch of `batch` sequences. See [Note: searched keys].

    pins     values that all plans have
    only     by key, the values to which the search is restricted
    sequence tokens of each sequence; 0: cp is not searched
    is_wide  with values that take long to search, see the note
    domain   devices on one switched link, of which a tp group uses a divisor or a multiple; 0: any
    """

    model: ModelShape
    num_devices: int
    batch: int
    pins: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Collection[Any]] = field(default_factory=dict)
    sequence: int = 0
    is_wide: bool = False
    domain: int = 0
    refusals: Refusals = field(default_factory=Refusals)
    known: dict[tuple[Plan, Decided], list[Plan]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, model: ModelShape, cluster: Cluster, work: Workload, pins: Mapping[str, Any]) -> "Space":
        """Return the space of a cluster and a workload."""
        counts = cluster.num_devices, work.batch
        return cls(model, *counts, pins, sequence=work.sequence, domain=cluster.domain_size)

    def expand(self, plan: Plan, decided: Decided) -> list[Plan]:
        """Return the plans of the next level. Spaces that differ in `only` share what they generate."""
        if (plan, decided) not in self.known:
            self.known[plan, decided] = list(self._generate(plan, decided))
        children = self.known[plan, decided]
        for key, values in self.only.items():
            if DECIDED_AT[key] == decided + 1:
                children = [child for child in children if getattr(child, key) in values]
        return children

    def _generate(self, plan: Plan, decided: Decided) -> Iterator[Plan]:
        levels: tuple[Callable[[Plan], Iterable[dict[str, Any]]], ...]
        levels = (
            self._degrees,
            self._computations,
            self._schedules,
            lambda _: [{}],
            self._states,
            self._shardings,
        )
        for keys in levels[decided](plan):
            try:
                yield plan.changed(**keys) if keys else plan
            except PlanError as error:
                self.refusals.add(error)

    def plans(self, plan: Plan = _ANY, decided: Decided = Decided.NOTHING) -> Iterator[Plan]:
        """Yield all plans."""
        for child in self.expand(plan, decided):
            level = Decided(decided + 1)
            yield from [child] if level is Decided.ALL else self.plans(child, level)

    def values(self, key: str, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return the pinned value of a key, or else `values`."""
        return (self.pins[key],) if key in self.pins else tuple(values)

    def _degrees(self, _: Plan) -> Iterator[dict[str, Any]]:
        precision = self.pins.get("precision", DEFAULT_PRECISION)
        for keys in self.all_degrees():
            for micro in self._micros(keys["dp"]):
                yield keys | {"micro": micro, "precision": precision}

    def all_degrees(self) -> Iterator[dict[str, Any]]:
        """Yield the values of dp, tp, pp and cp that the model and the devices allow."""
        most = max(1, self.sequence // LEAST_TOKENS)  # ranks of cp
        context = self.values("cp", [cp for cp in divisors(self.num_devices) if cp <= most])
        for pp in self.values("pp", divisors(self.num_devices)):
            if pp > self.model.layers + 2:
                self.refusals.add(_too_many_stages(self.model, pp, 1), by="stages")
                continue
            for tp in self.values("tp", _grids(self.num_devices // pp, self.domain)):
                for cp in context:
                    dp = self._data_ranks(pp, tp, cp)
                    keys = {
                        "dp": dp,
                        "tp": tp,
                        "pp": pp,
                        "cp": cp,
                        "cp_method": self.pins.get("cp_method", "auto"),
                    }
                    of_experts = divisors(math.gcd(self.model.experts, dp)) if self.model.experts else (1,)
                    for ep in self.values("ep", of_experts) if dp else ():
                        yield keys | {"ep": ep}

    def _data_ranks(self, pp: int, tp: str, cp: int) -> int:
        """`dp` for the other degrees; 0 if the model or the devices do not allow them."""
        grid = Plan(tp=tp)
        others = pp * grid.rows * grid.cols * cp
        if cp > 1 and self.num_devices % others and "cp" not in self.pins:
            return 0
        error = grid_error(self.model, grid.rows, grid.cols)
        if error is not None:
            self.refusals.add(error, by=f"tp {error.fact.partition(' into ')[0].partition(' over ')[0]}")
            return 0
        error = adapter_error(self.model, grid, self.pins.get("base", "none"))
        if error is not None:
            self.refusals.add(error, by=error.fact)
            return 0
        error = context_error(self.model, grid.cols, cp, self.pins.get("cp_method", "auto"))
        if error is not None:
            self.refusals.add(error)
            return 0
        dp = self.num_devices // others
        if others * self.pins.get("dp", dp) != self.num_devices:
            given = f"pp={pp} tp={tp}" + f" cp={cp}" * (cp > 1)
            given += f" dp={self.pins['dp']}" if "dp" in self.pins else ""
            self.refusals.add(_not_a_divisor(given, self.num_devices), by="devices")
            return 0
        return dp

    def _micros(self, dp: int) -> Iterator[int]:
        for micro in self.values("micro", divisors(self.batch // dp) if self.batch >= dp else (1,)):
            if self.batch % (dp * micro) == 0:
                yield micro
                continue
            try:
                Plan(dp=dp, micro=micro).check_batch(self.batch)
            except PlanError as error:
                self.refusals.add(error)

    def _computations(self, plan: Plan) -> Iterator[dict[str, Any]]:
        shards_sequence = plan.cols > 1 and self.model.shards_tokens
        for sp in self.values("sp", VALUES["sp"] if shards_sequence else (False,)):
            policies = (*VALUES["recompute"], *(WIDE_RECOMPUTE if self.is_wide else ()))
            for recompute in self.values("recompute", policies):
                yield {"sp": sp, "recompute": recompute}

    def _schedules(self, plan: Plan) -> Iterator[dict[str, Any]]:
        """Schedules and their chunks; one stage has a single schedule. Keys that are not searched get
        their pinned values here, as some are checked against the schedule."""
        others = {key: self.pins[key] for key in self.pins if key not in (*SEARCHED, *SHARDING)}
        for name in self.values("schedule", VALUES["schedule"] if plan.pp > 1 else ("1f1b",)):
            generator = GENERATORS.get(name)  # None: a file
            choices = (0,) if generator is None else self._chunks(generator, plan.pp)
            choices = self.values("chunks", choices)
            for chunks in choices:
                error = _schedule_error(self.model, plan, name, chunks)
                if error is None:
                    yield {"schedule": name, "chunks": chunks, **others}
                else:
                    self.refusals.add(error, by=error.fact if isinstance(error, ScheduleError) else "stages")

    def _chunks(self, generator: Generator, pp: int) -> tuple[int, ...]:
        """Stages per rank, 0 for the default. With several, `1f1b` and `gpipe` are `interleaved` and
        `bfs`."""
        if generator.chunks == 1 or not generator.varies:
            return (0,)
        most = MAX_WIDE_CHUNKS if self.is_wide else MAX_CHUNKS
        return (0, *range(3, min(most, (self.model.layers + 2) // pp) + 1))

    def _states(self, plan: Plan) -> Iterator[dict[str, Any]]:
        all_forwards_first = plan.schedule in ("gpipe", "bfs") and "schedule" not in self.pins
        for zero in self.values("zero", VALUES["zero"] if plan.token_ranks > 1 else (0,)):
            if zero == 3 or not all_forwards_first:
                yield from (
                    {"zero": zero, "offload": value} for value in self.values("offload", VALUES["offload"])
                )

    def _shardings(self, plan: Plan) -> Iterator[dict[str, Any]]:
        prefetch = {"prefetch": self.pins["prefetch"]} if "prefetch" in self.pins else {}
        keys = {
            "shard": self.values("shard", _shards(plan.dp, plan.ep) if plan.zero else (0,)),
            "accumulate": self.values(
                "accumulate", ("auto", "unsharded") if plan.zero >= 2 and plan.micro > 1 else ("auto",)
            ),
            "reshard": self.values("reshard", ("use", "step") if plan.zero == 3 else ("use",)),
        }
        for values in product(*keys.values()):
            yield dict(zip(keys, values, strict=True)) | prefetch


def _schedule_error(model: ModelShape, plan: Plan, name: str, chunks: int) -> PlanError | None:
    """The reason why a schedule cannot be generated, or has more stages than layers."""
    generator = GENERATORS.get(name)
    if generator is None:
        return None
    num, pp, micro = chunks or generator.chunks, plan.pp, plan.micro
    if pp * num > model.layers + 2:
        return _too_many_stages(model, pp, num)
    generated = max(micro, 2 * pp - 1) if num == 2 and not generator.varies else micro
    if pp * num * max(generated, micro * (3 if generator.splits else 2)) > MAX_ACTIONS:
        return too_large(name, f"{pp} ranks, {micro} micro-batches, chunks={num}")
    return None


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


@cache
def _grids(num_ranks: int, domain: int) -> tuple[str, ...]:
    """All values of `tp` whose ranks divide `num_ranks`, with as many in each domain: in others, groups would
    have different numbers of ranks on each side of a link."""
    sizes = [size for size in divisors(num_ranks) if not (domain % size and size % domain)]
    return tuple(canonical_tp((rows, size // rows)) for size in sizes for rows in divisors(size))


@cache
def _shards(dp: int, ep: int) -> tuple[int, ...]:
    """Values of `shard`: 0 for all of dp, then the proper divisors that ep divides."""
    return (0, *(d for d in divisors(dp) if 1 < d < dp and d % ep == 0))


@cache
def grid_error(model: ModelShape, rows: int, cols: int) -> PlanError | None:
    """The reason why the model cannot be sharded over a tp grid, or None."""
    if rows > 1 and model.experts:
        return PlanError(
            "a mixture of experts needs a tp grid of one row",
            given=f"tp={rows}x{cols}",
            expected="tp=C, with C columns",
            hint=f"tp={cols}",
        )
    try:
        split_heads(model.heads, model.kv_heads, cols, rows=rows, of=model.name)
        split_width(model.hidden, rows, of="the hidden dim")
        split_width(model.ffn, cols, of="the ffn width")
        split_width(model.vocab, cols, of="the vocabulary")
    except PlanError as error:
        return error
    return None


@cache
def experts_error(model: ModelShape, ep: int) -> PlanError | None:
    """The reason why the experts cannot be divided over ep, or None."""
    if ep == 1 or (model.experts and model.experts % ep == 0):
        return None
    shared = math.gcd(model.experts, ep) if model.experts else 1
    return PlanError(
        "the experts do not divide over ep" if model.experts else "the model has no experts that ep divides",
        given=f"ep={ep} experts={model.experts}",
        expected="a divisor of the number of experts" if model.experts else "a mixture of experts",
        hint=" or ".join([*(f"ep={d}" for d in divisors(shared) if d > 1), "no ep"]),
    )


@cache
def adapter_error(model: ModelShape, grid: Plan, base: str) -> PlanError | None:
    """The reason why adapters, or a quantized base below them, cannot be sharded over the plan's tp grid, or
    None."""
    rows, cols = grid.rows, grid.cols
    if base != "none" and not model.adapter_rank:
        return PlanError(
            "base is for frozen weights, and all of this model's train",
            given=f"base={base}",
            expected="a model with an adapter",
            hint="--adapter r=16, or no base",
        )
    if model.adapter_rank and rows > 1:
        return PlanError(
            "adapters need a tp grid of one row",
            given=f"tp={rows}x{cols}",
            expected="tp=C",
            hint=f"tp={cols}",
        )
    if base != "none" and any(inputs % BLOCK for _, inputs in model.linear_layers(cols)):
        return PlanError(
            f"columns of tp would split blocks of {BLOCK} elements of the quantized base",
            given=f"tp={cols} base={base}",
            expected=f"inputs of layers that divide into multiples of {BLOCK}",
            hint="a smaller tp, or no base",
        )
    return None


@cache
def context_error(model: ModelShape, cols: int, cp: int, cp_method: str) -> PlanError | None:
    """The reason why the heads of a column cannot be divided over the ranks of cp, or None."""
    try:
        if cp > 1:
            attention_method(model, cols, cp, cp_method)
    except PlanError as error:
        return error
    return None


def _not_a_divisor(given: str, num_devices: int) -> PlanError:
    return PlanError(
        f"the degrees do not multiply to {num_devices:,} devices",
        given=given,
        expected=f"degrees whose product divides {num_devices:,}",
        hint=f"no dp, and a pp and tp that divide {num_devices:,}",
    )


def _too_many_stages(model: ModelShape, pp: int, chunks: int) -> PlanError:
    given = f"layers={model.layers} pp={pp}" + (f" chunks={chunks}" if chunks > 1 else "")
    return PlanError(
        f"{model.layers} layers cannot fill {pp * chunks} stages",
        given=given,
        expected="at least one layer on every stage but the first and the last",
        hint=f"pp x chunks up to {model.layers + 2}",
    )


def no_plan_error(space: Space) -> PlanError:
    """The reason why a space has no plan, and what would work."""
    pinned = " ".join(f"{key}={show_value(key, value)}" for key, value in space.pins.items())
    given = f"batch={space.batch}" + (f" pinned: {pinned}" if pinned else "")
    batch = nearest_batch(space)
    if batch is not None:
        return PlanError(
            f"no plan of {space.num_devices:,} devices divides the batch",
            given=given,
            expected="a multiple of dp x micro",
            hint=f"batch={batch}",
        )
    refusal = max(space.refusals.first.items(), key=lambda rule: space.refusals.counts[rule[0]])[1]
    works = (f"{key}={' or '.join(values)}" for key in space.pins if (values := _working_values(space, key)))
    return PlanError(
        f"no plan of {space.num_devices:,} devices has the pinned values",
        given=given,
        expected=refusal.expected or refusal.fact,
        hint="; ".join(works) or "fewer pinned keys",
    )


def nearest_batch(space: Space) -> int | None:
    """The nearest batch that some plan divides; None if it is the given one, or there is none."""
    other = replace(space, batch=MAX_NUMBER, refusals=Refusals())
    shares = {keys["dp"] * space.pins.get("micro", 1) for keys in other.all_degrees()}
    batches = {max(1, round(space.batch / share)) * share for share in shares}
    best = min(batches, key=lambda batch: (abs(batch - space.batch), batch), default=None)
    return None if best == space.batch else best


def _working_values(space: Space, key: str) -> list[str]:
    """Values of a pinned key with which there are plans."""
    pins = {other: value for other, value in space.pins.items() if other != key}
    plans = replace(space, pins=pins, refusals=Refusals(), known={}).plans()
    found = {getattr(plan, key): None for plan in islice(plans, _MOST_TRIED)}
    return [show_value(key, value) for value in found][:_MOST_SHOWN]
