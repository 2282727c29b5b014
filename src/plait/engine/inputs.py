"""The inputs of an engine: from a batch, a dict that a script passes, to the micro-batches that stages run.

[Note: entries of a batch and their dims]
Dim 0 of every entry counts samples; dim 1 of the entries in `OF_TOKENS` counts tokens. An axis of the grid
divides one of the two, as its row in `plan/axes.py` says: samples by `divide`, tokens by `own_tokens`; an
entry without tokens is the same on all ranks of cp. Where entries come from:

  input_ids, labels   the data; labels are the ids, or -100 at positions without a target
  loss_weights        the data, for targets of unequal weight: divided, and shifted, as labels are
  attention_mask      the data, for rows that are padded. A causal mask is the model's own; which masks it can
                      leave out is decided in models/mask_decisions.py, from the values noted here
  position_ids        the data; without them the model numbers the tokens of each row
  document ids        no entry: a row is one document, several ones, or a window of the tokens regardless of
                      documents (data/). Position ids that start again separate the documents of a row, in
                      every attention: [Note: documents of packed rows] in models/mask_decisions.py

[Note: divisions of a batch]
A batch is divided, in this order:

  1. samples over data ranks, by `engine.shard`, or by a loader that reads its share alone: both by `share`
  2. samples over the micro-batches of a step: `of_step`, `of_evaluation`
  3. the tokens of a micro-batch over the ranks of cp, in `prepared`, after labels are shifted

[Note: shifted labels]
Built-in losses of causal language models compare the logits of a position with the label of the next one.
`prepared` shifts the labels while rows are complete, so that a position has its target however rows are
divided afterwards. It does so when a micro-batch runs, so that shifted copies do not wait in memory, and
asks for the task of the model then, as the loss does: a script may change it.
`shifts_labels` decides: a loss that the user has passed, and those of other tasks, receive the labels as they
are. A user's loss that shifts them does so itself.

[Note: inputs explained after a failure]
A model's inputs are not checked before it runs: only the model knows which inputs it accepts, and reading
values on a GPU would synchronize with it. If the model's code fails, the batch is compared with what most
models need. A mistake that is found becomes the error, with the model's own error as its cause.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.comm import Group, all_gather
from plait.errors import ModelError, PlaitError, PlanError
from plait.models import (
    IGNORED_LABEL,
    LOSS_WEIGHTS,
    OF_TOKENS,
    Numbering,
    PackedRows,
    Task,
    cast_entries,
    check_documents_apart,
    copy_to_meta,
    documents_of,
    forward_names,
    has_pretrained_model,
    input_embedding,
    label_keys,
    pretrained_base,
    remember_sources,
    takes_keyword,
    task_of,
)
from plait.models.attention import is_eager
from plait.models.experts import expert_layers
from plait.models.mask_decisions import host_values, known_values, remember_values
from plait.models.routing import check_choices
from plait.models.task import REFERENCE, ROUTING, TEACHER, TEACHER_IDS
from plait.parallel.context.attention import row_attention, share_tokens
from plait.parallel.context.dropout import DropoutStream
from plait.parallel.context.tokens import SequenceShare
from plait.parallel.zero.rank_context import RankContext
from plait.plan.grid import share

Batch = Mapping[str, Tensor]
T = TypeVar("T")

_SHIFTED = (Task.CAUSAL_LM, Task.IMAGE_LM)
_IDS = (torch.int64, torch.int32)
_TOKEN_TASKS = (*_SHIFTED, Task.NGRAM_LM, Task.ALIGNED_LM, Task.TOKEN_CLASSIFICATION)
_COMPARED_EVERY = 100


def divide(batch: Batch, num_parts: int, rows: int = 1) -> list[dict[str, Tensor]]:
    """Divide the samples, of so many `rows` each, into at most `num_parts` parts, as `torch.chunk` does."""
    chunks = {
        key: value.split(max(1, rows * -(-value.shape[0] // (rows * num_parts))))
        for key, value in batch.items()
    }
    num_chunks = len(next(iter(chunks.values())))
    return [{key: of_key[number] for key, of_key in chunks.items()} for number in range(num_chunks)]


def shifts_labels(model: nn.Module, loss: object) -> bool:
    """Return whether the loss takes shifted labels: [Note: shifted labels]. `loss`: the user's, if any."""
    return loss is None and task_of(model) in _SHIFTED


