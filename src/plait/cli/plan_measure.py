"""`plait plan --measure K`: run the best plans for a few steps on local ranks, next to their predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plait.cli.common import print_line
from plait.errors import PlanError
from plait.plan import Plan
from plait.plan.host_profile import HostProfile, load, save
from plait.planner.calibrate import Run, determined, fit
from plait.planner.cluster import Cluster, profile_path_of
from plait.planner.constants import Constants
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import StepEstimate
from plait.planner.workload import Software, Workload
from plait.tables import counted


def measure(
    config: Mapping[str, Any], estimates: Sequence[StepEstimate], on: Cluster, work: Workload
) -> list[tuple[Plan, float, float]]:
    """Run each price's plan, print predicted and measured times, and keep the constants that they determine.

    `config`: the model's config.json. Returns plan, predicted and measured seconds. Raises PlaitError, before
    any run if the cluster is not this machine.
    """
    from rich.console import Console

    from plait.bench.plans import step_seconds
    from plait.tables import table

    if not on.device.product_rates:
        raise PlanError(
            "only plans on this machine can be measured",
            given=f"--cluster {on.name}",
            expected="a measured host",
            hint=f"plait bench device --ranks {on.num_devices}, then --cluster this:{on.num_devices}",
        )
    found = [
        (each.plan, each.step_s, step_seconds(config, each.plan, sequence=work.sequence, batch=work.batch))
        for each in estimates
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
    """Fit the constants that these runs determine, keep them in the host's profile, and print them."""
    runs = [
        Run(number, "this machine", model, (plan,), on, work, Software(), took)
        for number, (plan, _, took) in enumerate(found)
    ]
    names = determined(runs, on.constants)
    fitted = fit(runs, on.constants, names, {})
    values = {name: getattr(fitted, name) for name in names}
    changes = [f"{name} {getattr(on.constants, name):.3g} -> {value:.3g}" for name, value in values.items()]
    errors = [
        abs(run.estimate(fitted).step_s / took - 1) for run, (_, _, took) in zip(runs, found, strict=True)
    ]
    path = profile_path_of(on.name)
    ranks = next(iter({on.num_devices} & load(path).devices.keys()), 1)  # GPUs are measured one by one
    speed = load(path).devices[ranks]
    kept = replace(speed, calibration={**speed.calibration, **values})
    saved = save(HostProfile({}, {ranks: kept}), path)
    what = f"{counted(len(runs), 'plan')} determine {len(names)} of {len(Constants.names())} constants"
    print_line(f"{what}: {', '.join(changes) or 'none'}")
    print_line(f"error with them: {sum(errors) / len(errors):.0%} on average")
    print_line(f"saved: {saved}, for --cluster {on.name}")
