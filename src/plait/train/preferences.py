"""The batches of a run; of pairs, with log-probabilities by the model before training, their reference; of a
distillation, with tokens of the teacher.

[Note: precomputed references]
They are computed for the batches that the run will read, in their order, so that a pair's first values are
those of its first micro-batch: the same rows, padding and dtype, and so the same bits. They are stored by the
pair's index. A pair that a later batch reads again has its first values, also if both are in one batch, and
also in another micro-batch, where other padding may change the last bits. Files are complete or missing;
more steps, of a resumed run, add what they need.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from plait.api import parallelize
from plait.checkpoint import HuggingFaceFiles
from plait.checkpoint.base import identity_of_files
from plait.comm import World, all_reduce, broadcast
from plait.data.documents import Pairs
from plait.data.loader import Batch
from plait.data.tokenizer import read_tokenizer
from plait.engine.auto_compile import Facts
from plait.engine.distillation import with_teacher
from plait.engine.engine import Engine
from plait.engine.preferences import with_reference
from plait.errors import ConfigError
from plait.fileio import temp_path, writing
from plait.models.reward import text_config
from plait.models.task import REFERENCE
from plait.train.metrics import mean_loss
from plait.train.model import initial_model
from plait.train.prepare import ResolvedRun

Batched = Batch | list[Batch]


class RunBatches:
    """Loads this rank's share of a run's batches, with log-probabilities of the reference, or tokens of the
    teacher, if the recipe's loss needs them: then all ranks iterate together."""

    def __init__(self, run: ResolvedRun, engine: Engine, world: World) -> None:
        """Collective: builds the engine of the reference or teacher, or precomputes."""
        self._run, self._given, self._model = run, run.recipe.preference, engine
        self._engine: Any = engine
        self._stored: dict[bool, StoredLogProbs] = {}
        self._teacher = None if run.recipe.distillation is None else teacher_engine(run, engine, world)
        if not self._is_needed or self._given is None or self._given.reference == "adapters_off":
            return
        self._model = reference_engine(run, world)
        if self._given.reference == "precomputed":
            both = (True, False) if run.recipe.run.evaluate_every else (True,)
            for trains in both:
                self._stored[trains] = StoredLogProbs(run, engine, trains=trains)
                self._stored[trains].fill(self._model)
            self._model = engine  # the other one is freed

    @property
    def _is_needed(self) -> bool:
        return self._given is not None and self._given.options().needs_reference

    def training(self, numbers: range, *, pin_memory: bool) -> Iterator[Batched]:
        """Yield the training batches with these numbers."""
        ranks = self._engine.data_rank, self._engine.data_ranks
        batches = self._run.train_batches(numbers, *ranks, pin_memory=pin_memory)
        return self._added(batches, numbers, trains=True)

    def training_compiled(self, numbers: range, kept: Facts | None, *, pin_memory: bool) -> Iterator[Batched]:
        """As `training`, after the engine has chosen by the first one whether to compile, for all of them.
        `kept`: the facts of the choice to keep."""
        batches = self.training(numbers, pin_memory=pin_memory)
        if self._engine.plan.compile != "auto" or not numbers:
            return batches
        first = next(batches)
        if self._engine.compile_choice is None:  # not yet, as it is after a rollback
            self._engine.choose_compile(first, len(numbers), kept)
        return itertools.chain([first], batches)

    def evaluate(self, beat: Callable[..., None]) -> float:
        """Return the mean loss per target token over the validation batches, the same ones each time. `beat`:
        called before each, `slow=True` before the first."""
        pin_memory, results = self._engine.device.type == "cuda", []
        for number, batch in enumerate(self.validation(pin_memory=pin_memory)):
            beat(slow=number == 0)
            for part in [batch] if isinstance(batch, dict) else batch:
                results.append(self._engine.evaluate(part))
        return mean_loss(results)

    def validation(self, *, pin_memory: bool) -> Iterator[Batched]:
        """Yield the batches of an evaluation."""
        ranks = self._engine.data_group  # with servers, worker 0 evaluates by itself
        batches = self._run.validation_batches(ranks.rank, ranks.size, pin_memory=pin_memory)
        return self._added(batches, itertools.count(), trains=False)

    def _added(
        self, batches: Iterable[Batched], numbers: Iterable[int], *, trains: bool
    ) -> Iterator[Batched]:
        given = self._run.recipe.distillation
        for number, batch in zip(numbers, batches, strict=False):
            if given is not None and trains:
                yield with_teacher(self._teacher, batch, given.options())
            else:
                yield self._of_batch(number, batch, trains) if self._is_needed else batch

    def _of_batch(self, number: int, batch: Batched, trains: bool) -> Batched:
        if stored := self._stored.get(trains):
            return stored.added(number, batch)
        assert self._given is not None, "a reference without [preference]"
        given, found = self._given.options(), batch
        if self._given.reference == "adapters_off":
            with self._engine.adapters_off():
                found = with_reference(self._engine, batch, given)
        else:
            found = with_reference(self._model, batch, given)
        return found


def reference_folder(run: ResolvedRun) -> Path:
    """The files of the reference."""
    given = run.recipe.preference
    folder = None if given is None else given.reference_model or run.recipe.model.path
    assert folder is not None, "a recipe of pairs has a model"
    return folder


def reference_engine(run: ResolvedRun, world: World) -> Engine:
    """The engine of the frozen reference."""
    return _frozen_engine(run, reference_folder(run), world, run.recipe.model.tensor_plan)


