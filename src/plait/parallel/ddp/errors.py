"""Errors of DistributedDataParallel. They begin with torch's sentences, which programs look for.

Warnings that a process gives once.
"""

import warnings
from collections.abc import Mapping, Sequence

from torch import Tensor

from plait.errors import DDPError

_given: set[str] = set()


def warn_once(text: str) -> None:
    """As a UserWarning, whoever calls first."""
    if text not in _given:
        _given.add(text)
        warnings.warn(text, stacklevel=2)


TWICE = "register_comm_hook or register_builtin_comm_hook can only be called once."
NO_FUTURE = "DDP communication hook's callback must return a torch.futures.Future object, but got"
STATIC_LATE = (
    "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
    "constructed."
)
CREATE_GRAPH = (
    "Using DistributedDataParallel with create_graph=True is not well-supported: what is differentiated "
    "again is this rank's gradient, before it was averaged."
)
_DEBUG = "set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL"
_UNFINISHED = "Expected to have finished reduction in the prior iteration before starting a new one. "


def unfinished(
    missing: Sequence[int], names: Mapping[int, str], rank: int, *, find_unused: bool, static: bool
) -> DDPError:
    """Some buckets wait for gradients that have not come. `missing`: their parameters. `names`: if told."""
    outputs = "making sure all `forward` function outputs participate in calculating loss"
    hint = f"{outputs} (they are found in lists, tuples, dicts and dataclasses)"
    if static:
        why = (
            "This error indicates that your training graph has changed in this iteration, e.g., one "
            "parameter is used in first iteration, but then got unused in the second iteration. this is not "
            "compatible with static_graph set to True."
        )
        hint = "static_graph=False, find_unused_parameters=True"
    elif find_unused:
        why = (
            "This error indicates that your module has parameters that were not used in producing loss. "
            "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` "
            "outputs participate in computing loss."
        )
    else:
        why = (
            "This error indicates that your module has parameters that were not used in producing loss. "
            "You can have them looked for by passing the keyword argument `find_unused_parameters=True` to "
            "`DistributedDataParallel`."
        )
    told = f"Parameter indices which did not receive grad for rank {rank}: " + " ".join(map(str, missing))
    named = [names[index] for index in missing if index in names]
    if named:
        told = f"Parameters which did not receive grad for rank {rank}: {', '.join(named)}\n{told}"
    else:
        hint += f". To be told their names, {_DEBUG}"
    return DDPError(f"{_UNFINISHED}{why}\n{told}", hint=hint)


def twice(index: int, names: Mapping[int, str]) -> DDPError:
    """A parameter's hook has run a second time."""
    name = f" with name {names[index]}" if index in names else ""
    return DDPError(
        "Expected to mark a variable ready only once. This error is caused by a parameter that is used "
        "outside the `forward` function, or by several reentrant backward passes over one part of the model, "
        "such as `checkpoint(..., use_reentrant=True)` around it more than once.\n"
        f"Parameter at index {index}{name} has been marked as ready twice.",
        hint="static_graph=True if the graph never changes, or checkpoint(..., use_reentrant=False)",
    )


def changed(index: int, names: Mapping[int, str]) -> DDPError:
    """A parameter without gradient in the first iteration has one, under static_graph."""
    return DDPError(
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with static_graph set "
        "to True.",
        given=f"parameter {names.get(index, index)}",
        hint="static_graph=False, find_unused_parameters=True",
    )


def not_sparse(name: str, *, is_there: bool) -> DDPError:
    """A module that promises sparse gradients did not give one."""
    if not is_there:
        return DDPError(
            "Expected sparse gradient to be defined.",
            given=f"no gradient of {name} in this iteration",
            expected="every rank uses it in every iteration",
        )
    return DDPError(
        "Expected variable to have sparse gradient.",
        given=f"a dense gradient of {name}, of a module with sparse=True",
    )


def mismatch(text: str, name: str) -> DDPError:
    """Ranks have different models. `text`: torch's."""
    return DDPError(
        text.splitlines()[0], given=f"{name} differs between ranks", expected="the same model on all ranks"
    )


def not_the_gradients(result: object, numel: int, index: int) -> DDPError:
    """What the future of a communication hook holds is of no use."""
    given = f"{result.numel()} elements" if isinstance(result, Tensor) else f"a {type(result).__name__}"
    return DDPError(
        "The future of a DDP communication hook does not hold the gradients of its bucket.",
        given=given,
        expected=f"a tensor of {numel} elements, as `bucket.buffer()` of bucket {index} has them",
    )


def not_the_view(name: str) -> DDPError:
    return DDPError(
        "Detected at least one parameter gradient is not the expected DDP bucket view with "
        "gradient_as_bucket_view=True.",
        given=f"the gradient of {name}, replaced while it was being averaged",
        hint="gradient_as_bucket_view=False, or change gradients after backward",
    )
