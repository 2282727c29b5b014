"""The plan: what the user asks for, as a frozen value with a text form that parses back.

[Note: what a plan refuses]
By itself a plan refuses what is decided by its own words: values that no key has, and combinations that
cannot be, or would be accepted and then do nothing. docs/plans.md lists the combinations, by the facts of
their letters. Ranks, a batch, a model and a device have a say later, and before the first weight is made.

What each key of a plan can be by itself, and how it is read and shown.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from plait.errors import PlanError, unknown_key_hint
from plait.plan.collectives import ALGORITHMS
from plait.plan.schedule.generators import GENERATORS

PRECISIONS = ("fp64", "fp32", "bf16", "fp16")
CHOICES = {
    "precision": PRECISIONS,
    "algorithm": ("auto", *ALGORITHMS),
    "accumulate": ("auto", "unsharded", "sharded"),
    "reshard": ("use", "step"),
    "optim_dtype": ("fp32", "bf16"),
    "offload": ("none", "cpu", "disk"),
}
_MIN = {
    "dp": 0,
    "zero": 0,
    "shard": 0,
    "prefetch": 0,
    "chunks": 0,
}  # of the whole numbers; 1 for all others
RECOMPUTE = re.compile(r"none|full|selective|every=[1-9][0-9]*")
TP = re.compile(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?")
REDUCE = re.compile(r"fp32|bf16|fp16|int8|powersgd(?::([1-9][0-9]*))?")
DEFAULT_POWERSGD_RANK = 4  # of powersgd without a number
STAGES = re.compile(r"([1-9][0-9]*(,[1-9][0-9]*)*)?")
SCHEDULES = tuple(name for name, generator in GENERATORS.items() if generator.trains)


_RENAMED_VALUES = {
    ("accumulate", "whole"): "accumulate=unsharded",
    ("accumulate", "cut"): "accumulate=sharded",
}
_RENAMED = {"gathered": "reshard=use or reshard=step", "states": "optim_dtype=fp32 or optim_dtype=bf16"}


def check_choices(values: Mapping[str, object]) -> None:
    """Raises PlanError for a word that is none of those that its key can have."""
    for key, choices in CHOICES.items():
        if values[key] not in choices:
            renamed = _RENAMED_VALUES.get((key, str(values[key])))
            raise _unknown(key, values[key], " or ".join(choices), renamed)
    for key, pattern, expected in (
        ("recompute", RECOMPUTE, "none, full, selective or every=k with k from 1"),
        ("reduce", REDUCE, "fp32, bf16, fp16, int8, powersgd or powersgd:r with a rank r from 1"),
    ):
        value = values[key]
        if not (isinstance(value, str) and pattern.fullmatch(value)):
            raise _unknown(key, value, expected)


def _unknown(key: str, value: object, expected: str, hint: str | None = None) -> PlanError:
    return PlanError(
        f"{key} is not one that plait knows", given=f"{key}={value}", expected=expected, hint=hint
    )


def canonical_tp(tp: object) -> str:
    """`4` for a grid of one row, else `2x4`: of a text, a number or (rows, columns)."""
    text = "x".join(map(str, tp)) if isinstance(tp, tuple) else str(tp)
    found = TP.fullmatch(text)
    if found is None:
        raise PlanError(
            "tp is not a grid", given=f"tp={text}", expected="columns (tp=4), or rows x columns (tp=2x4)"
        )
    return text.removeprefix("1x")


def check_type(key: str, kind: Any, value: object) -> None:
    """Raises PlanError for a value that is not of its key's kind, or a number below the key's least."""
    if kind is int and (type(value) is not int or value < _MIN.get(key, 1)):
        raise _not_a_number(key, value)
    if kind is bool and type(value) is not bool:
        raise PlanError(f"{key} is not a choice", given=f"{key}={value}", expected="true or false")


def read_value(key: str, kind: Any, text: str) -> Any:
    """The value that a plan's text gives to a key; of a choice that is neither true nor false the text, which
    `check_type` refuses. Raises PlanError for a number that is none."""
    if key == "dp" and text == "auto":
        return 0
    if kind is int:
        if not text.isascii() or not text.isdigit() or (key == "dp" and int(text) == 0):
            raise _not_a_number(key, text)
        return int(text)
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    return text


def show_value(key: str, value: object) -> str:
    """As `read_value` reads it."""
    if key == "dp" and value == 0:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _not_a_number(key: str, value: object) -> PlanError:
    what = "stage" if key == "zero" else "number of units" if key == "prefetch" else "degree"
    expected = "0, 1, 2 or 3" if key == "zero" else f"a whole number, {_MIN.get(key, 1)} or more"
    if key == "dp":
        expected = "a whole number, 1 or more, or auto"
    return PlanError(f"{key} is not a {what}", given=f"{key}={value}", expected=expected)


@dataclass(frozen=True)
class Plan:
    """Degrees and policies of one training run. See [Note: what a plan refuses].

    dp          ranks that see different data and hold the same computation; 0, in text `auto`: as many as
                the ranks that there are leave, see `resolved`
    tp          ranks that share every layer: `tp=4` cuts heads and ffn widths over 4 columns (Megatron's
                layout), `tp=2x4` also the hidden dim over 2 rows
    pp          ranks that share the model's depth: each has some of its blocks (pipeline parallelism)
    schedule    which rank computes what of which micro-batch when: 1f1b (with chunks: interleaved), gpipe
                (with chunks: bfs), interleaved, bfs (breadth-first), zb-h1, zbv, dualpipev, or file:PATH, a
                CSV file
    chunks      stages per rank; 0: what is usual for the schedule
    stages      blocks of each stage, as in 8,8,8,6; nothing: dealt by cost
    sp          between the layers that tp cuts, activations are cut over the sequence on the columns
    zero        what is cut over `shard`: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters
    shard       ranks that share one copy of what is cut; a divisor of dp, 0 for all of it. The copies
                are on dp / shard replicas (hybrid sharding)
    micro       micro-batches per step and data rank (gradient accumulation)
    accumulate  over micro-batches: `unsharded` adds full gradients and reduces once a step (least traffic),
                `sharded` reduces every micro-batch into this rank's range (least memory). `auto`:
                unsharded up to stage 1, where gradients are full anyway, sharded from stage 2 on
    prefetch    stage 3: units gathered ahead of the one in use
    reshard     stage 3: parameters are freed after each `use` (a forward or a backward) or after the `step`
    precision   what the model computes in. bf16 and fp16 keep fp32 master weights; fp16 scales its loss
    reduce      what gradients travel in between data ranks; owners add up in fp32 (fp64 for fp64), what
                replicas (and NCCL) add is rounded as it travels. `fp16`, `int8` and `powersgd` (or
                `powersgd:8`, with factors of rank 8; 4 without) are added in fp32 everywhere. What the last
                two lose on a rank is added to its next gradient, and is not saved: a run that is resumed
                starts without it, so it is near the uninterrupted one and not bit-identical
    algorithm   how gradients are summed between data ranks, which are CPU ranks: naive, ring, halving
                (recursive halving and doubling), tree (binomial) or two-level (inside hosts, then between
                them); `auto`: as the backend does it. With a name, gradients travel as wide as they are
                added, and reduce=bf16 rounds every partial sum
    optim_dtype what the optimizer's states are kept in
    offload     where optimizer state, master weights and (stage 3) parameter pieces live: `cpu` memory,
                or memory-mapped files on `disk` for optimizer state and master weights (of CPU ranks)
    recompute   `full` keeps only each block's input and computes the block again in backward, `selective`
                keeps matrix products and computes the rest again, `every=k` is full for every k-th block
    compile     torch.compile of each block
    """

    dp: int = 1
    tp: str = "1"
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    stages: str = ""
    sp: bool = False
    zero: int = 0
    shard: int = 0
    micro: int = 1
    accumulate: str = "auto"
    prefetch: int = 1
    reshard: str = "use"
    precision: str = "fp32"
    reduce: str = "fp32"
    algorithm: str = "auto"
    optim_dtype: str = "fp32"
    offload: str = "none"
    recompute: str = "none"
    compile: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tp", canonical_tp(self.tp))
        for field in fields(self):
            check_type(field.name, field.type, getattr(self, field.name))
        check_choices({field.name: getattr(self, field.name) for field in fields(self)})
        self._check_tensor()
        self._check_pipeline()
        self._check_zero()
        self._check_exact()
        self._check_compile()
        if self.algorithm != "auto" and self.reduce not in ("fp32", "bf16"):
            raise PlanError(
                "compressed gradients have a way of their own to be summed",
                given=f"algorithm={self.algorithm} reduce={self.reduce}",
                hint=f"no algorithm, or algorithm={self.algorithm} reduce=bf16",
            )

    def _check_tensor(self) -> None:
        if self.sp and self.cols == 1:
            raise PlanError(
                "one column has nothing to cut the sequence over",
                given=f"tp={self.tp} sp=true",
                hint="tp=2 sp=true, or no sp",
            )

    def _check_pipeline(self) -> None:
        if not self.schedule.startswith("file:"):
            if self.schedule not in SCHEDULES:
                raise PlanError(
                    "there is no such schedule",
                    given=f"schedule={self.schedule}",
                    expected=f"{', '.join(SCHEDULES)}, or file:PATH",
                    hint=unknown_key_hint(self.schedule, SCHEDULES),
                )
            GENERATORS[self.schedule].chunks_for(self.schedule, self.chunks)
        elif re.search(r"[\s,]", self.schedule):
            raise PlanError(
                "a plan is words, which a path with spaces or commas would tear apart",
                given=self.schedule,
                hint="a file with another name",
            )
        elif self.chunks:
            raise PlanError(
                "a schedule's file says which rank has which stages",
                given=f"{self.schedule} chunks={self.chunks}",
                hint="no chunks",
            )
        if not STAGES.fullmatch(self.stages):
            raise PlanError(
                "stages are numbers of blocks", given=f"stages={self.stages}", expected="stages=8,8,8,6"
            )
        if self.stages and self.num_stages not in (0, self.stages.count(",") + 1):
            raise PlanError(
                "stages are not as many as the plan has",
                given=f"stages={self.stages} (there are {self.stages.count(',') + 1})",
                expected=f"{self.num_stages} numbers of blocks: pp={self.pp} x {self.num_chunks} per rank",
                hint="no stages",
            )

    def _check_zero(self) -> None:
        """Refuses what would be accepted and then do nothing."""
        if self.zero > 3:
            raise PlanError(
                "there is no such ZeRO stage",
                given=f"zero={self.zero}",
                expected="0 (nothing is cut), 1 (optimizer state), 2 (+ gradients) or 3 (+ parameters)",
            )
        if self.shard and not self.zero:
            raise PlanError(
                "stage 0 cuts nothing over shard",
                given=f"zero=0 shard={self.shard}",
                hint=f"zero=1 shard={self.shard}, or no shard",
            )
        if self.shard and self.dp % self.shard:
            divisors = [str(d) for d in range(2, self.dp + 1) if self.dp % d == 0]
            raise PlanError(
                "shard does not divide dp",
                given=f"dp={self.dp} shard={self.shard}",
                expected=f"a divisor of {self.dp}",
                hint=" or ".join(f"shard={d}" for d in divisors) or "no shard",
            )
        if self.accumulate == "sharded" and self.zero < 2:
            raise PlanError(
                "up to stage 1 gradients are whole: there is no range to accumulate in",
                given=f"zero={self.zero} accumulate=sharded",
                hint="zero=2 accumulate=sharded, or accumulate=unsharded",
            )
        for key, value in (("prefetch", 1), ("reshard", "use")):
            if self.zero != 3 and getattr(self, key) != value:
                raise PlanError(
                    f"{key} is about parameters that are cut, which is stage 3",
                    given=f"zero={self.zero} {key}={getattr(self, key)}",
                    hint=f"zero=3 {key}={getattr(self, key)}, or no {key}",
                )

    def _check_exact(self) -> None:
        narrow = [key for key in ("reduce", "optim_dtype") if getattr(self, key) != "fp32"]
        if self.precision == "fp64" and narrow:
            words = " ".join(f"{key}={getattr(self, key)}" for key in narrow)
            raise PlanError(
                "fp64 is for exact comparisons, which anything narrow would spoil",
                given=f"precision=fp64 {words}",
                hint=f"{' and '.join(f'no {key}' for key in narrow)}, or precision=bf16 {words}",
            )

    def _check_compile(self) -> None:
        if self.compile and not self.schedule.startswith("file:") and GENERATORS[self.schedule].splits:
            raise compile_conflict(f"schedule={self.schedule}")

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """The keys of the text form, in the order in which they print."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Reads `dp=2 micro=4 precision=bf16`, commas allowed. Keys that are not named take their defaults.

        Raises PlanError for an unknown or repeated key and for a value that cannot be.
        """
        types = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for word in re.split(r"[\s,]+(?=[^\s,]*=)|\s+", text.strip().strip(",")) if text.strip() else []:
            key, equals, value = word.partition("=")
            if not equals:
                raise PlanError(
                    "a plan is words of the form key=value", given=repr(word), hint="dp=2 precision=bf16"
                )
            if key not in types:
                hint = _RENAMED.get(key) or unknown_key_hint(key, types)
                raise PlanError(f"this version's plans have no key {key!r}", given=word, hint=hint)
            if key in values:
                raise PlanError(f"{key} is given twice", given=text)
            values[key] = read_value(key, types[key], value)
        return cls(**values)

    def __str__(self) -> str:
        """The shortest text that parses back: dp, and whatever is not a default."""
        default = Plan()
        shown = [k for k in self.keys() if k == "dp" or getattr(self, k) != getattr(default, k)]
        return " ".join(f"{key}={show_value(key, getattr(self, key))}" for key in shown)

    @property
    def data_ranks(self) -> int:
        """`dp`, where it is a number. Raises PlanError for `auto`."""
        if self.dp:
            return self.dp
        example = f"dp={2 * (self.shard or 1)}"
        raise PlanError(
            "dp=auto is a number only once the ranks are counted",
            given=str(self),
            expected="a number for dp",
            hint=f'"{str(self).replace("dp=auto", example)}"',
        )

    @property
    def num_ranks(self) -> int:
        """How many ranks the plan fills. Raises PlanError for dp=auto."""
        return self.data_ranks * self.min_ranks // (self.shard or 1)

    @property
    def min_ranks(self) -> int:
        """How many ranks dp=auto needs at least; all that it fills are multiples of them."""
        return self.pp * self.rows * self.cols * (self.shard or 1)

    def resolved(self, num_ranks: int) -> "Plan":
        """The plan that runs on so many ranks: itself, unless it has dp=auto. Raises PlanError when these do
        not divide over pp, tp and shard."""
        if self.dp:
            return self
        least = self.min_ranks
        if num_ranks < least or num_ranks % least:
            below = num_ranks // least * least
            counts = [str(count) for count in (below, below + least) if count]
            raise PlanError(
                "dp=auto cannot fill the ranks that there are",
                given=f"{self} on {num_ranks} rank{'s' * (num_ranks != 1)}",
                expected=f"a multiple of {least} ranks, which is what the rest of the plan needs",
                hint=f"{' or '.join(counts)} ranks",
            )
        return replace(self, dp=num_ranks // (least // (self.shard or 1)))

    @property
    def num_chunks(self) -> int:
        """Stages per rank; 0 where a file says it."""
        if self.schedule.startswith("file:"):
            return 0
        return GENERATORS[self.schedule].chunks_for(self.schedule, self.chunks)

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline; 0 where a file says it."""
        return self.pp * self.num_chunks

    @property
    def blocks_per_stage(self) -> tuple[int, ...] | None:
        """By hand; None where they are dealt by cost."""
        return tuple(map(int, self.stages.split(","))) if self.stages else None

    @property
    def rows(self) -> int:
        """Degree of `row`: ranks that the hidden dim is cut over."""
        found = TP.fullmatch(self.tp)
        assert found is not None, self.tp
        return int(found[1]) if found[2] else 1

    @property
    def cols(self) -> int:
        """Degree of `col`: ranks that heads and ffn widths are cut over."""
        return int(self.tp.rpartition("x")[2])

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of what the stage cuts; 1 at stage 0."""
        return (self.shard or self.data_ranks) if self.zero else 1

    @property
    def powersgd_rank(self) -> int | None:
        """The rank of the factors that matrices travel as; None where they travel as something else."""
        found = REDUCE.fullmatch(self.reduce)
        if found is None or not self.reduce.startswith("powersgd"):
            return None
        return int(found[1] or DEFAULT_POWERSGD_RANK)

    @property
    def accumulates_full(self) -> bool:
        """Whether micro-batches add up in whole gradients, which are reduced once a step."""
        return self.zero < 2 or self.accumulate == "unsharded" or self._range_is_whole

    @property
    def keeps_full_grads(self) -> bool:
        """Whether a whole gradient lives as long as a step, and not only until it is reduced."""
        return self.zero < 2 or (self.accumulates_full and self.micro > 1) or self._range_is_whole

    @property
    def algorithm_reduces_all(self) -> bool:
        """Whether an algorithm sums whole gradients over all data ranks: no replica adds anything later."""
        return self.algorithm != "auto" and self.shard_degree == 1 and self.accumulates_full

    @property
    def _range_is_whole(self) -> bool:
        """A lone rank's range is everything: sums need no memory beside the whole gradients."""
        return self.shard_degree == 1 and self.offload != "cpu"

    def check_ranks(self, num_ranks: int) -> None:
        """Raises PlanError unless the degrees multiply to the ranks that there are."""
        if num_ranks != self.num_ranks:
            ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
            used = (("dp", True), ("tp", self.tp != "1"), ("pp", self.pp > 1))
            product = " x ".join(key for key, is_used in used if is_used)
            raise PlanError(
                f"the plan's degrees do not multiply to the {ranks} of this run",
                given=f"{self} ({product} = {self.num_ranks}) on {ranks}",
                expected=f"as many ranks as the plan fills: {self.num_ranks}",
                hint=f'"{self._fitting(num_ranks)}", or torchrun --nproc-per-node {self.num_ranks} '
                f"(plait train: --ranks {self.num_ranks})",
            )

    def _fitting(self, num_ranks: int) -> "Plan":
        """The nearest plan for so many ranks: with this pipeline and grid, or as much of them as divides."""
        fitting = replace(self, dp=1, shard=0)
        if num_ranks % self.pp:
            schedule = "1f1b" if self.schedule.startswith("file:") else self.schedule
            fitting = replace(fitting, pp=math.gcd(num_ranks, self.pp), schedule=schedule, stages="")
        left = num_ranks // fitting.pp
        if left % (self.rows * self.cols):
            tp = str(math.gcd(left, self.rows * self.cols))
            fitting = replace(fitting, tp=tp, sp=self.sp and tp != "1")
        dp = num_ranks // fitting.num_ranks
        return replace(fitting, dp=dp, shard=self.shard if self.shard and dp % self.shard == 0 else 0)

    def check_batch(self, num_sequences: int) -> int:
        """Sequences in one micro-batch of one data rank, for a step of `num_sequences` in all.

        Raises PlanError when they cannot be dealt evenly over dp x micro.
        """
        shares = self.data_ranks * self.micro
        if num_sequences < shares or num_sequences % shares:
            nearest = max(1, round(num_sequences / shares)) * shares
            raise PlanError(
                "the batch does not divide over the data ranks and their micro-batches",
                given=f"batch={num_sequences} {self} (dp x micro = {shares})",
                expected=f"a multiple of {shares}",
                hint=f"batch={nearest}",
            )
        return num_sequences // shares


def compile_conflict(schedule: str) -> PlanError:
    """Of a plan whose schedule takes backwards apart."""
    return PlanError(
        "a compiled block's backward cannot be taken apart",
        given=f"compile=true {schedule}, with backwards in halves (W)",
        expected="whole backwards: the compiler makes one of a block",
        hint="compile=false, or schedule=1f1b",
    )
