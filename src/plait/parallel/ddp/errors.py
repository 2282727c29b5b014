"""Errors and one-time warnings of DistributedDataParallel.

Errors begin with torch's sentences, which programs match.
"""

import warnings
from collections.abc import Mapping, Sequence

from plait.errors import DDPError

_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Issue a UserWarning, once per process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=2)


STATIC_LATE = (
    "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
    "constructed."
)
CREATE_GRAPH = (
    "Using DistributedDataParallel with create_graph=True is not well-supported: higher-order "
    "gradients are those of this rank's gradient before averaging."
)
_DEBUG = "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one. "


def unfinished_reduction(
    missing: Sequence[int], names: Mapping[int, str], rank: int, *, find_unused: bool, static: bool
) -> DDPError:
    """Some gradients are missing. `missing`: parameter indices. `names`: may be empty."""
    outputs = "making sure all `forward` function outputs participate in calculating loss"
    hint = f"{outputs} (outputs are searched for in lists, tuples, dicts and dataclasses)"
    if static:
        cause = (
            "This error indicates that your training graph has changed in this iteration, e.g., one "
            "parameter is used in first iteration, but then got unused in the second iteration. this is not "
            "compatible with static_graph set to True."
        )
        hint = "static_graph=False, find_unused_parameters=True"
    elif find_unused:
        cause = (
            "This error indicates that your module has parameters that were not used in producing loss. "
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` "
            "outputs participate in computing loss."
        )
    else:
        cause = (
            "This error indicates that your module has parameters that were not used in producing loss. "
            "You can enable unused parameter detection by passing the keyword argument "
            "`find_unused_parameters=True` to `DistributedDataParallel`."
        )
    text = f"Parameter indices which did not receive grad for rank {rank}: " + " ".join(map(str, missing))
    named = [names[index] for index in missing if index in names]
    if named:
        text = f"Parameters which did not receive grad for rank {rank}: {', '.join(named)}\n{text}"
    else:
        hint += f". For parameter names, {_DEBUG}"
    return DDPError(f"{_UNFINISHED}{cause}\n{text}", hint=hint)


def marked_ready_twice(index: int, names: Mapping[int, str]) -> DDPError:
    """A parameter's hook ran a second time."""
    name = f" with name {names[index]}" if index in names else ""
    return DDPError(
        "Expected to mark a variable ready only once. This error is caused by a parameter that is used "
        "outside the `forward` function, or by several reentrant backward passes over one part of the model, "
        "such as `checkpoint(..., use_reentrant=True)` around it more than once.\n"
        f"Parameter at index {index}{name} has been marked as ready twice.",
        hint="static_graph=True if the graph never changes, or checkpoint(..., use_reentrant=False)",
    )


def too_many_passes(name: str, passes: int) -> DDPError:
    """An optimizer's gradients were computed more often than it expects."""
    return DDPError(
        "Gradients were computed more than backward_passes_per_step times before a call of step().",
        given=f"one more gradient of {name} after {passes}",
        expected="step() or synchronize() after the last backward",
        hint=f"backward_passes_per_step={passes + 1}, to accumulate gradients locally",
    )


def graph_changed(index: int, names: Mapping[int, str]) -> DDPError:
    """Under static_graph, a parameter that was unused in the first iteration received a gradient."""
    return DDPError(
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with static_graph set "
        "to True.",
        given=f"parameter {names.get(index, index)}",
        expected="the same parameters in every iteration",
        hint="static_graph=False, find_unused_parameters=True",
    )


def not_sparse(name: str, *, has_gradient: bool) -> DDPError:
    """A module with sparse=True did not produce a sparse gradient."""
    if not has_gradient:
        return DDPError(
            "Expected sparse gradient to be defined.",
            given=f"no gradient of {name} in this iteration",
            expected="every rank uses it in every iteration",
            hint="sparse=False",
        )
    return DDPError(
        "Expected variable to have sparse gradient.",
        given=f"a dense gradient of {name}, of a module with sparse=True",
        expected="only sparse gradients of it",
        hint="sparse=False, or no other use of its weight",
    )


def not_bucket_view(name: str) -> DDPError:
    return DDPError(
        "Detected at least one parameter gradient is not the expected DDP bucket view with "
        "gradient_as_bucket_view=True.",
        given=f"the gradient of {name}, replaced while it was being averaged",
        expected="gradients that stay the views that they were",
        hint="gradient_as_bucket_view=False, or change gradients after backward",
    )
