"""Micro-batches on their way over the stages of this rank: training, evaluation, outputs.

[Note: one seed per stage]
Stages of one model draw from generators of their own, or blocks in the same place of two stages would drop
the same elements. The first stage's seed has no stage in it: a model of one stage draws as it always did.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.comm import broadcast
from plait.engine.build import EngineParts
from plait.engine.stage import StageRunner
from plait.errors import ModelError, PlanError
from plait.models import BlockOutputs, seeded
from plait.parallel import ShardedStage
from plait.parallel.pipeline import PackedOutput, pack, unpack
from plait.plan.schedule import Schedule, Span, forwards_only, one_micro_batch, peak_activation_bytes

Micro = Mapping[str, Tensor]
OnLoss = Callable[[Tensor, int | Tensor], Any]  # (summed loss, targets) -> what backward starts from


class MicrobatchRunner:
    """Runs an engine's schedule, and others over the same stages."""

    def __init__(self, parts: EngineParts, schedule: Schedule) -> None:
        self._parts = parts
        self._schedule = schedule
        self._last = schedule.num_stages - 1
        self._is_broken = False  # an exception has left messages that nobody will take

    @property
    def has_last_stage(self) -> bool:
        return self._last in self._parts.stages

    @property
    def last_rank(self) -> int:
        """The place on `pp` of the last stage."""
        return self._schedule.rank_of[self._last]

    def only_stage(self, asked: str) -> StageRunner:
        """Raises PlanError unless the model is one stage."""
        if self._last:
            raise PlanError(
                "a pipeline's micro-batches are under way together",
                given=f"{asked}, and a model in {self._last + 1} stages",
                expected="engine.step with a step's micro-batches, engine.evaluate or engine.outputs",
            )
        return self._parts.stages[0]

    def train(
        self,
        micros: Sequence[Micro],
        take: OnLoss,
        seed: tuple[int, int],
        data_rank: int,
        *,
        records: bool = False,
    ) -> list[Span]:
        """Forward and backward of a step; when what was done, with `records`."""

        def seeds(stage: int, micro: int) -> Any:
            more = (stage,) if stage else ()
            return seeded(self._device, *seed, micro, data_rank, *more)

        return self._run(self._schedule, micros, take, seeds, records=records)

    def probe(self, micro: Micro, take: OnLoss) -> None:
        """Forward and backward of one micro-batch."""
        self._run(one_micro_batch(self._schedule), [micro], take, None)

    def evaluate(self, micros: Sequence[Micro], take: OnLoss, *, missing: int = 0) -> None:
        """Forwards alone, in eval mode. `missing`: micro-batches that other data ranks have and this one has
        not. Where forwards gather, it takes part in theirs, by forwards of a sample that does not count."""
        gathers = not self._parts.held.cut.whole_parameters
        again = [{key: value[:1] for key, value in micros[0].items()}] * (missing if gathers else 0)
        left = len(micros)

        def take_own(loss: Tensor, count: int | Tensor) -> None:
            nonlocal left
            if left:
                left -= 1
                take(loss, count)

        with self.eval_mode(), torch.no_grad():
            schedule = forwards_only(self._schedule, len(micros) + len(again))
            self._run(schedule, [*micros, *again], take_own, None)

    def outputs(self, micro: Micro, pick: Callable[[Any], Any] | None) -> Any:
        """What `pick` takes of the model's outputs (None: all), on every rank of the pipeline."""
        found: list[Any] = []
        with self.eval_mode(), torch.no_grad():
            self._run(forwards_only(self._schedule, 1), [micro], found.append, None, of_outputs=True)
            return self._told(lambda: found[0] if pick is None else pick(found[0]))

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        modules = [m for stage in self._parts.stages.values() for m in stage.part.module.modules()]
        modes = [(module, module.training) for module in modules]
        for stage in self._parts.stages.values():
            stage.part.module.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @property
    def _device(self) -> torch.device:
        return self._parts.pipeline.device

    def _run(
        self,
        schedule: Schedule,
        micros: Sequence[Micro],
        take: Callable[..., Any],
        seeds: Callable[[int, int], Any] | None,
        *,
        of_outputs: bool = False,
        records: bool = False,
    ) -> list[Span]:
        if self._is_broken:
            raise ModelError(
                "a step was interrupted while its micro-batches were on their way between stages",
                expected="a new start of all ranks",
            )
        stages = {
            number: _StagePass(stage, micros, take, seeds, number, of_outputs)
            for number, stage in self._parts.stages.items()
        }
        try:
            trains = any(stage.part.module.training for stage in self._parts.stages.values())
            keys = [(_key_of(micro), trains) for micro in micros]
            return self._parts.pipeline.run(schedule, stages, keys, records=records)
        except BaseException:
            self._is_broken = self._last > 0 and schedule.num_ranks > 1
            raise

    def _told(self, make: Callable[[], Any]) -> Any:
        """What the last stage's rank makes. Where that fails, all raise."""
        group, root = self._parts.groups.pipeline, self.last_rank
        if group.size == 1:
            return make()
        text, failure = b"", None
        if group.rank == root:
            try:
                parcel, tensors = pack(make(), of="the model")
                text = parcel.to_json().encode()
            except Exception as error:
                failure = error
        length = torch.tensor([-1 if failure is not None else len(text)], device=self._device)
        broadcast(length, group, root)
        if failure is not None:
            raise failure
        if length.item() < 0:
            raise ModelError("the last stage could not give the model's outputs", hint="see what it raised")
        said = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._device)
        if group.rank == root:
            said.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        broadcast(said, group, root)
        parcel = PackedOutput.from_json(said.cpu().numpy().tobytes().decode())
        if group.rank != root:
            tensors = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in parcel.specs]
        tensors = [tensor.contiguous() for tensor in tensors]
        for tensor in tensors:
            broadcast(tensor, group, root)
        return unpack(parcel, tensors)

    # --- bytes

    def activation_bytes(self) -> int | None:
        """The most that is kept for backward at a time."""
        rest_bytes = self._parts.pipeline.rest_bytes
        kept = {
            number: None
            if stage.activation_bytes is None
            else (stage.activation_bytes, rest_bytes.get(number, 0))
            for number, stage in self._parts.stages.items()
        }
        return self._peak(kept)

    def estimated_bytes(self, batch_shape: tuple[int, int], device: torch.device) -> int | None:
        twin = self._parts.twin
        whole = None if twin is None else BlockOutputs(twin, device)
        kept = {
            number: stage.estimated_bytes(batch_shape, device, whole)
            for number, stage in self._parts.stages.items()
        }
        return self._peak(kept)

    def _peak(self, kept: Mapping[int, tuple[int, int] | None]) -> int | None:
        return peak_activation_bytes(self._schedule, self._parts.groups.pipeline.rank, kept)


@dataclass
class _StagePass:
    """One of this rank's stages, in one pass."""

    stage: StageRunner
    micros: Sequence[Micro]
    take: Callable[..., Any]
    seeds: Callable[[int, int], Any] | None
    number: int
    of_outputs: bool
    zero: ShardedStage = field(init=False)

    def __post_init__(self) -> None:
        self.zero = self.stage.zero

    def forward(self, number: int, received: Any) -> Any:
        micro, stage = self.micros[number], self.stage
        seeds = None if self.seeds is None else self.seeds(self.number, number)
        with seeds or nullcontext(), stage.measured() if seeds else nullcontext():  # a probe is no step
            if not stage.is_last:
                return stage.outputs(micro, received)
            if self.of_outputs:
                return self.take(stage.outputs(micro, received))
            return self.take(*stage.summed_loss(micro, received))


def _key_of(micro: Micro) -> Hashable:
    """Equal where all that a stage returns has the same shapes."""
    return tuple((name, tuple(value.shape), str(value.dtype)) for name, value in sorted(micro.items()))
