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

[Note: groups in flight]
Under `pp` the rows are divided into as many groups as there are ranks of stages. While a group's next tokens
are chosen on the last stage and sent, the first one computes another group. Each rank runs the groups in
turn, and waits for the tokens of a group just before its next forward. Each row is a group of its own where
the model's positions depend on the longest row: see `depends_on_longest`.

[Note: weights of stage 3]
At ZeRO stage 3 all weights are gathered once for a generation, and freed after it, if on every rank they fit
into the available memory next to the caches (as in DeepSpeed's hybrid engine, 2308.01320, section 4).
Otherwise each forward gathers unit by unit, as in training. Forwards of weights that are gathered once
communicate with no rank that has other rows. Quantized bases are dequantized once, or unit by unit, by the
same rule.

[Note: errors in a generation]
A rank that raised between two forwards would leave others waiting for it. So an error of `on_tokens`, or
logits that are no numbers, are raised at the end, on all ranks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor

from plait.comm import Work, all_gather, all_reduce, raise_on_all, start_broadcast
from plait.comm.device import free_bytes
from plait.engine.build import EngineParts
from plait.engine.inputs import check_same_batch
from plait.engine.runner import MicrobatchRunner
from plait.engine.sampling import TokenChooser
from plait.engine.stage import StageRunner
from plait.errors import ConfigError, ModelError, PlaitError, RunError, shown
from plait.models import StageModule, pretrained_base, vocabulary_size
from plait.models.caches import StageCache, check_generates, depends_on_longest
from plait.parallel.experts.capacity import MicroSizes, sizes_of
from plait.parallel.zero.sharded_model import ShardedStage
from plait.plan.grid import share
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


class Conversation:
    """The caches of a prompt and its answer, for calls of `Engine.generate` with one prompt. A prompt that
    begins with all tokens that were read is read on from there; any other from its beginning, as are all
    after the weights or the adapters in use have changed, and by mixers that have states."""

    def __init__(self) -> None:
        self._ids, self._caches, self._weights = list[int](), dict[int, StageCache](), object()

    def of(self, weights: object) -> Self:
        """Return itself; without caches if they are of other weights. `weights`: equal for equal ones."""
        if weights != self._weights:
            self._ids, self._caches, self._weights = [], {}, weights
        return self

    def resume(self, group: "RowGroup") -> None:
        """Give the caches to a group before its first forward, if they are of the beginning of its row."""
        ids, caches, self._ids, self._caches = self._ids, self._caches, [], {}
        if len(group.rows) == 1 and len(ids) < len(group.seen[0]) and group.seen[0][: len(ids)] == ids:
            group.caches.update(caches)

    def keep(self, group: "RowGroup") -> None:
        """Take the caches of a group of one row after its last forward."""
        cache = next(iter(group.caches.values()))
        if len(group.rows) == 1 and all(each.reads_on for each in group.caches.values()):
            self._ids, self._caches = group.ids_BS[0, : cache.num_seen].tolist(), group.caches


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
        conversation: Conversation,
    ) -> list[Generated]:
        """See `Engine.generate`."""
        check_generates(self._module)
        limits, first, num_groups = self._checked(prompts, sampling, tokenizer)
        missing, first = max(num_groups - len(prompts), 0), first + start
        given, limits = [*prompts, *[[0]] * missing], [*limits, *[0] * missing]
        self._runner.check_no_messages()
        stages = {number: stage.module_part for number, stage in self._parts.stages.items()}
        indices, of_all = range(first, first + len(given)), (sampling, tokenizer, stages, self._device)
        owns = [share(len(given), number, num_groups) for number in range(num_groups)]
        groups = [RowGroup(indices[own], given[own], limits[own], *of_all) for own in owns]
        for group in groups:
            check_same_batch(group.agreed, self._groups.same_samples)
        conversation.resume(groups[0])
        shape = len(given), max(map(len, given)) + max(limits)
        eager = torch.compiler.set_stance("force_eager")  # shapes change with each token
        problem: PlaitError | None = None  # see [Note: errors in a generation]
        with self._runner.inference(), eager, self._weights(shape) as joins:
            goes_on = True
            while goes_on:
                goes_on = False
                for group in groups:
                    new = [(index - first, token) for index, token in group.receive()]
                    if on_tokens is not None and new and not self._groups.same_samples.rank:
                        try:
                            on_tokens(new)
                        except Exception as error:  # whatever the caller's function raises
                            problem, on_tokens = _failed(error), None
                    if self._go_on(group.is_unfinished, joins=joins):
                        self._send(group)
                        goes_on = True
        problems = [problem, *(group.problem for group in groups)]
        raise_on_all(next((each for each in problems if each), None), self._groups.world, self._device)
        conversation.keep(groups[0])
        return [row for group in groups for row in group.rows][: len(prompts)]

    @property
    def _module(self) -> Any:
        return next(iter(self._parts.stages.values())).module_part.module

    def _send(self, group: "RowGroup") -> None:
        """Run one forward of a group's new tokens, and start to send the next ones."""
        inputs = {number: cache.inputs(group.ids_BS, group.mask_BS) for number, cache in group.caches.items()}
        new_ids: Tensor = [of_stage.pop("input_ids") for of_stage in inputs.values()][-1]
        micro, chosen_B2 = {"input_ids": new_ids}, [group.chosen_B2.new_zeros(group.chosen_B2.shape)]
        (sizes,) = self._runner.sizes([micro])

        def choose(logits_BV: Tensor) -> None:
            chosen_B2[0] = group.chooser.choose(logits_BV, group.seen)

        stages = {
            number: _TokenPass(stage, micro, inputs[number], sizes, choose)
            for number, stage in self._parts.stages.items()
        }
        # Some blocks return their attention weights, of all tokens so far.
        key = ("tokens", tuple(new_ids.shape), group.ids_BS.shape[1])
        self._runner.run_stages(self._schedule, stages, [key])
        for cache in group.caches.values():
            cache.advance(*new_ids.shape)
        (group.chosen_B2,) = chosen_B2
        group.sent = start_broadcast(group.chosen_B2, self._groups.same_samples, self._first_of_last)

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
        if not context.keeps_params_unsharded or context.plan.base != "none":
            gathers_once = not context.mesh.world.any_flag(not self.memory(batch_shape).gathers_once)
        with ExitStack() as stack:
            for stage in self._parts.stages.values() if gathers_once else ():
                stack.enter_context(stage.sharded.unsharder.unsharded())
            yield context.plan.ep > 1 or not (gathers_once or context.keeps_params_unsharded)

    def _go_on(self, is_unfinished: bool, *, joins: bool) -> bool:
        if not joins:
            return is_unfinished
        flag = torch.tensor([is_unfinished], dtype=torch.int32, device=self._device)
        all_reduce(flag, self._groups.tokens, "max")
        return bool(flag.item())

    def _checked(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any
    ) -> tuple[list[int], int, int]:
        """Return how many tokens may follow each prompt, the index of the first one in the global batch, and
        the number of groups of rows, the same on all ranks: those of the pipeline, or one for each row, if
        it would depend on others or padding would exceed the model's positions. Raises ConfigError, on all
        ranks."""
        limits, problem, group = list[int](), None, self._groups.batch_shares
        positions = _positions(pretrained_base(self._module))
        try:
            limits = _limits(prompts, sampling, tokenizer, pretrained_base(self._module))
        except PlaitError as error:
            problem = error
        raise_on_all(problem, group, self._device)
        longest = max((len(ids) + limit for ids, limit in zip(prompts, limits, strict=True)), default=0)
        padded = max(map(len, prompts), default=0) + max(limits, default=0)
        sizes = torch.zeros(3 * group.size, dtype=torch.long, device=self._device)
        all_gather(sizes, torch.tensor([len(limits), longest, padded], device=self._device), group)
        counts, stages = sizes[::3].tolist(), self._groups.pp.size
        num_groups = stages if min(counts) >= stages else 1
        if depends_on_longest(self._module, int(sizes[1::3].max())) or int(sizes[2::3].max()) > positions:
            num_groups = max(counts)
        return limits, sum(counts[: group.rank]), num_groups


