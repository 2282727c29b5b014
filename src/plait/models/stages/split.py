"""A model's stages: each is the model itself, in whose forward other stages' blocks do nothing.

[Note: how a model's forward runs in stages]
What travels from stage to stage is what a stage's last block returned, whatever that is. A stage's shell is
a copy of the model's structure that holds its own blocks, and `PassThrough`s in the place of all others. The
one before its first own block returns what was received, so the model's own code takes it apart as it does
in one process. Those before that return NaN in the same form: a model that uses an earlier block's output
besides (a skip connection over blocks) cannot be cut there, and NaN tells. When the last own block has
returned, the forward ends: an exception carries the output to the shell's forward, which returns it. Hooks
of the block have run by then, and hooks of the shell see a return like any other.

Parameters outside of blocks that the stage does not compute with are hollow (models/hollow.py).
"""

import copy
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig

from plait.errors import ModelError
from plait.models.placeholder import (
    make_placeholder,
    placeholder_keys,
    placeholder_like,
    placeholders,
    resize_placeholders,
)
from plait.plan.sharding import Style, TPPlan
from plait.plan.stages import StageAssignment


@dataclass(frozen=True)
class StageModule:
    """What one stage computes with.

    module      called with a micro-batch's inputs it runs the stage, and returns what the next stage is to
                receive; that of the last stage what the model returns
    blocks      its own ones, under their names in the model
    before      the name of the block whose output it receives; None for the first stage
    """

    number: int
    module: nn.Module
    blocks: list[tuple[str, nn.Module]]
    before: str | None = None

    def has(self, name: str, *, hollow: bool = False) -> bool:
        """Whether the module of that name in the model is here: with its values, or `hollow` as well."""
        try:
            found = self.module.get_submodule(name)
        except AttributeError:  # it is inside another stage's block
            return False
        return hollow or not any(True for _ in placeholders(found))

    def tensor_plan(self, whole: TPPlan) -> TPPlan:
        """What of the model's plan this stage is cut by.

        What comes before its first block runs on hollow parameters, and uncut, as nobody wants the result.
        Yet where the stage looks up in a table of its own whose features are cut over rows (a tied
        embedding), these meet what the other layers there give: then those are cut too, and their hollow
        parameters have to be, by `shard_placeholders`.
        """
        return whole.within(partial(self.has, hollow=self._meets_cut_features(whole)))

    def shard_placeholders(self, whole: TPPlan, row: int, col: int) -> None:
        """Makes hollow parameters look like this place's pieces, where `tensor_plan` cuts their layers. Once:
        afterwards they are pieces."""
        if not self._meets_cut_features(whole):
            return
        hollow = dict(placeholders(self.module))
        pieces = {cut.name: cut for cut in whole.parameters if cut.name in hollow}
        shapes = {
            name: [
                sum(stop - start for start, stop in ranges)
                for ranges in cut.ranges(hollow[name].shape, row, col)
            ]
            for name, cut in pieces.items()
        }
        resize_placeholders(self.module, shapes)

    def _meets_cut_features(self, whole: TPPlan) -> bool:
        """Whether what runs before the first block meets features that are cut over rows."""
        own = whole.within(self.has).layers
        is_table = any(layer.style in (Style.VOCABULARY, Style.FEATURE_EMBEDDING) for layer in own)
        return self.before is not None and whole.rows > 1 and is_table

    def receiving(self, structure: Any) -> AbstractContextManager[None]:
        return receiving(self.module, structure)

    def check_taint(self, outputs: Any, received: Any = None) -> None:
        """Raises ModelError if something that another stage should have computed reached these outputs.

        Looks at all numbers; waits for the device.
        """
        if _has_nan(outputs) and not _has_nan(received) and isinstance(self.module.forward, StageForward):
            raise _leak_error(self.number, self.module, self.module.forward.inbox)


@contextmanager
def receiving(module: nn.Module, structure: Any) -> Iterator[None]:
    """While inside, a stage's module, or a copy of it, gets `structure` from the stage before."""
    assert isinstance(module.forward, StageForward), "a whole model receives nothing"
    inbox = module.forward.inbox
    inbox.received, inbox.is_filled = structure, True
    try:
        yield
    finally:
        inbox.clear()


