"""The plan: what the user asks for, as a frozen value with a text form that parses back."""

from dataclasses import dataclass, fields, replace
from typing import Any

from plait.errors import PlanError, unknown_key_hint

PRECISIONS = ("fp64", "fp32", "bf16")
RECOMPUTES = ("none", "full")
_CHOICES = {"precision": PRECISIONS, "recompute": RECOMPUTES}


@dataclass(frozen=True)
class Plan:
    """Degrees and policies of one training run.

    dp         ranks that see different data and hold the same computation
    micro      micro-batches per step and data rank (gradient accumulation)
    precision  what the model computes in. bf16 keeps fp32 master weights and reduces fp32 gradients
    recompute  `full` keeps only each block's input and computes the block again in backward
    """

    dp: int = 1
    micro: int = 1
    precision: str = "fp32"
    recompute: str = "none"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise PlanError(
                    f"{field.name} is not a degree",
                    given=f"{field.name}={value}",
                    expected="a whole number, 1 or more",
                )
        for key, choices in _CHOICES.items():
            value = getattr(self, key)
            if value not in choices:
                raise PlanError(
                    f"{key} is not one that plait knows",
                    given=f"{key}={value}",
                    expected=" or ".join(choices),
                )

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
        for word in text.replace(",", " ").split():
            key, equals, value = word.partition("=")
            if not equals:
                raise PlanError(
                    "a plan is words of the form key=value", given=repr(word), hint="dp=2 precision=bf16"
                )
            if key not in types:
                hint = unknown_key_hint(key, types)
                raise PlanError(f"this version's plans have no key {key!r}", given=word, hint=hint)
            if key in values:
                raise PlanError(f"{key} is given twice", given=text)
            values[key] = _whole_number(key, value) if types[key] is int else value
        return cls(**values)

    def __str__(self) -> str:
        """The shortest text that parses back: dp, and whatever is not a default."""
        default = Plan()
        shown = [k for k in self.keys() if k == "dp" or getattr(self, k) != getattr(default, k)]
        return " ".join(f"{key}={getattr(self, key)}" for key in shown)

    @property
    def num_ranks(self) -> int:
        """How many ranks the plan fills."""
        return self.dp

    def check_ranks(self, num_ranks: int) -> None:
        """Raises PlanError unless the degrees multiply to the ranks that there are."""
        if num_ranks != self.num_ranks:
            ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
            raise PlanError(
                f"the plan's degrees do not multiply to the {ranks} of this run",
                given=f"{self} (dp = {self.num_ranks}) on {ranks}",
                expected=f"as many ranks as the plan fills: {self.num_ranks}",
                hint=f'"{replace(self, dp=num_ranks)}", or torchrun --nproc-per-node {self.num_ranks} '
                f"(plait train: --ranks {self.num_ranks})",
            )

    def check_batch(self, num_sequences: int) -> int:
        """Sequences in one micro-batch of one data rank, for a step of `num_sequences` in all.

        Raises PlanError when they cannot be dealt evenly over dp x micro.
        """
        shares = self.dp * self.micro
        if num_sequences < shares or num_sequences % shares:
            nearest = max(1, round(num_sequences / shares)) * shares
            raise PlanError(
                "the batch does not divide over the data ranks and their micro-batches",
                given=f"batch={num_sequences} {self} (dp x micro = {shares})",
                expected=f"a multiple of {shares}",
                hint=f"batch={nearest}",
            )
        return num_sequences // shares


def _whole_number(key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise PlanError(f"{key} is not a degree", given=f"{key}={text}", expected="a whole number, 1 or more")
    return int(text)