def _failed(error: Exception) -> PlaitError:
    """Return the error of all ranks for one of `on_tokens`, which is its cause on this rank."""
    problem = RunError(
        "on_tokens has raised an error",
        given=f"{type(error).__name__}: {error}",
        expected="a function that takes a list of (row, token id)",
        hint="its traceback, on the first rank of the model",
    )
    problem.__cause__ = error
    return problem


def _limits(prompts: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any, base: Any) -> list[int]:
    """How many tokens may follow each prompt. Raises ConfigError."""
    if sampling.stop_strings and tokenizer is None:
        raise ConfigError(
            "stop strings need a tokenizer, which makes text of tokens",
            given=f"stop_strings={[*sampling.stop_strings]}",
            expected="engine.generate(..., tokenizer=...)",
            hint="transformers.AutoTokenizer.from_pretrained(folder)",
        )
    vocabulary, positions = vocabulary_size(base) or 1 << 63, _positions(base)
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


def _positions(base: Any) -> int:
    return getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 63


class RowGroup:
    """Rows of one forward, and what they have generated. See [Note: groups in flight].

    ids_BS, mask_BS   all tokens so far, padded on the left, and 0 for padding
    chosen_B2, sent   of the last forward: see `TokenChooser.choose`; in transfer until `receive`
    problem           see [Note: errors in a generation]
    """

    def __init__(
        self,
        indices: Sequence[int],
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
        tokenizer: Any,
        stages: Mapping[int, StageModule],
        device: torch.device,
    ) -> None:
        """`indices`: in the global batch. `limits`: the new tokens of each row; one with 0 is finished."""
        longest = max(map(len, prompts))
        ids_BS = [[0] * (longest - len(ids)) + [*ids] for ids in prompts]
        mask_BS = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        self.ids_BS, self.mask_BS = torch.tensor([ids_BS, mask_BS], device=device)
        self.chosen_B2 = torch.zeros(len(prompts), 2, dtype=torch.float64, device=device)
        self.sent: Work | None = None
        self.problem: PlaitError | None = None
        self.chooser, self._indices = TokenChooser(sampling, indices), indices
        self.caches = {n: StageCache(s.module, is_stage=s.modules is not None) for n, s in stages.items()}
        self.rows = [Generated(finish=None if limit else "length") for limit in limits]
        self.seen = [[*prompt] for prompt in prompts]  # with the new tokens
        self._limits, self._tokenizer = limits, tokenizer
        self._strings = tuple(sampling.stop_strings)
        self._tail = max((len(each.encode()) for each in self._strings), default=0) + 8  # tokens
        base = pretrained_base(next(iter(stages.values())).module)
        self._stops = _end_tokens(base) if sampling.stop_tokens is None else {*sampling.stop_tokens}

    @property
    def agreed(self) -> dict[str, Tensor]:
        """Return what the ranks of a model must have alike, or they would end rows at other steps."""
        ends = repr((self._limits, sorted(self._stops), sorted(self._strings)))
        return {"ids": self.ids_BS, "mask": self.mask_BS, "ends": torch.tensor([*ends.encode()])}

    @property
    def is_unfinished(self) -> bool:
        return self.problem is None and any(row.finish is None for row in self.rows)

    def receive(self) -> list[tuple[int, int]]:
        """Wait for the tokens of the last forward, if any, and add them to rows that are not finished. Return
        (index, token) of each."""
        sent, self.sent, new = self.sent, None, []
        if sent is None:
            return []
        sent.wait()
        for number, (token, log_prob) in enumerate(self.chosen_B2.tolist()):
            row, token = self.rows[number], int(token)
            if row.finish is None and math.isnan(log_prob):
                self.problem = self.problem or _no_numbers(self._indices[number], len(row.ids))
            elif row.finish is None and token in self._stops:
                row.finish = "stop"
            elif row.finish is None:
                row.ids.append(token)
                row.log_probs.append(log_prob)
                self.seen[number].append(token)
                new.append((self._indices[number], token))
                if self._has_stop_string(row.ids):
                    row.finish = "stop"
                elif len(row.ids) == self._limits[number]:
                    row.finish = "length"
        are_kept_B1 = torch.tensor([[not row.finish] for row in self.rows]).to(self.mask_BS)
        self.ids_BS = torch.cat([self.ids_BS, self.chosen_B2[:, :1].long()], 1)
        self.mask_BS = torch.cat([self.mask_BS, are_kept_B1], 1)
        return new

    def _has_stop_string(self, ids: list[int]) -> bool:
        if not self._strings:
            return False
        text: str = self._tokenizer.decode(ids[-self._tail :])
        return any(each in text for each in self._strings)


def _no_numbers(index: int, num_new: int) -> PlaitError:
    return ModelError(
        "the logits of the next token are no numbers",
        given=f"prompt {index}, after {num_new} new tokens",
        expected="finite weights, and activations in the range of the plan's precision",
        hint="precision=bf16 or fp32; a checkpoint from before the weights became NaN",
    )


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
