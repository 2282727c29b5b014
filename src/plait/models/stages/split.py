"""Pipeline stages of a model: each is the model itself, with other stages' blocks replaced by pass-throughs.

[Note: forward of a stage]
Stages send each other the output of a stage's last block, of any structure. A stage's shell (shell.py) has
the model's structure with the stage's own blocks, and a `PassThrough` in place of each other one. The one
before the first own block returns the received output, which the model's own code unpacks as it does in one
process. Those before that return their blocks' outputs where this stage or a later one reads them (skip
connections, an encoder's output), as stages send these along. All others return NaN in the received
structure, which reveals a use that the run on meta did not show. When the last own block has returned, the
forward ends: an exception carries the output to the shell's forward, which returns it. Hooks of the block
have run by then, and hooks of the shell see an ordinary return.

A last stage without blocks receives the last block's output like any other. A first one without blocks sends
the first argument of the first block's call, and the next stage calls that block with it in place of its own.

Parameters outside of blocks that the stage does not use are placeholders (shell.py [Note: placeholders]).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from plait.errors import ModelError
from plait.models.stages.assign import out_of_order
from plait.models.stages.inbox import StageInbox, message_of
from plait.models.stages.shell import Shell, StageModules, placeholder_like, placeholders, placeholders_of
from plait.models.tensors import first_argument, tensors_in, with_first_argument
from plait.models.transformers_types import is_pretrained_config
from plait.plan.sharding import TPPlan
from plait.plan.stages import StageAssignment


@dataclass(frozen=True)
class StageModule:
    """The module of one stage.

    module          called with a micro-batch's inputs, runs the stage and returns the next stage's input; on
                    the last stage, the model's output
    blocks          the stage's own, under their names in the model
    earlier         the names of the blocks of earlier stages, by number: it receives the output of the last.
                    If there are none, -1 and the name of the first block, whose input it receives
    carried         the numbers of others whose outputs it receives
    modules         its modules by the model's; None if it is the model
    """

    number: int
    module: nn.Module
    blocks: list[tuple[str, nn.Module]]
    earlier: Mapping[int, str] = field(default_factory=dict)
    carried: tuple[int, ...] = ()
    modules: StageModules | None = None

    def received_from(self, output_of: Callable[[str], Any]) -> Any:
        """Return what the stage receives, out of the outputs of the model's blocks by name."""
        return message_of(output_of, self.earlier, self.carried)

    @property
    def begins_with_input(self) -> bool:
        """The stage receives the input of the first block, which is its own."""
        return -1 in self.earlier

    def has(self, name: str, *, include_placeholders: bool = False) -> bool:
        """Return whether the stage has the model's module of that name, with its values or placeholders."""
        try:
            module = self.module.get_submodule(name)
        except AttributeError:  # it is inside another stage's block
            return False
        if isinstance(module, PassThrough):
            return False
        return include_placeholders or not any(True for _ in placeholders(module))

    def tp_plan(self, plan: TPPlan) -> TPPlan:
        """Return the part of the model's plan that applies to this stage.

        Layers before its first block run on placeholders, and unsharded, as the result is discarded. But
        where features are sharded over rows, the model's code may combine their results with those of
        blocks, or read their shapes: then they are sharded too, and `shard_placeholders` must shard their
        placeholders.
        """
        return plan.within(partial(self.has, include_placeholders=self._shards_placeholders(plan)))

    def shard_placeholders(self, plan: TPPlan, row: int, col: int) -> None:
        """Give placeholders the shapes of this rank's shards, where `tp_plan` shards their layers. Call once:
        afterwards they are shards."""
        if not self._shards_placeholders(plan):
            return
        shardings = {param.name: param for param in plan.parameters}
        for name, placeholder in list(placeholders(self.module)):
            if name in shardings:
                dims = shardings[name].ranges(placeholder.shape, row, col)
                shape = [sum(stop - start for start, stop in ranges) for ranges in dims]
                owner, _, key = name.rpartition(".")
                of_owner = placeholders_of(self.module.get_submodule(owner))
                of_owner[key] = placeholder.flatten()[0].expand(*shape)

    def _shards_placeholders(self, plan: TPPlan) -> bool:
        return bool(self.earlier) and plan.rows > 1

    def check_taint(self, outputs: Any, received: Any = None) -> None:
        """Raise ModelError if another stage's values were needed for these outputs.

        Reads all values; synchronizes with the device.
        """
        if _has_nan(outputs) and not _has_nan(received) and isinstance(self.module.forward, StageForward):
            raise _leak_error(self.number, self.module, self.module.forward.inbox)


