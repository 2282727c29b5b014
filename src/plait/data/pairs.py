"""Pairs of answers to one prompt, of which the first was chosen and the second rejected, and single answers,
each good or bad: rows -> tokens.

[Note: forms of rows]  As in TRL: `prompt`, `chosen` and `rejected`, three texts or three lists of messages;
or `chosen` and `rejected` alone, whose common beginning is the prompt. Both answers are encoded as the
completion of a row of prompts is, by the same template code, and only they are trained.

[Note: files of pairs]  A pair is two documents of the stream, one after the other, which are both for
training or both for validation. A sample is a pair, and two rows of a batch.

[Note: single answers]  `prompt`, `completion` and `label`, true or false. Weights of a bad one are negative.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from plait.data.conversations import check_row
from plait.data.encoder import Encoder, Sample
from plait.errors import ContentError

ANSWER = '{"prompt": "...", "completion": "...", "label": true}'
EXAMPLE = '{"prompt": "...", "chosen": "...", "rejected": "..."}'
_ANSWERS = ("chosen", "rejected")


class Pair(NamedTuple):
    chosen: Sample
    rejected: Sample


class PairEncoder:
    """Encodes rows of pairs: see [Note: forms of rows]."""

    def __init__(self, encoder: Encoder) -> None:
        """`encoder`: of prompts."""
        self._encoder = encoder

    def __call__(self, row: Any) -> Pair:
        """Encode a row. Raises ContentError, whose fact continues "a row"."""
        for name in _ANSWERS:
            check_row(row, name, EXAMPLE)
        rest = {key: value for key, value in row.items() if key not in _ANSWERS}
        pair = Pair(*(self._answer(row, rest, name) for name in _ANSWERS))
        if pair.chosen.ids == pair.rejected.ids:
            raise _invalid("whose answers are the same", "equal tokens of chosen and rejected", "two answers")
        return pair

    def _answer(self, row: Mapping[str, Any], rest: Mapping[str, Any], name: str) -> Sample:
        prompt, answers = row.get("prompt"), [row[each] for each in _ANSWERS]
        if prompt is None:
            first = _common(*answers)
            prompt, answers = answers[0][:first], [answer[first:] for answer in answers]
        answer = answers[_ANSWERS.index(name)]
        if not isinstance(answer, str) and not answer:
            raise _invalid(f"whose {name!r} has no answer", "no message after the prompt", "a message")
        try:
            sample = self._encoder({**rest, "prompt": prompt, "completion": answer})
        except ContentError as error:
            fact, given = (str(each).replace("completion", name) for each in (error.fact, error.given))
            raise ContentError(fact, given=given, expected=error.expected, hint=error.hint) from error
        if not np.isin(sample.weights, (0, 1)).all():
            raise _invalid("with weights of messages", f"{name}: weights other than 0 and 1", "no weights")
        return sample


class AnswerEncoder:
    """Encodes rows of single answers: see [Note: single answers]."""

    def __init__(self, encoder: Encoder) -> None:
        """`encoder`: of prompts."""
        self._encoder = encoder

    def __call__(self, row: Any) -> Sample:
        """Encode a row. Raises ContentError, whose fact continues "a row"."""
        check_row(row, "label", ANSWER)
        if row["label"] not in (True, False):
            raise _invalid("whose label is neither true nor false", f"{row['label']!r:.100}", "true or false")
        sample = self._encoder({key: value for key, value in row.items() if key != "label"})
        if not np.isin(sample.weights, (0, 1)).all():
            raise _invalid("with weights of messages", "weights other than 0 and 1", "no weights")
        return sample if row["label"] else Sample(sample.ids, -sample.weights)


def _common(chosen: Any, rejected: Any) -> int:
    """Length of the common beginning: of messages, or of texts, up to the space before the first word that
    differs. Raises ContentError if there is none."""
    both = isinstance(chosen, str), isinstance(rejected, str)
    if len({*both}) == 1 and all(isinstance(answer, str | list | tuple) for answer in (chosen, rejected)):
        same = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
        if both[0]:
            same = next((at for at in range(same - 1, 0, -1) if chosen[at].isspace()), same)
        if same:
            return same
    raise _invalid("without a prompt", "'chosen' and 'rejected' with no common beginning", EXAMPLE)


def _invalid(fact: str, given: str, expected: str) -> ContentError:
    return ContentError(fact, given=given, expected=expected, hint=EXAMPLE)
