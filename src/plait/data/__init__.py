"""Training data: sources, tokenizer, token files, sample order, loader.

config.py     the recipe's [data] and [tokenizer]
sources.py    a recipe's `sources`: files, and the shards they are split into
python_docs.py  conversations about Python's standard library, from its docstrings
conversations.py  rows of messages, checked
template.py   the text of a conversation, and which spans of it are trained
encoder.py    rows of chat and prompts -> token ids and their weights as targets
pairs.py      rows of chosen and rejected answers, or of single ones, checked and encoded
show.py       samples with their trained tokens, printed
readers.py    documents of a shard, streamed in chunks of about a megabyte
tokenizer.py  train, import, save and load a tokenizer
index.py      index.json: contents, writing and reading
shards.py     one shard -> one pair of token files and a record
workers.py    many shards, in this process or in several
build.py      all shards -> a directory of tokens; restartable
dataset.py    a checked directory of tokens, as two streams
sampler.py    sample order: a pure function of (seed, epoch, sample number)
loader.py     samples and their order as a torch DataLoader
documents.py  samples that know where documents begin: one each, padded, or several packed into a row
packing.py    distribution of documents over rows and micro-batches
samples.py    the samples of a recipe's [data], and their order
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def chat(
    rows: str | Iterable[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerFast",
    *,
    kind: Literal["chat", "prompt"] = "chat",
    train_on: Literal["all", "last"] = "all",
    train_empty_thinking: bool = False,
    errors: Literal["raise", "skip"] = "raise",
) -> list[dict[str, Any]]:
    """Encode conversations: `input_ids` and `labels` of each row, -100 where no target is, for a DataLoader
    with `PaddingCollator`, or a trainer of transformers. Weights of messages other than 0 and 1 are under
    `loss_weights`, which an engine's loss applies, and a trainer of transformers leaves out.

    rows  dicts, or a source as in a recipe: a path or glob of .jsonl or .parquet files, or hf:NAME

    The other options are those of a recipe's [data]. Raises DataError for the first bad row, unless `errors`
    is `skip`.
    """
    from plait.data.encoder import Encoder, encode_rows  # noqa: PLC0415  transformers takes a second
    from plait.data.readers import read_samples  # noqa: PLC0415

    encode = Encoder(tokenizer, kind, train_on=train_on, train_empty_thinking=train_empty_thinking)
    skip = errors == "skip"
    found = (
        read_samples(rows, encode, skip=skip)
        if isinstance(rows, str)
        else encode_rows(rows, encode, skip=skip)
    )
    return [sample.tensors() for sample in found]


def preferences(
    rows: str | Iterable[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerFast",
    *,
    errors: Literal["raise", "skip"] = "raise",
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Encode pairs of answers: `input_ids` and `labels` of the chosen and of the rejected row of each, for a
    DataLoader with `PaddingCollator`. Arguments and errors are those of `chat`."""
    from plait.data.encoder import Encoder, encode_rows  # noqa: PLC0415  see above
    from plait.data.pairs import PairEncoder  # noqa: PLC0415
    from plait.data.readers import read_samples  # noqa: PLC0415

    encode, skip = PairEncoder(Encoder(tokenizer, "prompt")), errors == "skip"
    if isinstance(rows, str):
        samples = read_samples(rows, encode, skip=skip)
        pairs: Iterable[Any] = zip(samples, samples, strict=True)
    else:
        pairs = encode_rows(rows, encode, skip=skip)
    return [(chosen.tensors(), rejected.tensors()) for chosen, rejected in pairs]


def answers(
    rows: str | Iterable[Mapping[str, Any]],
    tokenizer: "PreTrainedTokenizerFast",
    *,
    errors: Literal["raise", "skip"] = "raise",
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Encode single answers for `Preference(loss="kto")`: of each, two rows as those of `preferences`, its
    prompt with it, and with the answer of the next row that has another prompt. `loss_weights` of bad answers
    are -1. Raises DataError also for rows of one prompt."""
    from plait.data.documents import OtherAnswers  # noqa: PLC0415  see above
    from plait.data.encoder import Encoder, encode_rows  # noqa: PLC0415
    from plait.data.pairs import AnswerEncoder  # noqa: PLC0415
    from plait.data.readers import read_samples  # noqa: PLC0415

    encode, skip = AnswerEncoder(Encoder(tokenizer, "prompt")), errors == "skip"
    found = (
        read_samples(rows, encode, skip=skip)
        if isinstance(rows, str)
        else encode_rows(rows, encode, skip=skip)
    )
    samples = [sample.tensors() for sample in found]
    others = OtherAnswers(samples.__getitem__, len(samples), "answers")
    return [(own, other) for own, other in map(others.rows, range(len(samples)))]