@contextmanager
def receiving(module: nn.Module, structure: Any) -> Iterator[None]:
    """Make `structure` the input of a stage's module, or of a copy of it, inside the context."""
    assert isinstance(module.forward, StageForward), "a model that is not split receives nothing"
    inbox = module.forward.inbox
    inbox.fill(structure)
    try:
        yield
    finally:
        inbox.clear()


def split_stage(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    assignment: StageAssignment,
    stage: int,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shares_state: bool = True,
) -> StageModule:
    """Build one stage from the model's own blocks, and modules outside of blocks whose parameters it alone
    has.

    It has shells for the other modules outside of blocks, which share their state with the model unless
    `shares_state` is False; and copies of modules in blocks that an earlier stage's blocks share, as one
    module cannot hold the parameters of two stages. `dtype`: of the placeholders for other stages'
    parameters, if not their own. The model is not changed, but a stage's last block gets a second object
    that shares its attributes.
    """
    if assignment.num_stages == 1:
        return StageModule(0, model, list(blocks))
    start, stop = assignment.blocks[stage]
    is_last = stage == assignment.num_stages - 1
    sends = () if is_last else assignment.carried_into(stage + 1)
    inbox = StageInbox(stage, sends, (start, stop))
    parameters = [(p, stage in assignment.stages_with(name)) for name, p in model.named_parameters()]
    foreign = {id(p): placeholder_like(p, device, dtype) for p, is_own in parameters if not is_own}
    modules = _own_modules(model, blocks, assignment, stage)
    memo: dict[int, Any] = {id(parameter): parameter for parameter, _ in parameters}
    own = []
    earlier = {module for _, block in blocks[:start] for module in block.modules()}
    for number, (name, block) in enumerate(blocks):
        if start <= number < stop:
            unshared = _unshare_modules(block, earlier, memo)
            is_end = number == stop - 1 and not is_last
            begins = number == 0 < stage
            if is_end or begins or number in sends:
                unshared = _observed(unshared, inbox, None if is_end else number, begins=begins)
            elif not is_last:
                unshared.register_forward_hook(partial(_add_output, inbox, number))
            own.append((name, unshared))
            modules[block] = unshared
        else:
            modules[block] = PassThrough(name, block, inbox, assignment.changing, number)
    of_blocks = {block for _, block in blocks}
    of_stage = StageModules(inbox, modules, of_blocks, foreign, shares_state=shares_state)
    shell = of_stage.of(model)
    of_stage.translate_attributes()
    for name, module in shell.named_modules():
        if placeholders_of(module):
            module.register_forward_pre_hook(partial(_record_run, name, inbox))
    shell.forward = StageForward(shell, inbox, ends=not is_last)
    if not is_last and isinstance(shell, Shell):
        shell.drop_output_hooks()
    names = {number: blocks[number][0] for number in range(start)}
    if stage and not start:
        names[-1] = blocks[0][0]
    return StageModule(stage, shell, own, names, assignment.carried_into(stage), of_stage)


def foreign_modules(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], assignment: StageAssignment, stage: int
) -> set[nn.Module]:
    """The modules whose weights a stage need not draw: others' blocks, and modules outside of blocks whose
    parameters it does not use. It runs the latter anyway, so those with buffers are not included."""
    start, stop = assignment.blocks[stage]
    inner = {module for _, block in blocks for module in block.modules()}
    own = {p for name, p in model.named_parameters() if stage in assignment.stages_with(name)}
    foreign = {block for number, (_, block) in enumerate(blocks) if not start <= number < stop}
    for module in set(model.modules()) - inner:
        below = set(module.parameters())
        if below and below.isdisjoint(own) and inner.isdisjoint(module.modules()):
            foreign |= set() if any(True for _ in module.buffers()) else {module}
    return foreign