def teacher_engine(run: ResolvedRun, student: Engine, world: World) -> Engine:
    """The engine of the frozen teacher. Raises ConfigError for other tokens than the student's."""
    given = run.recipe.distillation
    assert given is not None, "a teacher without [distillation]"
    teacher = _frozen_engine(run, given.teacher, world)
    sizes = [text_config(engine.model).vocab_size for engine in (teacher, student)]
    has_tokenizer = (given.teacher / "tokenizer.json").is_file()
    folders = (given.teacher, run.store.tokenizer_dir) if has_tokenizer else ()
    vocabularies = [read_tokenizer(folder).get_vocab() for folder in folders]
    if sizes[0] > sizes[1] or vocabularies[1:] != vocabularies[:-1]:
        raise ConfigError(
            "the teacher has other tokens than the student",
            given=f"{given.teacher}: {sizes[0]:,} tokens, and {sizes[1]:,} in the model",
            expected="two models of one tokenizer",
            hint="--set distillation.teacher=FOLDER",
        )
    return teacher


def _frozen_engine(
    run: ResolvedRun, folder: Path, world: World, tensor_plan: dict[str, str] | None = None
) -> Engine:
    """The engine of a frozen model, under the run's plan."""
    # The run has saved its own configuration.
    of_model = {"path": folder, "pretrained": True, "config": None}
    model, weights = initial_model(run.recipe.model.model_copy(update=of_model))
    model.requires_grad_(False)
    return parallelize(
        model, run.plan, optimizer=torch.optim.SGD, tensor_plan=tensor_plan, weights=weights, world=world
    )


class StoredLogProbs:
    """Log-probabilities of the tokens of one split. See [Note: precomputed references]."""

    def __init__(self, run: ResolvedRun, engine: Engine, *, trains: bool) -> None:
        """Reads what rank 0 has stored. Collective."""
        samples, _ = run.train_samples if trains else run.validation_samples
        assert isinstance(samples, Pairs), "a reference of samples that are no pairs"
        ranks = engine.data_rank, engine.data_ranks
        if trains:
            self._batches, self._numbers = run.train_shares(*ranks), range(run.recipe.run.steps)
        else:
            self._batches, self._numbers = run.validation_shares(*ranks)
        self._pairs, self._engine = samples, engine
        self._path = run.dir.path / f"reference.{'train' if trains else 'validation'}.{_identity(run)}.npy"
        stream = run.store.train if trains else run.store.validation
        dtype = np.float64 if engine.plan.precision == "fp64" else np.float32
        self._values = np.full(stream.num_tokens, np.nan, dtype)
        if engine.world.rank == 0 and self._path.exists():
            self._values[:] = np.load(self._path, allow_pickle=False)
        on_device = torch.from_numpy(self._values).to(engine.device)
        broadcast(on_device, engine.world.group, 0)
        self._values[:] = on_device.cpu().numpy()

    def fill(self, reference: Engine) -> None:
        """Compute the values that are missing, with the reference's engine. Collective."""
        before = np.isnan(self._values).sum()
        for number in self._numbers:
            spans = self._spans(number)
            if not any(np.isnan(self._values[span]).any() for span in spans):
                continue
            own = self._batches.own(number)
            flat = np.zeros(sum(span.stop - span.start for span in spans), self._values.dtype)
            stops = np.cumsum([span.stop - span.start for span in spans])
            found = with_reference(reference, self._batches[number])
            rows = [row for micro in _micros(found) for row in micro[REFERENCE].cpu().numpy()]
            for at, row in enumerate(rows, start=2 * own.start):
                length = spans[at].stop - spans[at].start
                flat[stops[at] - length : stops[at]] = row[:length]
            of_all = torch.from_numpy(flat).to(self._engine.device)
            all_reduce(of_all, reference.data_group, label="log-probabilities of the reference")
            for span, row in zip(spans, np.split(of_all.cpu().numpy(), stops[:-1]), strict=True):
                if np.isnan(self._values[span]).any():
                    self._values[span] = row
        if self._engine.world.rank == 0 and before != np.isnan(self._values).sum():
            with writing("cannot write the reference", self._path):
                temporary = temp_path(self._path)
                with temporary.open("wb") as file:
                    np.save(file, self._values, allow_pickle=False)
                temporary.replace(self._path)

    def _spans(self, number: int) -> list[slice]:
        """The tokens of each row of a batch, of all data ranks."""
        indices = self._batches.all_indices(number).tolist()
        return [self._pairs.span(index, answer) for index in indices for answer in (0, 1)]

    def added(self, number: int, batch: Batched) -> Batched:
        """The batch with this number, with the stored values."""
        own = self._batches.own(number)
        spans = iter(self._spans(number)[2 * own.start : 2 * own.stop])

        def of_micro(micro: Batch) -> Batch:
            rows, width = micro["labels"].shape
            values = [torch.from_numpy(self._values[next(spans)]) for _ in range(rows)]
            return {**micro, REFERENCE: torch.stack([pad(row, (0, width - len(row))) for row in values])}

        return of_micro(batch) if isinstance(batch, dict) else [of_micro(micro) for micro in batch]


def _identity(run: ResolvedRun) -> str:
    """A part of the names of files: another reference, or one in another dtype, has files of its own."""
    files = HuggingFaceFiles.open(reference_folder(run))
    text = f"{identity_of_files(files)['sha256']} {run.plan.base} {run.plan.precision}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _micros(batch: Batched) -> list[Batch]:
    return [batch] if isinstance(batch, dict) else batch
