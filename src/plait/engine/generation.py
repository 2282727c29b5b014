"""Generation of text with an engine's model, under its plan.

[Note: ranks that generate]
A batch is padded on the left. Its prompts pass through the model once, and then one token of each row a
forward; caches keep what layers have seen. Each stage of a pipeline has the caches of its own layers, each
rank of `tp` those of its heads. The ranks of one model have the same rows, those of `cp` all tokens of them;
the first rank of the last stage chooses the next tokens, and sends the ids and their log-probabilities to the
others, not logits. So these ranks decide alike when a row ends.

Ranks with other rows end at other steps. Where forwards communicate with them (for experts, or for weights
that are gathered unit by unit), all go on until the last row of all ends, and a rank without rows has one
that no caller sees.

[Note: weights of stage 3]
At ZeRO stage 3 all weights are gathered once for a generation, and freed after it, if on every rank they fit
into the available memory next to the caches (as in DeepSpeed's hybrid engine, 2308.01320, section 4).
Otherwise each forward gathers unit by unit, as in training. Forwards of weights that are gathered once
communicate with no rank that has other rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from plait.comm import all_gather, all_reduce, broadcast, raise_on_all
from plait.comm.device import free_bytes
from plait.engine.build import EngineParts
from plait.engine.inputs import check_same_batch
from plait.engine.runner import MicrobatchRunner
from plait.engine.sampling import TokenChooser
from plait.engine.stage import StageRunner
from plait.errors import ConfigError, PlaitError, shown
from plait.models import pretrained_base, vocabulary_size
from plait.models.caches import StageCache, check_generates
from plait.parallel.experts.capacity import MicroSizes, sizes_of
from plait.parallel.zero.sharded_model import ShardedStage
from plait.plan.sampling import Sampling
from plait.plan.schedule import Schedule, forwards_only

OnTokens = Callable[[list[tuple[int, int]]], None]  # of (row, token id), in each step


@dataclass
class Generated:
    """The continuation of a prompt.

    ids        the new tokens, without a stop token, but with those of a stop string
    finish     "stop": by a stop token or string; "length": `max_new_tokens`, or the positions of the model
    log_probs  of each of `ids`, in nats: the log-softmax of the model's logits over the full vocabulary,
               before temperature, penalty and limits
    """

    ids: list[int] = field(default_factory=list)
    finish: Literal["length", "stop"] | None = None
    log_probs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class GenerationMemory:
    """Bytes of a rank in a generation, besides those that it holds between steps. See [Note: weights of stage
    3].

    weights    of others' shards, if all are gathered
    caches     estimated at the last token; None if the model does not run on meta
    available  to this rank
    """

    weights: int
    caches: int | None
    available: int

    @property
    def gathers_once(self) -> bool:
        return self.weights + (self.caches or 0) <= self.available


@dataclass
class Rows:
    """The rows of a batch: all tokens so far, padded on the left, and 0 for padding."""

    ids_BS: Tensor
    mask_BS: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> "Rows":
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(ids)) + [*ids] for ids in prompts])
        lengths_B1 = torch.tensor([[len(ids)] for ids in prompts])
        mask = (torch.arange(longest) >= longest - lengths_B1).long()
        return cls(ids.to(device), mask.to(device))

    def append(self, ids_B1: Tensor, are_kept_B1: Tensor) -> None:
        self.ids_BS = torch.cat([self.ids_BS, ids_B1], 1)
        self.mask_BS = torch.cat([self.mask_BS, are_kept_B1.to(self.mask_BS)], 1)


class Generator:
    """Generates with the stages of an engine. See [Note: ranks that generate]."""

    def __init__(self, parts: EngineParts, runner: MicrobatchRunner, schedule: Schedule) -> None:
        self._parts, self._runner = parts, runner
        self._groups, self._device = parts.context.groups, parts.context.device
        self._schedule = forwards_only(schedule, 1)
        model_ranks = self._groups.same_samples
        self._first_of_last = runner.last_rank * (model_ranks.size // self._groups.pp.size)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        tokenizer: Any,
        on_tokens: OnTokens | None,
        start: int,
    ) -> list[Generated]:
        """See `Engine.generate`."""
        module = self._module
        check_generates(module)
        limits, first = self._checked(prompts, sampling, tokenizer)
        given = prompts if prompts else [[0]]
        indices = range(start + first, start + first + len(given))
        rows, chooser = Rows.of(given, self._device), TokenChooser(sampling, indices)
        texts = RowTexts([Generated() for _ in given], given, limits or [0], sampling, tokenizer, module)
        self._runner.check_no_messages()
        check_same_batch({"ids": rows.ids_BS, "mask": rows.mask_BS}, self._groups.same_samples)
        parts = {number: stage.module_part for number, stage in self._parts.stages.items()}
        caches = {n: StageCache(part.module, is_stage=part.modules is not None) for n, part in parts.items()}
        is_first = self._groups.same_samples.rank == 0
        shape = len(given), rows.ids_BS.shape[1] + max(limits, default=0)
        eager = torch.compiler.set_stance("force_eager")  # shapes change with each token
        with self._runner.inference(), eager, self._weights(shape) as joins:
            while self._go_on(texts.is_unfinished, joins=joins):
                logits_BV = self._forward(rows, caches)
                chosen_B2 = torch.zeros(len(given), 2, dtype=torch.float64, device=self._device)
                if logits_BV is not None:
                    chosen_B2 = chooser.choose(logits_BV, texts.seen)
                broadcast(chosen_B2, self._groups.same_samples, self._first_of_last)
                new = texts.add(chosen_B2.tolist())
                if on_tokens is not None and is_first and new:
                    on_tokens(new)
                are_kept = [[not row.finish] for row in texts.rows]
                rows.append(chosen_B2[:, :1].long(), torch.tensor(are_kept, device=self._device))
        return texts.rows[: len(prompts)]

    @property
    def _module(self) -> Any:
        return next(iter(self._parts.stages.values())).module_part.module

    def _forward(self, rows: Rows, caches: dict[int, StageCache]) -> Tensor | None:
        """One forward of the new tokens; on the last stage, the logits of the last, (B, V)."""
        inputs = {number: cache.inputs(rows.ids_BS, rows.mask_BS) for number, cache in caches.items()}
        new_ids: Tensor = [of_stage.pop("input_ids") for of_stage in inputs.values()][-1]
        micro, found = {"input_ids": new_ids}, list[Tensor]()
        (sizes,) = self._runner.sizes([micro])
        stages = {
            number: _TokenPass(stage, micro, inputs[number], sizes, found.append)
            for number, stage in self._parts.stages.items()
        }
        # Some blocks return their attention weights, of all tokens so far.
        key = ("tokens", tuple(new_ids.shape), rows.ids_BS.shape[1])
        self._runner.run_stages(self._schedule, stages, [key])
        for cache in caches.values():
            cache.advance(*new_ids.shape)
        return found[0] if found else None

    def memory(self, batch_shape: tuple[int, int]) -> GenerationMemory:
        """See `Engine.generation_memory`."""
        check_generates(self._module)
        gathered = sum(stage.sharded.unsharder.sharded_bytes for stage in self._parts.stages.values())
        return GenerationMemory(gathered, self._runner.cache_bytes(batch_shape), free_bytes(self._device))

    @contextmanager
    def _weights(self, batch_shape: tuple[int, int]) -> Iterator[bool]:
        """Context of all forwards of (rows, tokens). Yields whether ranks with other rows join them. See
        [Note: weights of stage 3]."""
        context, gathers_once = self._parts.context, True
        if not context.keeps_params_unsharded:
            gathers_once = not context.mesh.world.any_flag(not self.memory(batch_shape).gathers_once)
        with ExitStack() as stack:
            for stage in self._parts.stages.values() if gathers_once else ():
                stack.enter_context(stage.sharded.unsharder.unsharded())
            yield context.plan.ep > 1 or not gathers_once

    def _go_on(self, is_unfinished: bool, *, joins: bool) -> bool:
        if not joins:
            return is_unfinished
        flag = torch.tensor([is_unfinished], dtype=torch.int32, device=self._device)
        all_reduce(flag, self._groups.tokens, "max")
        return bool(flag.item())

    def _checked(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any
    ) -> tuple[list[int], int]:
        """Return how many tokens may follow each prompt, and the index of the first one in the global batch.
        Raises ConfigError, on all ranks."""
        limits, problem, group = list[int](), None, self._groups.batch_shares
        try:
            limits = _limits(prompts, sampling, tokenizer, pretrained_base(self._module))
        except PlaitError as error:
            problem = error
        raise_on_all(problem, group, self._device)
        counts = torch.zeros(group.size, dtype=torch.long, device=self._device)
        all_gather(counts, torch.tensor([len(limits)], device=self._device), group)
        return limits, sum(counts.tolist()[: group.rank])


def _limits(prompts: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any, base: Any) -> list[int]:
    """How many tokens may follow each prompt. Raises ConfigError."""
    if sampling.stop_strings and tokenizer is None:
        raise ConfigError(
            "stop strings need a tokenizer, which makes text of tokens",
            given=f"stop_strings={[*sampling.stop_strings]}",
            expected="engine.generate(..., tokenizer=...)",
            hint="transformers.AutoTokenizer.from_pretrained(folder)",
        )
    vocabulary = vocabulary_size(base) or 1 << 63
    positions = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 63
    for number, ids in enumerate(prompts):
        are_ids = isinstance(ids, Sequence) and all(isinstance(each, int) for each in ids)
        if not are_ids or not ids or not 0 <= min(ids) <= max(ids) < vocabulary or len(ids) >= positions:
            raise ConfigError(
                "the model cannot continue a prompt",
                given=f"prompt {number}: {len(ids)} ids, {shown(ids)}" if are_ids else f"{shown(ids)}",
                expected=f"a list of 1 to {positions - 1} token ids below {vocabulary}",
                hint="tokenizer(text)['input_ids']; a shorter prompt",
            )
    return [min(sampling.max_new_tokens, positions - len(ids)) for ids in prompts]


class RowTexts:
    """The continuations of a batch's rows so far."""

    def __init__(
        self,
        rows: list[Generated],
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
        tokenizer: Any,
        module: Any,
    ) -> None:
        """`limits`: the new tokens of each row; one with 0 is finished."""
        self.rows, self._limits, self._tokenizer = rows, limits, tokenizer
        self.seen = [[*prompt] for prompt in prompts]  # with the new tokens
        self._strings = tuple(sampling.stop_strings)
        self._tail = max((len(each.encode()) for each in self._strings), default=0) + 8  # tokens
        stops = sampling.stop_tokens
        self._stops = _end_tokens(pretrained_base(module)) if stops is None else {*stops}
        for row, limit in zip(rows, limits, strict=True):
            row.finish = None if limit else "length"

    @property
    def is_unfinished(self) -> bool:
        return any(row.finish is None for row in self.rows)

    def add(self, chosen: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
        """Add a token and its log-probability to each row that is not finished; return (row, token)."""
        new = []
        for number, (row, limit, (token, log_prob)) in enumerate(
            zip(self.rows, self._limits, chosen, strict=True)
        ):
            if row.finish is not None:
                continue
            if int(token) in self._stops:
                row.finish = "stop"
                continue
            row.ids.append(int(token))
            self.seen[number].append(int(token))
            row.log_probs.append(log_prob)
            new.append((number, int(token)))
            if self._has_stop_string(row.ids):
                row.finish = "stop"
            elif len(row.ids) == limit:
                row.finish = "length"
        return new

    def _has_stop_string(self, ids: list[int]) -> bool:
        if not self._strings:
            return False
        text: str = self._tokenizer.decode(ids[-self._tail :])
        return any(each in text for each in self._strings)


def _end_tokens(base: Any) -> set[int]:
    configs = (getattr(base, "generation_config", None), base.config.get_text_config(decoder=True))
    found = next((c.eos_token_id for c in configs if c is not None and c.eos_token_id is not None), ())
    return {found} if isinstance(found, int) else {*found}


@dataclass
class _TokenPass:
    """A forward of new tokens through one of this rank's stages."""

    stage: StageRunner
    micro: dict[str, Tensor]
    others: dict[str, Any]  # arguments of forward
    sizes: MicroSizes | None
    on_logits: Callable[[Tensor], Any]
    sharded: ShardedStage = field(init=False)

    def __post_init__(self) -> None:
        self.sharded = self.stage.sharded

    def forward(self, _: int, received: Any) -> Any:
        with sizes_of(self.sizes):
            outputs = self.stage.outputs(self.micro, received, others=self.others)
        return self.on_logits(outputs.logits[:, -1]) if self.stage.is_last else outputs
