"""Print samples with their trained tokens: in colour on a terminal, else between « and »."""

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from plait.data.dataset import TokenStore
from plait.data.tokenizer import read_tokenizer
from plait.errors import ConfigError, printable
from plait.tables import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MAX_TOKENS = 2000  # of a sample, as printed


def show_documents(store: TokenStore, console: Console, *, first: int = 0, number: int = 3) -> None:
    """Print training documents, from the one with number `first` on. Raises ConfigError if it is missing."""
    stream, tokenizer = store.train, read_tokenizer(store.tokenizer_dir)
    starts = stream.starts_of_documents(store.index.end_of_document)
    rows = 2 if store.index.spec.kind == "preference" else 1  # documents of a row
    if not 0 <= first < len(starts) // rows:
        raise ConfigError(
            f"the {stream.name} data has no such row",
            given=f"row {first}",
            expected=f"0 to {len(starts) // rows - 1}",
            hint="--row 0",
        )
    stops = np.append(starts[1:], stream.num_tokens)
    for row in range(rows * first, min(rows * (first + number), len(starts))):
        start, length = int(starts[row]), int(stops[row] - starts[row])
        weights = stream.weights(start, length)
        weights = np.ones(length, dtype=np.float32) if weights is None else weights
        trained = f"{np.count_nonzero(weights):,} trained"
        name = f"row {row}" if rows == 1 else f"row {row // rows}, {('chosen', 'rejected')[row % rows]}"
        console.rule(Text(f"{stream.name} {name}: {counted(length, 'token')}, {trained}"), align="left")
        shown = min(length, _MAX_TOKENS)
        text = marked_text(stream.read(start, shown).tolist(), weights[:shown].tolist(), tokenizer)
        console.print(text, markup=False, highlight=False)
        if shown < length:
            console.print(f"... ({length - shown:,} more tokens)", highlight=False)


def marked_text(ids: list[int], weights: list[float], tokenizer: "PreTrainedTokenizerFast") -> Text:
    """Return the text of tokens, the trained ones between « and », with the weight if it is not 1."""
    found = Text()
    borders = [at for at in range(1, len(ids)) if weights[at] != weights[at - 1]]
    for start, stop in zip([0, *borders], [*borders, len(ids)], strict=True):
        text, weight = printable(str(tokenizer.decode(ids[start:stop]))), weights[start]
        label = "" if weight == 1 else f"{weight:g}: "
        found.append(f"«{label}{text}»" if weight else text, style="bold green" if weight else "dim")
    return found