def split_stage(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    cut: StageAssignment,
    stage: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> StageModule:
    """One stage of the model, made of the model's own blocks, parameters and modules outside of blocks.

    Modules that have parameters of several stages, or none, are copied, and buffers with them, so they must
    have their values; so are modules in blocks that an earlier stage's blocks have too, as one module cannot
    hold the parameters of two stages. `dtype`: in which the other stages' parameters look to be, if not in
    their own. The model remains as it is, yet a stage's last block gets a twin that shares all it has.
    """
    if cut.num_stages == 1:
        return StageModule(0, model, list(blocks))
    start, stop = cut.blocks[stage]
    inbox = StageInbox(stage)
    memo = _modules_not_copied(model, blocks, cut, stage)
    for name, parameter in model.named_parameters():
        is_own = stage in cut.stages_with(name)
        memo[id(parameter)] = parameter if is_own else placeholder_like(parameter, device, dtype)
    own = []
    earlier = {module for _, block in blocks[:start] for module in block.modules()}
    for number, (name, block) in enumerate(blocks):
        if start <= number < stop:
            mine = _unshare_modules(block, earlier, memo)
            is_end = number == stop - 1 and stage < cut.num_stages - 1
            own.append((name, _end_stage_after(mine) if is_end else mine))
            memo[id(block)] = own[-1][1]
        else:
            memo[id(block)] = PassThrough(name, block, inbox, feeds=number == start - 1)
    shell = copy.deepcopy(model, memo)
    _install_placeholders(shell, inbox)
    shell.forward = StageForward(shell.forward, inbox, ends=stage < cut.num_stages - 1)
    return StageModule(stage, shell, own, blocks[start - 1][0] if stage else None)


def foreign_modules(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], cut: StageAssignment, stage: int
) -> set[nn.Module]:
    """What a stage need not draw: others' blocks, and modules outside of blocks whose parameters it does not
    compute with. It runs the latter all the same, so those with buffers are not among them."""
    start, stop = cut.blocks[stage]
    inner = {module for _, block in blocks for module in block.modules()}
    own = {p for name, p in model.named_parameters() if stage in cut.stages_with(name)}
    found = {block for number, (_, block) in enumerate(blocks) if not start <= number < stop}
    for module in set(model.modules()) - inner:
        below = set(module.parameters())
        if below and below.isdisjoint(own) and inner.isdisjoint(module.modules()):
            found |= set() if any(True for _ in module.buffers()) else {module}
    return found


