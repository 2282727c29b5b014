"""Errors for mistakes in the use of `parallelize` and of an engine: wrong arguments, and calls from two
threads.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from plait.comm import World
from plait.errors import CheckpointError, ConfigError, ModelError, PlanError, RunError, shown
from plait.fileio import to_path
from plait.models import Chain
from plait.plan import Plan
from plait.plan.distillation import Distillation
from plait.plan.loss_scaling import LossScaling
from plait.plan.preference import Preference

M = TypeVar("M", bound=Callable[..., Any])


def refuse_shards_in_files(model: nn.Module) -> None:
    """Make `save_pretrained` of a model whose parameters are shards, or on other stages, raise ModelError
    unless it has a state dict: it would write those of one rank."""
    save = getattr(model, "save_pretrained", None)
    if save is None:
        return

    @functools.wraps(save)
    def save_full(*args: object, **kwargs: object) -> object:
        if kwargs.get("state_dict") is None:
            raise ModelError(
                "a rank has only its part of the model's parameters",
                given="engine.model.save_pretrained without state_dict=",
                expected="the full parameters",
                hint="full = engine.full_parameters() on all ranks, and on rank 0 "
                "engine.model.save_pretrained(folder, state_dict=full)",
            )
        return save(*args, **kwargs)

    model.__dict__["save_pretrained"] = save_full


def one_thread(method: M) -> M:
    """Make a method of an object with a lock `in_use` raise RunError while another thread is in one."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.in_use.acquire(blocking=False):
            raise RunError(
                "an engine cannot be used by two threads at once",
                given=f"engine.{method.__name__} while another thread is in a method of this engine",
                expected="one thread at a time, in the same order on every rank",
                hint="a threading.Lock around the calls",
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            self.in_use.release()

    return cast(M, run)


@contextmanager
def too_large_explained() -> Iterator[None]:
    """Raise ModelError for memory that cannot be allocated inside the context. On a GPU, torch's own error
    says more, and programs wait for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not re.search("allocate memory|overflow", str(error)):
            raise
        raise ModelError(
            "the model does not fit into memory",
            given=str(error).splitlines()[0],
            expected="parameters, gradients and optimizer states in the memory of each rank",
            hint="plait explain shows the memory of a plan; zero=3, tp or pp shard the model",
        ) from error


def not_copyable() -> ModelError:
    return ModelError(
        "an engine cannot be pickled or copied",
        given="it holds the communication of this process",
        expected="a copy of its state",
        hint="engine.save and engine.load, or engine.state()",
    )


def inconsistent() -> ModelError:
    return ModelError(
        "the weights are inconsistent",
        given="the last update or load was interrupted",
        expected="weights of one step on all ranks",
        hint="engine.load with a checkpoint, or load_state",
    )


def no_trace() -> RunError:
    return RunError(
        "there is no trace",
        given="write_trace without start_trace",
        expected="steps between the two",
        hint="engine.start_trace() before the steps",
    )


def check_pick(pick: object) -> None:
    if pick is not None and not callable(pick):
        raise ModelError(
            "pick is not a function",
            given=shown(pick),
            expected="a function of the model's outputs",
            hint="pick=lambda outputs: outputs.logits",
        )


def check_facts(facts: Mapping[str, object]) -> None:
    """Raise CheckpointError for keys of a checkpoint's facts that the engine adds itself."""
    if taken := sorted({"plan", "seed"} & facts.keys()):
        raise CheckpointError(
            "a checkpoint's facts have keys of the engine's own",
            given=f"facts={{{taken[0]!r}: ...}}",
            expected="other keys than 'plan' and 'seed'",
            hint=f"facts={{'my_{taken[0]}': ...}}",
        )


def check_batch_shape(shape: object) -> None:
    is_shape = isinstance(shape, Sequence) and len(shape) == 2
    if not is_shape or not all(isinstance(size, int) and size >= 0 for size in shape):  # type: ignore[attr-defined]
        raise ConfigError(
            "not the shape of a micro-batch",
            given=shown(shape),
            expected="(samples, tokens)",
            hint="(1, 2048)",
        )


def second_backward(error: BaseException) -> BaseException:
    """Return the error of a backward: torch's own, or one in words if the graph was used before."""
    if "backward through the graph a second time" not in str(error):
        return error
    return ModelError(
        "this loss has had its backward already",
        given="a loss whose graph is freed",
        expected="one engine.backward for each loss",
        hint="another forward, or the sum of the losses in one backward",
    )


# --- arguments of `parallelize`

_MAX_SEED = 2**64 - 1


def _names(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_batch(value: object) -> bool:
    return _names(value) and all(isinstance(each, Tensor) for each in value.values())


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SEED


def _are_blocks(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Iterable):
        return isinstance(value, type)
    return all(isinstance(each, type | nn.Module) for each in value)


_LOSS = "lambda outputs, batch: (summed_loss, number_of_targets)"
# A check of each argument that is not None, and its valid values: in words, and one of them.
_TYPES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "optimizer_args": (_names, "a dict of the optimizer's arguments", "{'lr': 1e-3}"),
    "param_groups": (
        lambda value: isinstance(value, Iterable) and not isinstance(value, str | bytes),
        "an iterable of parameters, or of dicts",
        "model.parameters()",
    ),
    "loss": (
        lambda value: callable(value) or isinstance(value, Preference | Distillation),
        "a function of the model's outputs and a micro-batch",
        _LOSS,
    ),
    "loss_scaling": (lambda value: isinstance(value, LossScaling), "a LossScaling", "plait.LossScaling()"),
    "blocks": (_are_blocks, "a class of modules, or a list of classes or modules", "type(block)"),
    "offload_dir": (lambda value: isinstance(value, str | os.PathLike), "a path", "'/var/tmp'"),
    "tensor_plan": (
        lambda value: _names(value) and all(isinstance(style, str) for style in value.values()),
        "a dict of names and styles",
        "{'blocks.*.fc1': 'colwise'}",
    ),
    "layout": (lambda value: isinstance(value, str), "rules for names of dims", "'heads:col ffn:col'"),
    "probe": (
        lambda value: isinstance(value, bool) or _is_batch(value),
        "True, False, or a dict of tensors",
        "False",
    ),
    "example_batch": (_is_batch, "a dict of tensors", "{'input_ids': ids}"),
    "seed": (_is_seed, "an integer from 0 to 2**64 - 1", "0"),
    "weights": (lambda value: isinstance(value, str | os.PathLike), "a path", "'FOLDER'"),
    "world": (lambda value: isinstance(value, World), "a World", "plait.comm.connect()"),
}
_REQUIRED = ("probe", "seed")


def check_types(model: object, arguments: Mapping[str, object]) -> nn.Module:
    """Return the model. Raises ModelError or ConfigError for an argument of the wrong type; `arguments`: by
    name."""
    for name, (is_valid, expected, valid) in _TYPES.items():
        value = arguments[name]
        if (value is None and name in _REQUIRED) or (value is not None and not is_valid(value)):
            raise ConfigError(
                f"{name} is not valid",
                given=f"{name}={shown(value)}",
                expected=expected,
                hint=f"{name}={valid}",
            )
        if name in ("offload_dir", "weights") and value is not None:
            to_path(value, name)
    return _module(model)


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        modules: list[Any] = []
        if isinstance(model, Iterable) and not isinstance(model, str | Mapping | type):
            modules = list(model)
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise ModelError(
                "the model is not an nn.Module",
                given=f"{shown(model)}, a {type(model).__name__}",
                expected="an nn.Module, or a list of modules that receive each other's outputs",
                hint="nn.Sequential(*layers)",
            )
        model = Chain(modules)
    lazy = [name for name, each in model.named_parameters() if is_lazy(each)]
    scripted = [name for name, each in model.named_modules() if isinstance(each, ScriptModule)]
    for name in (*lazy, *scripted):
        raise ModelError(
            "a parameter has no shape yet" if lazy else "a compiled module cannot be sharded",
            given=f"{name or 'the model'} of {type(model).__name__}",
            expected="modules and parameters as built",
            hint="a batch through the model before parallelize" if lazy else "the model before torch.jit",
        )
    return model


def no_counts(plan: Plan) -> PlanError:
    return PlanError(
        "a single micro-batch has no counts of the step's",
        given=f"engine.loss, router_balance=step micro={plan.micro}",
        expected="all micro-batches of a step in one call",
        hint="engine.step, or no router_balance",
    )


def too_many_micros(plan: Plan) -> PlanError:
    return PlanError(
        "more micro-batches than plan.micro",
        given=f"backward number {plan.micro + 1} of a step, micro={plan.micro}",
        expected="engine.update() after the last one",
        hint=f"micro={plan.micro + 1}",
    )


def no_gradient() -> PlanError:
    return PlanError(
        "update without a gradient",
        given="no micro-batch since the last update",
        expected="engine.backward(loss) first",
        hint="engine.backward(loss) in place of loss.backward()",
    )


def nothing_to_train() -> ModelError:
    return ModelError(
        "the model has no trainable parameters",
        given="no parameter requires a gradient",
        expected="a parameter to train; engine.evaluate and engine.outputs need none",
        hint="model.requires_grad_(True) before parallelize",
    )