def _own_modules(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]], assignment: StageAssignment, stage: int
) -> dict[nn.Module, nn.Module]:
    """The modules outside of blocks that only this stage has, each with itself."""
    inner = {module for _, block in blocks for module in block.modules()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[nn.Module, nn.Module] = {}
    for module in set(model.modules()) - inner:
        below = [names[id(parameter)] for parameter in module.parameters()]
        is_own = below and all(assignment.stages_with(name) == (stage,) for name in below)
        if is_own and inner.isdisjoint(module.modules()):
            found[module] = module
    return found


def _unshare_modules(block: nn.Module, earlier: Set[nn.Module], memo: dict[int, Any]) -> nn.Module:
    """Return the block, or a copy with the same parameters and buffers if it shares `earlier` modules."""
    if block in earlier or earlier.isdisjoint(block.modules()):
        return block
    memo |= {id(buffer): buffer for buffer in block.buffers()}
    for module in block.modules():
        memo |= {id(value): value for value in vars(module).values() if is_pretrained_config(value)}
        if earlier.isdisjoint(module.modules()):
            memo[id(module)] = module
    return copy.deepcopy(block, memo)


class ForeignModuleError(ModelError, AttributeError):
    """An attribute of a block that is on another stage; an AttributeError for `hasattr`."""


class ForeignModule:
    """A module in a block on another stage, of which the model's code may read what torch declares as
    constant, and the keys of an nn.ModuleDict, also of the modules in it. nn.TransformerEncoder reads whether
    its first block has batches first."""

    def __init__(self, name: str, module: nn.Module, stage: int) -> None:
        constants = getattr(module, "__constants__", ())
        self.__dict__.update({key: value for key, value in vars(module).items() if key in constants})
        self.__dict__.update(_foreign_modules(name, module, stage), _name=name, _stage=stage)
        if isinstance(module, nn.ModuleDict):
            self.__dict__["keys"] = partial(tuple, tuple(module))

    def __getattr__(self, key: str) -> Any:
        if "_name" not in self.__dict__ or key.startswith("__"):
            raise AttributeError(key)
        raise _foreign_module_error(f"{self._name}.{key}", self._stage)


def _foreign_modules(name: str, module: nn.Module, stage: int) -> dict[str, ForeignModule]:
    return {key: ForeignModule(f"{name}.{key}", child, stage) for key, child in module.named_children()}


def _foreign_module_error(attribute: str, stage: int) -> ForeignModuleError:
    return ForeignModuleError(
        "an attribute of a block on another stage is read outside of the block",
        given=f"{attribute}, on stage {stage}",
        expected="a forward that only calls the blocks",
        hint="copy the value to an attribute of the model before parallelize; or no pipeline",
    )


class PassThrough(nn.Module):
    """A placeholder for another stage's block, with the attributes that the model's code may read."""

    def __init__(
        self, name: str, block: nn.Module, inbox: StageInbox, changing: Set[str], number: int
    ) -> None:
        """`changing`: names of attributes that a block's forward sets, which cannot be read here."""
        self.__dict__["_stage_original"] = lambda: block  # read at each access; and not copied
        mode = block.training
        super().__init__()  # sets `training`
        self.training = mode
        self.__dict__.update(_foreign_modules(name, block, inbox.stage))
        self.__dict__.update(_stage_inbox=inbox, _stage_block=name, _stage_number=number)
        self.__dict__["_stage_changing"] = changing

    @property
    def training(self) -> bool:
        """The mode of the block."""
        return bool(self.__dict__["_stage_original"]().training)

    @training.setter
    def training(self, value: bool) -> None:
        self.__dict__["_stage_original"]().training = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in self.__dict__.get("_stage_changing", ()):
            return super().__getattr__(name)
        if name in self.__dict__["_stage_changing"]:
            raise ModelError(
                f"{name} of {self.__dict__['_stage_block']} is set in another stage",
                given=f"stage {self.__dict__['_stage_inbox'].stage} reads what a block's forward sets",
                expected="blocks that return what later ones and the model need",
                hint="return it with the block's output, and pass it on; or no pipeline",
            )
        value = _attributes(self.__dict__["_stage_original"]()).get(name, self)
        if isinstance(value, _PLAIN_TYPES) or is_pretrained_config(value):
            return value
        raise _foreign_module_error(
            f"{self.__dict__['_stage_block']}.{name}", self.__dict__["_stage_inbox"].stage
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inbox: StageInbox = self.__dict__["_stage_inbox"]
        if inbox.ends_before == self.__dict__["_stage_number"]:
            raise _EndOfStage(first_argument(args, kwargs))
        if inbox.is_taken or not inbox.is_filled:
            raise out_of_order(f"stage {inbox.stage} called {self.__dict__['_stage_block']} out of order")
        number: int = self.__dict__["_stage_number"]
        inbox.is_taken = number == inbox.fed
        return inbox.output_of(number)


def _attributes(block: nn.Module) -> dict[str, Any]:
    """The block's attributes, and those of its classes below nn.Module."""
    classes = [cls for cls in type(block).__mro__ if not issubclass(nn.Module, cls)]
    return {key: value for of in (*classes[::-1], block) for key, value in vars(of).items()}


_PLAIN_TYPES = (bool, int, float, str, tuple, type(None), torch.dtype)


class _EndOfStage(Exception):
    """Not an error: carries the output of a stage's last block, or the input of the first stage's next."""

    def __init__(self, output: Any) -> None:
        super().__init__("a stage's last block was called outside of its stage")
        self.output = output


def _observed(block: nn.Module, inbox: StageInbox, number: int | None, *, begins: bool) -> nn.Module:
    """Return the block, including its hooks, such that the inbox keeps the output of its calls under this
    number. None: the stage ends when a call returns. `begins`: a call takes what the stage has received as
    its first argument.

    It is a second object, of a class of its own, that shares the block's attributes: a hook cannot do it, as
    the hooks after it would not run.
    """
    cls = type(block)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inbox: StageInbox = self.__dict__["_stage_inbox"]
        if begins:
            if inbox.is_taken:
                raise out_of_order(f"stage {inbox.stage} called its first block twice")
            args, kwargs = with_first_argument(inbox.take(), args, kwargs)
        output = cls.__call__(self, *args, **kwargs)
        if number is None:
            raise _EndOfStage(output)
        inbox.add(number, output)
        return output

    observed_class = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    observed: nn.Module = object.__new__(observed_class)
    observed.__dict__ = block.__dict__
    observed.__dict__["_stage_inbox"] = inbox  # copied with the block
    forward = observed.__dict__.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is block:  # set on the instance
        observed.forward = MethodType(forward.__func__, observed)
    return observed


class StageForward:
    """The forward of a stage's shell. See [Note: forward of a stage]."""

    def __init__(self, shell: nn.Module, inbox: StageInbox, *, ends: bool) -> None:
        """`ends`: after the last own block, before the end of the model's forward."""
        assert isinstance(shell, Shell), "a model has blocks, of which each stage has some"
        self.shell = shell
        self.inbox = inbox
        self.ends = ends

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inbox = self.inbox
        assert inbox.is_filled == (inbox.stage > 0), f"stage {inbox.stage} runs with its received input"
        inbox.is_taken = inbox.stage == 0
        has_ended = False
        try:
            output = self.shell.plain_forward()(*args, **kwargs)
        except _EndOfStage as end:
            output, has_ended = inbox.message(end.output), True
        except ModelError:
            raise
        except Exception as error:
            error.add_note(f"(raised in stage {inbox.stage} of a model, which has no other stage's blocks)")
            raise
        if has_ended != self.ends or not inbox.is_taken:
            raise out_of_order(f"stage {inbox.stage} did not call all of its blocks")
        return output


def _add_output(inbox: StageInbox, number: int, *call: Any) -> None:
    """A forward hook of blocks whose outputs are not sent, but their shapes."""
    inbox.add(number, call[-1])


def _record_run(name: str, inbox: StageInbox, *_: Any) -> None:
    """A forward pre-hook of modules with placeholders."""
    inbox.ran.add(name)


def _has_nan(values: Any) -> bool:
    tensors = [tensor for tensor in tensors_in(values) if not tensor.is_meta]
    return any(bool(torch.isnan(t).any()) for t in tensors if t.is_floating_point() or t.is_complex())


def _leak_error(stage: int, shell: nn.Module, inbox: StageInbox) -> ModelError:
    names = dict.fromkeys(name for name, _ in placeholders(shell))
    ran = [name for name in names if name.rpartition(".")[0] in inbox.ran]
    return ModelError(
        f"stage {stage} needs values that only other stages have",
        given=f"its result is NaN; it ran without the values of {', '.join(ran) or 'earlier blocks'}",
        expected="blocks that receive only the previous block's output: modules outside of blocks are used "
        "before the first or after the last, and no block uses an earlier one's output",
        hint="blocks that return what later ones need, or a plait.Chain of such modules",
    )
