"""Check the assignment of a model to stages against the batches that it is given."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from plait.errors import ModelError
from plait.models.stages.assign import bypassing, check_flow, untraceable
from plait.models.stages.dataflow import Dataflow, trace_dataflow
from plait.models.task import label_keys
from plait.plan.stages import StageAssignment, stage_of_gap

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class DataflowCheck:
    """Traces each new kind of batch through a copy of the model on meta, before the stages run it.

    A model may compute differently with other inputs: build a mask, or return a loss of its experts. Ranks of
    a pipeline have the same batches, so all of them raise, or none.
    """

    def __init__(
        self,
        meta_model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        assignment: StageAssignment,
        batch: Mapping[str, Tensor] | None,
    ) -> None:
        """`batch`: the example that the assignment was traced with; None: token ids."""
        self.meta_model = meta_model
        self._blocks = [(name, self.meta_model.get_submodule(name)) for name, _ in blocks]
        self._assignment = assignment
        inputs = ("input_ids",) if batch is None else self._inputs(batch)
        self._checked: set[Hashable] = {frozenset(inputs)} if assignment.is_traced else set()
        self._has_hooks = any(_remove_hooks(module) for module in self.meta_model.modules())

    def check(self, batch: Mapping[str, Tensor], loss: Callable[..., Any] | None) -> None:
        """Raise ModelError if the stages would not compute the same as the model for this kind of batch."""
        inputs = frozenset(self._inputs(batch))
        if inputs in self._checked:
            return
        if self._has_hooks and not self._assignment.is_traced:
            raise ModelError(
                "cannot trace the values that the hooks of the model's modules collect",
                given=f"forward hooks, and inputs {', '.join(sorted(inputs))}",
                expected="an example of a batch before the model is split",
                hint="parallelize(..., example_batch=batch), or remove the hooks",
            )
        flow = trace_dataflow(self.meta_model, self._blocks, batch, loss)
        if (error := flow.error or flow.loss_error) is not None:
            raise untraceable(error, is_models=flow.is_models)
        check_flow(flow, self._assignment.blocks)
        self._check_carried(flow)
        self._check_parameters(flow)
        unexpected = flow.changing - self._assignment.changing
        if unexpected:
            raise _changing_error(sorted(unexpected)[0])
        self._checked.add(inputs)

    def _inputs(self, batch: Mapping[str, Tensor]) -> list[str]:
        labels = label_keys(self.meta_model)
        return [key for key in batch if key not in labels]

    def _check_carried(self, flow: Dataflow) -> None:
        for skip in sorted(flow.skip_reads):
            needed = replace(self._assignment, skips=frozenset({skip}))
            for stage in range(needed.num_stages):
                if not {*needed.carried_into(stage)} <= {*self._assignment.carried_into(stage)}:
                    raise bypassing(
                        skip,
                        len(self._blocks),
                        given="stages that were assigned without an example of a batch like this one",
                        expected="an example of a batch, to trace what the stages need from each other",
                        hint="parallelize(..., example_batch=batch)",
                    )

    def _check_parameters(self, flow: Dataflow) -> None:
        for name, _ in self.meta_model.named_parameters():
            for gap in flow.gaps_of(name):
                stage = stage_of_gap(self._assignment.blocks, gap)
                if stage not in self._assignment.stages_with(name):
                    raise ModelError(
                        f"stage {stage} computes with {name}, which was assigned to another stage",
                        given=f"{name} on stage {self._assignment.owner[name]}, where it is registered",
                        expected="an example of a batch, to trace the use of parameters before the split",
                        hint="parallelize(..., example_batch=batch)",
                    )


def _changing_error(name: str) -> ModelError:
    return ModelError(
        "with these inputs a block's forward sets an attribute that other stages may read",
        given=name,
        expected="an example of a batch with all inputs, before the model is split",
        hint="parallelize(..., example_batch=batch)",
    )


def _remove_hooks(module: nn.Module) -> bool:
    """Remove a user's hooks, and return whether there were any."""
    found = False
    for key in _HOOKS:
        hooks = getattr(module, key)
        for number, hook in list(hooks.items()):
            if not str(getattr(hook, "__module__", "")).startswith("transformers."):
                del hooks[number]
                found = True
    return found
