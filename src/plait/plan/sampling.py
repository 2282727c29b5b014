"""Options of generation: how tokens are chosen, and when a sequence ends. The choice itself is in
engine/sampling.py."""

from collections.abc import Collection
from dataclasses import dataclass

from plait.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Options of `Engine.generate`, applied in this order, which is that of transformers.

    max_new_tokens      of each sequence
    repetition_penalty  scores of tokens that the prompt or the new tokens have are divided by it if they are
                        positive, else multiplied (Keskar et al. 2019)
    temperature         scores are divided by it; 0: the token with the highest score, and no draw
    top_k               the draw is among this many tokens with the highest scores
    top_p               among the fewest tokens whose probabilities sum to this (Holtzman et al. 2019)
    min_p               among tokens at least this fraction as probable as the first (Nguyen et al. 2024)
    stop_strings        a sequence ends when its new text contains one of them
    stop_tokens         a sequence ends before one of these ids. None: those that the model's generation
                        configuration names as its ends
    seed                of the draws; each sequence has its own, by its index in the global batch

    Raises ConfigError.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    stop_strings: Collection[str] = ()
    stop_tokens: Collection[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        top_k, top_p, min_p = self.top_k, self.top_p, self.min_p
        strings, tokens = self.stop_strings, self.stop_tokens
        checks = {
            "max_new_tokens": (_is_count(self.max_new_tokens), "an integer from 1", "128"),
            "temperature": (_is_number(self.temperature), "a number from 0; 0 is greedy", "0.8"),
            "top_k": (top_k is None or _is_count(top_k), "an integer from 1, or None", "50"),
            "top_p": (top_p is None or (_is_number(top_p) and 0 < top_p <= 1), "above 0, up to 1", "0.9"),
            "min_p": (min_p is None or (_is_number(min_p) and min_p <= 1), "0 to 1", "0.05"),
            "repetition_penalty": (
                _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
                "a number above 0; 1 is none",
                "1.1",
            ),
            "stop_strings": (
                not isinstance(strings, str) and all(isinstance(each, str) and each for each in strings),
                "a collection of strings that are not empty",
                "('\\n\\n',)",
            ),
            "stop_tokens": (
                tokens is None or all(isinstance(each, int) and each >= 0 for each in tokens),
                "a collection of token ids, or None",
                "(2,)",
            ),
            "seed": (isinstance(self.seed, int) and self.seed >= 0, "an integer from 0", "0"),
        }
        for name, (is_valid, expected, value) in checks.items():
            if not is_valid:
                raise ConfigError(
                    f"{name} is not valid for sampling",
                    given=f"{name}={getattr(self, name)!r}",
                    expected=expected,
                    hint=f"{name}={value}",
                )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")