def _modules_not_copied(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], cut: StageAssignment, stage: int
) -> dict[int, Any]:
    """What is not copied: configurations, and modules outside of blocks that are this stage's alone."""
    inner = {id(module) for _, block in blocks for module in block.modules()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    memo: dict[int, Any] = {}
    for module in model.modules():
        if id(module) in inner:
            continue
        memo |= _configs(module)
        below = [names[id(parameter)] for parameter in module.parameters()]
        is_own = below and all(cut.stages_with(name) == (stage,) for name in below)
        if is_own and not any(id(m) in inner for m in module.modules()):
            memo[id(module)] = module
    return memo


def _unshare_modules(block: nn.Module, earlier: Set[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """The block; a copy with the same parameters and buffers where it shares modules with `earlier` ones."""
    if block in earlier or earlier.isdisjoint(block.modules()):
        return block
    memo |= {id(buffer): buffer for buffer in block.buffers()}
    for module in block.modules():
        memo |= _configs(module)
        if earlier.isdisjoint(module.modules()):
            memo[id(module)] = module
    copied: nn.Module = copy.deepcopy(block, memo)
    return copied


def _configs(module: nn.Module) -> dict[int, Any]:
    return {id(value): value for value in vars(module).values() if isinstance(value, PreTrainedConfig)}


def _install_placeholders(shell: nn.Module, inbox: "StageInbox") -> None:
    """Foreign parameters leave the shell's lists of parameters; who runs with them is noted."""
    for name, module in shell.named_modules():
        for key, held in list(module._parameters.items()):
            if held is not None and not isinstance(held, nn.Parameter):
                make_placeholder(module, key, held)
        if placeholder_keys(module):
            module.register_forward_pre_hook(_RunRecorder(name, inbox))


class StageInbox:
    """What a stage received, for one forward, and how far that forward is."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.ran: set[str] = set()  # modules with hollow parameters, in any forward so far
        self.is_taken = False
        self.clear()

    def clear(self) -> None:
        self.received: Any = None
        self.is_filled = False
        self._nans: Any = None

    def take(self) -> Any:
        self.is_taken = True
        return self.received

    def nans(self) -> Any:
        """As received, with NaN for every number; made once."""
        if self._nans is None:
            self._nans = tree_map_only(Tensor, _nan_like, self.received)
        return self._nans


def _nan_like(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan) if tensor.is_floating_point() else tensor


class PassThrough(nn.Module):
    """Stands for another stage's block. It has what the model's code may ask a block, such as its type."""

    def __init__(self, name: str, block: nn.Module, inbox: StageInbox, *, feeds: bool) -> None:
        """`feeds`: it is the one before the stage's first block."""
        super().__init__()
        for key, value in vars(block).items():
            if not key.startswith("_") and isinstance(value, _PLAIN_TYPES):
                setattr(self, key, value)
        self.__dict__["_stage_inbox"] = inbox
        self.__dict__["_stage_block"] = name
        self.__dict__["_stage_feeds"] = feeds

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        inbox: StageInbox = self.__dict__["_stage_inbox"]
        if inbox.is_taken or not inbox.is_filled:
            raise _out_of_order(inbox.stage, f"met {self.__dict__['_stage_block']} out of order")
        return inbox.take() if self.__dict__["_stage_feeds"] else inbox.nans()


_PLAIN_TYPES = (bool, int, float, str, tuple, type(None), torch.dtype, PreTrainedConfig)


class _EndOfStage(Exception):
    """Not an error: the last block of a stage has returned this."""

    def __init__(self, output: Any) -> None:
        super().__init__("a stage's last block was called outside of its stage")
        self.output = output


def _end_stage_after(block: nn.Module) -> nn.Module:
    """The block, hooks and all, but that the stage ends when a call of it is over.

    A twin of a class of its own that shares the block's attributes: no hook could do it, as hooks that come
    after it would not run.
    """
    kind = type(block)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise _EndOfStage(kind.__call__(self, *args, **kwargs))

    ending = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    twin: nn.Module = object.__new__(ending)
    twin.__dict__ = block.__dict__
    forward = twin.__dict__.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is block:  # one that somebody put on the instance
        twin.forward = MethodType(forward.__func__, twin)
    return twin


class StageForward:
    """The forward of a stage's shell. See [Note: how a model's forward runs in stages]."""

    def __init__(self, forward: Any, inbox: StageInbox, *, ends: bool) -> None:
        """`ends`: before the model's forward does, with the last own block."""
        self.forward = forward
        self.inbox = inbox
        self.ends = ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inbox = self.inbox
        assert inbox.is_filled == (inbox.stage > 0), f"stage {inbox.stage} runs with what it has received"
        inbox.is_taken = inbox.stage == 0
        has_ended = False
        try:
            output = self.forward(*args, **kwargs)
        except _EndOfStage as end:
            output, has_ended = end.output, True
        except ModelError:
            raise
        except Exception as error:
            error.add_note(f"(this was stage {inbox.stage} of a model; it has no other stage's blocks)")
            raise
        if has_ended != self.ends or not inbox.is_taken:
            raise _out_of_order(inbox.stage, "did not come to the end of its blocks")
        return output


def _out_of_order(stage: int, what: str) -> ModelError:
    return ModelError(
        "the model does not call each of its blocks once, one after the other",
        given=f"stage {stage} {what}",
        expected="a forward that calls all blocks, in the order in which they are dealt to stages",
        hint="no layerdrop; blocks=[module, ...] in forward order; or no pipeline",
    )


class _RunRecorder:
    """A forward pre-hook that notes that a module with hollow parameters ran."""

    def __init__(self, name: str, inbox: StageInbox) -> None:
        self._name, self._inbox = name, inbox

    def __call__(self, *_: Any) -> None:
        self._inbox.ran.add(self._name)


def _has_nan(values: Any) -> bool:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_meta]
    return any(bool(torch.isnan(t).any()) for t in tensors if t.is_floating_point() or t.is_complex())


def _leak_error(stage: int, shell: nn.Module, inbox: StageInbox) -> ModelError:
    names = dict.fromkeys(name for name, _ in placeholders(shell))
    ran = [name for name in names if name.rpartition(".")[0] in inbox.ran]
    return ModelError(
        f"stage {stage} cannot compute without what other stages have",
        given=f"its result is NaN; it ran without the values of {', '.join(ran) or 'earlier blocks'}",
        expected="between blocks goes only what the block before returned: what lies outside of them is used "
        "before the first or after the last, and no block takes an earlier one's output",
        hint="let the blocks return what later ones need, or a plait.Chain of modules that do",
    )
