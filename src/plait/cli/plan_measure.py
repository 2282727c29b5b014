"""`plait plan --measure K`: run the best plans for a few steps on local ranks, next to their predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from plait.cli.common import print_line
from plait.errors import PlanError
from plait.plan import Plan
from plait.planner.cluster import Cluster
from plait.planner.model_shape import ModelShape
from plait.planner.price import Price
from plait.planner.workload import Software, Workload


def measure(
    config: Mapping[str, Any], prices: Sequence[Price], on: Cluster, work: Workload
) -> list[tuple[Plan, float, float]]:
    """Run each price's plan, print predicted and measured times, and refit the constants of the time model.

    `config`: the model's config.json. Returns plan, predicted and measured seconds. Raises PlaitError, before
    any run if the cluster is not this machine.
    """
    from rich.console import Console

    from plait.bench.plans import step_seconds
    from plait.tables import table

    if on.profile is None:
        raise PlanError(
            "only plans on this machine can be measured",
            given=f"--cluster {on.name}",
            expected="a measured host",
            hint=f"plait bench device --ranks {on.num_devices}, then --cluster this:{on.num_devices}",
        )
    found = [
        (each.plan, each.step_s, step_seconds(config, each.plan, sequence=work.sequence, batch=work.batch))
        for each in prices
    ]
    rows = [
        (str(plan), f"{1e3 * said:,.1f}", f"{1e3 * took:,.1f}", f"{said / took - 1:+.0%}")
        for plan, said, took in found
    ]
    headings = ("plan", "predicted ms", "measured ms", "error")
    Console().print(table("Measured steps", headings, rows, left=("plan",)))
    _refit(ModelShape.from_config(config), found, on, work)
    return found


def _refit(
    model: ModelShape, found: Sequence[tuple[Plan, float, float]], on: Cluster, work: Workload
) -> None:
    """Print the constants that these runs change, and the plans' errors with them."""
    from plait.planner.calibrate import fit
    from plait.planner.constants import DEFAULT, Constants
    from plait.planner.runs import Run

    runs = [
        Run(number, "this machine", model, (plan,), on, work, Software(), took, None, False)
        for number, (plan, _, took) in enumerate(found)
    ]
    fitted = fit(runs)
    changes = [
        f"{each.name} {getattr(DEFAULT, each.name):.3g} -> {getattr(fitted, each.name):.3g}"
        for each in fields(Constants)
        if abs(getattr(fitted, each.name) / getattr(DEFAULT, each.name) - 1) > 0.01
    ]
    errors = [abs(run.price(fitted).step_s / took - 1) for run, (_, _, took) in zip(runs, found, strict=True)]
    print_line(f"refitted: {', '.join(changes) or 'no constant changes'}")
    print_line(f"error with them: {sum(errors) / len(errors):.0%} on average")
