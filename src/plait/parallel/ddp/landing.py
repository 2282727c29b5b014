"""Sums come in, and gradients become what the ranks agree on."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plait.parallel.ddp.carry import AnyBucket

Landings = dict[int, Callable[[], Tensor]]  # by bucket: waits for its sum


def land_all(
    buckets: Sequence[AnyBucket],
    landings: Landings,
    between: Callable[[], None] | None,
    is_unused: Callable[[int], bool],
    runs_optimizers: bool,
) -> None:
    """Waits for the sums, in their order, and hands them out. Empties `landings`.

    `between`: to be done when all sums are there and none is handed out: a rank that has joined takes part in
    what its peers do in this order. None: a bucket is handed out while later ones are under way.
    """
    for index in landings:
        buckets[index].hand_over()
    results: dict[int, Tensor] = {}
    if between is not None:
        results = {index: landing() for index, landing in landings.items()}
        between()
    for index in [*landings]:
        result = landings[index]() if between is None else results[index]
        del landings[index]
        buckets[index].land(result, is_unused)
        if runs_optimizers:
            _run_optimizers(buckets[index].parameters)


def _run_optimizers(parameters: Sequence[nn.Parameter]) -> None:
    """Those that `apply_optimizer_in_backward` has put on parameters; their gradients are used up."""
    for parameter in parameters:
        optimizers: Sequence[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