def shift_labels(batch: Batch) -> Batch:
    """Make the label of each position that of the next one. Labels (B, S); a loss refuses others."""
    fills = {"labels": IGNORED_LABEL, **dict.fromkeys((LOSS_WEIGHTS, REFERENCE, TEACHER_IDS, TEACHER), 0)}
    entries = {key: batch[key] for key in fills if key in batch and batch[key].ndim >= 2}
    if "labels" in batch and batch["labels"].ndim != 2:
        entries.pop("labels", None)
    return {**batch, **{key: _shifted(each, fills[key]) for key, each in entries.items()}}


def _shifted(entry_BS: Tensor, fill: int) -> Tensor:
    return torch.cat([entry_BS[:, 1:], torch.full_like(entry_BS[:, :1], fill)], 1)


def prepared(batch: Batch, model: nn.Module, loss: object) -> Batch:
    """The batch as the loss takes it: see [Note: shifted labels]. `loss`: the user's, if any."""
    return shift_labels(batch) if shifts_labels(model, loss) else batch


def own_tokens(
    batch: Batch,
    model: nn.Module,
    sequence: Group,
    method: str,
    numbering: Numbering | None,
    dropout: DropoutStream | None = None,
) -> Batch:
    """A rank's tokens of a prepared batch; `method`: the plan's `cp_method`. `dropout`: of attention; not
    needed on meta."""
    if sequence.size == 1:
        return batch
    numbers = numbering if takes_keyword(model, "position_ids") else None
    return share_tokens(batch, OF_TOKENS, sequence, method, numbers, dropout)


def check_targets(batch: Batch) -> None:
    """Raise ModelError for a target at padding on the left. `batch`: prepared, on the CPU."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if mask is None or labels is None or mask.shape != labels.shape:
        return
    if bool(((mask.cumsum(1) == 0) & (labels != IGNORED_LABEL)).any()):
        raise ModelError(
            "a token of padding, which sees nothing, has a target",
            given="padding on the left, and a label of the first token after it",
            expected="label -100 there: in its own code the model attends to all tokens from it, padding too",
            hint="labels with -100 at the first token of a row, or padding on the right",
        )


class Inputs:
    """Moves the batches of an engine to its device and divides them; compares the first one, and every
    hundredth, between the ranks of one model. See the notes at the top."""

    def __init__(
        self,
        model: nn.Module,
        loss: object,
        context: RankContext,
        micro: int,
        numbering: Numbering | None,
        dropout: DropoutStream,
        rows: int = 1,
    ) -> None:
        """`model`: before it is divided. `loss`: the user's. `micro`: micro-batches of a step. For cp:
        `numbering` of tokens, `dropout` of attention. `rows`: of a sample."""
        base = pretrained_base(model)
        embedding = None if base is None else input_embedding(base)
        self._vocabulary = embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
        self._is_pretrained, self._task = base is not None, task_of(model)
        self._names, self._labels = forward_names(model), label_keys(model)
        self._model, self._loss, self._micro, self.rows = model, loss, micro, rows
        self._device, self._dtype = context.device, context.precision.compute
        self._same_samples = context.groups.same_samples
        self._numbering, self.dropout = numbering, dropout
        self._sequence, self._method = context.groups.sequence, context.plan.cp_method
        # The model, or why there is no copy of it: to be checked when the first packed rows come.
        self._unchecked: nn.Module | Exception | None = None
        self._is_own = not has_pretrained_model(model)
        if self._sequence.size == 1 and not self._is_own:
            try:
                self._unchecked = copy_to_meta(model)
            except Exception as error:  # any error of the model's attributes
                self._unchecked = error
        self._num_compared: Counter[bool] = Counter()  # batches, in evaluation and in training
        self._layers, self._compile = expert_layers(model), context.plan.compile

    def of_step(self, batch: Batch | Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of a step. Raises PlanError unless there are `plan.micro`, or the batch divides
        into so many."""
        if not isinstance(batch, Mapping) and isinstance(batch, Sequence):
            for other in (micro for micro in batch if not isinstance(micro, Mapping)):
                check_is_batch(other)
            if len(batch) != self._micro:
                raise PlanError(
                    "the number of micro-batches is not plan.micro",
                    given=f"a list of {len(batch)}, micro={self._micro}",
                    expected=f"{self._micro} micro-batches",
                    hint=f"micro={len(batch)}, or a dict with all samples",
                )
            return [self.single(micro, trains=True) for micro in batch]
        moved = self.single(batch, trains=True)
        sizes = {key: value.shape[0] for key, value in moved.items()}
        unit = self._micro * self.rows
        if len(set(sizes.values())) != 1 or any(size % unit for size in sizes.values()):
            raise PlanError(
                "this rank's batch does not split into micro-batches",
                given=f"{sizes}, micro={self._micro}",
                expected="tensors of one size along dim 0, a multiple of micro"
                + (f" x {self.rows}: a pair is two rows" if self.rows > 1 else ""),
                hint=f"a list of {self._micro} micro-batches, for entries that have no row per sample",
            )
        micros = divide(moved, self._micro, self.rows)
        remember_sources(micros, batch)
        return micros

    def of_evaluation(self, batch: Batch) -> Sequence[Batch]:
        """At most `plan.micro` micro-batches."""
        moved = self.single(batch, trains=False)
        self._check_complete(moved)
        return divide(moved, self._micro, self.rows)

    def _check_complete(self, moved: Batch) -> None:
        """Raise PlanError for a part of a sample."""
        if any(value.shape[0] % self.rows for value in moved.values()):
            raise PlanError(
                "a micro-batch has half a pair",
                given=", ".join(f"{key} {tuple(value.shape)}" for key, value in moved.items()),
                expected="the chosen row of each pair, followed by its rejected row",
                hint="a batch of pairs that plan.micro and the data ranks divide",
            )

    def uncompared(self, batch: Batch) -> dict[str, Tensor]:
        """The batch as one micro-batch, which may differ between ranks."""
        check_is_batch(batch)
        if self._layers and ROUTING in batch:
            check_choices(batch, self._layers, self._compile)
        return on_device(batch, self._device, self._dtype, self._names)

    def single(self, batch: Batch, *, trains: bool = True) -> dict[str, Tensor]:
        """The batch as one micro-batch, on the device. Batches of training and of evaluation are counted
        separately, to be compared at the same calls on all ranks. Raises PlanError if it has no samples, or,
        in training, half of one."""
        moved = self.uncompared(batch)
        if not any(value.shape[0] for value in moved.values()):
            raise PlanError(
                "this rank's share of the batch has no samples",
                given=", ".join(f"{key} {tuple(value.shape)}" for key, value in moved.items()),
                expected="at least one sample on every data rank",
                hint="drop_last=True in the loader, or engine.shard(loader), which checks it on all ranks",
            )
        if trains:
            self._check_complete(moved)
        if self._num_compared[trains] % _COMPARED_EVERY == 0:
            check_same_batch(moved, self._same_samples)
        self._num_compared[trains] += 1
        remember_sources([moved], batch)
        return moved

    def ask(self, find: Callable[[Batch], T], batch: Batch) -> T:
        """Return `find` of the batch as one micro-batch that does not train."""
        micro = self.single(batch, trains=False)
        with self.explained([micro]):
            return find(micro)

    def prepared(self, micro: Batch, *, shifts: bool = True) -> Batch:
        """The micro-batch for a stage, when its forward begins: see [Note: divisions of a batch]. Without
        `shifts`, labels are those of their own positions."""
        batch = prepared(micro, self._model, self._loss) if shifts else micro
        if batch is not micro and (labels := known_values(micro.get("labels"), waits=False)) is not None:
            shifted = prepared({"labels": labels}, self._model, self._loss)
            remember_values(batch["labels"], shifted["labels"])
        if self._sequence.size == 1 and self._is_own:
            return row_attention(batch, self._sequence)
        if self._sequence.size == 1 and (documents := documents_of(batch)) is not None:
            self._check_documents()
            return PackedRows(batch, documents)
        if self._is_eager and "attention_mask" in batch:
            values = {key: host_values(micro[key]) for key in micro.keys() & {"attention_mask", "labels"}}
            check_targets(prepared(values, self._model, self._loss) if shifts else values)
        own = self._sequence, self._method, self._numbering, self.dropout
        return own_tokens(batch, self._model, *own)

    @cached_property
    def _is_eager(self) -> bool:
        return self._sequence.size > 1 and is_eager(self._model)

    def _check_documents(self) -> None:
        """Raise ModelError if documents would meet in the model. Once."""
        if isinstance(self._unchecked, Exception):
            raise ModelError(
                "documents of a row cannot be followed through a model that cannot be copied",
                given=f"position_ids that start again; {type(self._unchecked).__name__}: {self._unchecked}",
                expected="a model for copy.deepcopy",
                hint="one document in each row",
            ) from self._unchecked
        if self._unchecked is not None:
            check_documents_apart(self._unchecked)
            self._unchecked = None

    def of_labels(self, found_BS: Tensor) -> Tensor:
        """Values that were found for the labels of a prepared batch, at the labels' own positions."""
        if not shifts_labels(self._model, self._loss):
            return found_BS
        return torch.cat([torch.zeros_like(found_BS[:, :1]), found_BS[:, :-1]], 1)

    def complete(self, outputs: Any, micro: Batch) -> Any:
        """A model's outputs for a micro-batch, with the tokens of all ranks. Collective."""
        if self._sequence.size == 1:
            return outputs
        share = SequenceShare.of_batch(micro, OF_TOKENS, self._sequence, self._method)
        samples = max(len(micro[key]) for key in OF_TOKENS & micro.keys())
        return share.complete(outputs, self._sequence, samples)

    @contextmanager
    def explained(self, micros: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
        """Raise ModelError for an exception inside the context that a mistake in the inputs explains."""
        try:
            yield
        except PlaitError:
            raise
        except Exception as error:
            for batch in micros:
                problem = self._problem(batch)
                if problem is not None:
                    raise problem from error
            raise

    def _problem(self, batch: Mapping[str, Tensor]) -> ModelError | None:
        if self._is_pretrained and not batch.keys() - set(self._labels):
            return ModelError(
                "the batch has no inputs for the model",
                given=f"only {', '.join(batch)}",
                expected="input_ids",
                hint="{'input_ids': ids, 'labels': ids}",
            )
        if (ids := batch.get("input_ids")) is not None and (problem := self._problem_of_ids(ids)) is not None:
            return problem
        labels = batch.get("labels")
        if labels is not None and self._task in _TOKEN_TASKS and labels.dtype not in _IDS:
            given = f"labels of {labels.dtype}"
            return ModelError(
                "labels of tokens must be integers", given=given, expected="torch.long", hint="labels.long()"
            )
        return None

    def _problem_of_ids(self, ids: Tensor) -> ModelError | None:
        given = f"input_ids of {ids.dtype} and shape {tuple(ids.shape)}"
        if ids.dtype not in _IDS:
            return ModelError(
                "token ids must be integers", given=given, expected="torch.long", hint="input_ids.long()"
            )
        if not ids.numel() or (self._task is not None and ids.ndim != 2):
            return ModelError(
                "token ids have the wrong shape",
                given=given,
                expected="(samples, tokens)",
                hint="input_ids.unsqueeze(0), for one sample",
            )
        if ids.device.type != "cpu" or self._vocabulary is None:
            return None
        outside = ids[(ids < 0) | (ids >= self._vocabulary)]
        if not outside.numel():
            return None
        return ModelError(
            "a token id is not in the model's vocabulary",
            given=f"input_ids with {int(outside[0])}",
            expected=f"0 to {self._vocabulary - 1}",
            hint="the model's own tokenizer",
        )


def on_device(
    batch: Mapping[str, Tensor],
    device: torch.device,
    compute: torch.dtype,
    inputs: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Move the batch; floating-point `inputs` (None: all but the labels) are cast to the compute dtype.

    The CPU does not wait for the GPU: entries are pinned first. Raises ModelError for an invalid batch.
    """
    check_is_batch(batch)
    pins, casts = device.type == "cuda", cast_entries(batch, inputs)
    return {
        key: (value.contiguous().pin_memory() if pins and value.device.type == "cpu" else value).to(
            device, compute if key in casts else value.dtype, non_blocking=True
        )
        for key, value in batch.items()
    }


def check_is_batch(batch: object) -> None:
    """Raise ModelError unless it is a dict of tensors with samples along dim 0."""
    if not isinstance(batch, Mapping):
        raise ModelError(
            "a batch is a dict of tensors",
            given=f"a {type(batch).__name__}",
            expected="the arguments of the model's forward by name, and labels, which only the loss receives",
            hint="{'input_ids': ids, 'labels': ids}",
        )
    invalid = next((_describe(*entry) for entry in batch.items() if not _is_entry(*entry)), None)
    if invalid or not batch:
        raise ModelError(
            "a batch is a dict of tensors with samples along dim 0",
            given=invalid or "an empty dict",
            expected="dense tensors with values, by name",
            hint="{'input_ids': ids, 'labels': ids}",
        )


def _is_entry(key: object, value: object) -> bool:
    if not isinstance(key, str) or not isinstance(value, Tensor) or not value.ndim:
        return False
    return value.layout is torch.strided and not (value.is_meta or value.is_quantized)


def _describe(key: object, value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{key!r}: {type(value).__name__}"
    return (
        f"{key!r}: a tensor of {value.dtype}, shape {tuple(value.shape)}, {value.layout}, on {value.device}"
    )


def check_same_batch(batch: Mapping[str, Tensor], grid: Group) -> None:
    """Raise PlanError on all ranks of `grid`, which hold one model, unless their batches are equal."""
    others = ranks_with_another_batch(batch, grid, next(iter(batch.values())).device)
    if others:
        shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
        raise PlanError(
            "ranks that share one model received different batches",
            given=f"rank {others[0]} has other values or shapes than rank {grid.ranks[0]}; here {shapes}",
            expected="the same complete rows on all of them: tp, pp and cp multiply ranks, not data",
            hint="the share of engine.data_rank, of engine.data_ranks",
        )


def ranks_with_another_batch(batch: Batch, group: Group, device: torch.device) -> list[int]:
    """The ranks whose batch differs from that of the first one. Collective."""
    if group.size == 1:
        return []
    checksums = torch.zeros(group.size, dtype=torch.long, device=device)
    all_gather(checksums, torch.tensor([_checksum(batch)], device=device), group)
    first, *_ = values = checksums.tolist()
    return [rank for rank, value in zip(group.ranks, values, strict=True) if value != first]


def _checksum(batch: Mapping[str, Tensor]) -> int:
    checksum = 0
    for key in sorted(batch):
        value = batch[key].detach()
        values = value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
        checksum = zlib.crc32(f"{key} {value.dtype} {tuple(value.shape)}".encode(), checksum)
        checksum = zlib.crc32(values, checksum)
    return checksum


@dataclass(frozen=True)
class Shares:
    """A data rank's share of each batch of a loader; `ranks`: the data ranks, `unit`: see `share_of`.

    Every rank iterates over it equally often. The loader's batches must be the same on all ranks, `everyone`:
    the first one of each pass is compared.
    """

    loader: Iterable[Batch]
    unit: int
    ranks: Group
    everyone: Group
    device: torch.device

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # TypeError for a loader without a length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(self.loader):
            check_is_batch(batch)
            if number == 0 and (others := ranks_with_another_batch(batch, self.everyone, self.device)):
                raise PlanError(
                    "ranks load different batches",
                    given=f"rank {others[0]} has other values or shapes than rank 0",
                    expected="a loader that yields the same batches in the same order on every rank",
                    hint="the same torch.manual_seed on all ranks, or a loader without engine.shard",
                )
            yield share_of(batch, self.unit, self.ranks)


def share_of(batch: Batch, unit: int, ranks: Group) -> dict[str, Tensor]:
    """Return this rank's samples of a global batch: consecutive, and a multiple of `unit`; the shares of two
    ranks differ by at most one `unit`. Raises PlanError if the batch is not a multiple of `unit`, or a rank
    would have no sample; on all ranks, as they have the same batch."""
    check_is_batch(batch)
    sizes = {key: value.shape[0] for key, value in batch.items()}
    num_samples, least = next(iter(sizes.values())), unit * ranks.size
    if len(set(sizes.values())) != 1 or num_samples % unit or num_samples < least:
        raise PlanError(
            "the batch does not divide over the data ranks",
            given=f"{sizes}, {ranks.size} data ranks" + (f", micro={unit}" if unit > 1 else ""),
            expected=f"tensors of one size along dim 0, {least} or more"
            + (f", a multiple of {unit}" if unit > 1 else ""),
            hint="drop_last=True in the loader"
            + ("; for evaluation, engine.shard(loader, trains=False)" if unit > 1 else ""),
        )
    own = share(num_samples, ranks.rank, ranks.size, unit)
    return {key: value[own] for key, value in batch.items()}
