"""The planner against this machine: predicted and measured step times of plans on 2 and 4 ranks.

    python benchmarks/planner.py [--json FILE] [--steps N] [--rounds N] [--ranks N] [--model NAME]

The ranks' devices are measured with as many ranks at work (`plait bench device`; `--profile` reads an earlier
measurement), all plans are priced, and then run in turn, for some steps in each round. The claim: Spearman's
rank correlation is at least 0.9, the plan that the planner picks is at most 5 % slower than the fastest, and
predictions are within 15 %. A plan's time is the median of the steps that other programs disturb least
(`plait.bench.plans`); `others` is the share of the cores that they still had, `core_ms` the processor time of
the busiest rank. The last row of each model and number of ranks has the results: the mean of absolute errors,
and the regret.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from llama import LLAMA, TOY, Llama
from plait.bench.device import measure_device
from plait.bench.plans import run_steps, typical_step
from plait.bench.report import machine
from plait.comm import connect
from plait.comm.launch_function import launch
from plait.plan import Plan
from plait.plan.host_profile import HostProfile, save
from plait.planner.cluster import Cluster, cluster
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import estimate_step
from plait.planner.workload import Workload

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from planner_lab.score import spearman

PLANS = {
    2: ("dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 micro=2"),
    4: ("dp=4", "dp=2 tp=2", "dp=2 pp=2 micro=2", "tp=2 pp=2 micro=2", "dp=4 zero=3"),
}
BATCH = 4
WIDE = Llama(LLAMA.config | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}, 128)


def compare(
    name: str, model: Llama, plans: tuple[str, ...], on: Cluster, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """A row per plan, predicted before measured, and a row with the comparison."""
    shape, work = ModelShape.from_config(model.config), Workload(model.sequence, BATCH)
    parsed = [Plan.parse(text) for text in plans]
    predicted = [estimate_step(shape, plan, on, work).step_s for plan in parsed]
    given: dict[str, int] = {"sequence": model.sequence, "batch": BATCH, "steps": steps}
    runs = [[run_steps(model.config, plan, **given) for plan in parsed] for _ in range(rounds)]
    by_plan = [[step for round_ in each for step in round_] for each in zip(*runs, strict=True)]
    typical = [typical_step(each) for each in by_plan]
    measured = [step.seconds for step in typical]
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    case = f"{name}, {on.num_devices} ranks"
    rows = [
        {
            "case": case,
            "plan": text,
            "predicted_ms": 1e3 * p,
            "measured_ms": 1e3 * m,
            "core_ms": 1e3 * step.core_s * on.ranks_per_core,
            "others": step.others,
            "error": error,
        }
        for text, p, m, step, error in zip(plans, predicted, measured, typical, errors, strict=True)
    ]
    picked = min(range(len(plans)), key=predicted.__getitem__)
    summary = {
        "case": case,
        "plan": f"Spearman {spearman(predicted, measured):.2f}, picks {plans[picked]}",
        "predicted_ms": None,
        "measured_ms": None,
        "core_ms": None,
        "others": None,
        "error": statistics.fmean(map(abs, errors)),
        "regret": measured[picked] / min(measured) - 1,
    }
    return [*({**row, "regret": None} for row in rows), summary]


def main() -> None:
    made = common.parser(__doc__)
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--ranks", type=int, choices=PLANS, help="only so many")
    made.add_argument("--model", choices=("33.7 M", "wide"), help="only this one")
    made.add_argument("--profile", type=Path, help="a host's profile that has these ranks")
    arguments = common.parse(made, steps=1, rounds=1)
    models = {"toy": TOY} if arguments.smallest else {"33.7 M": LLAMA, "wide": WIDE}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.profile or Path(folder) / "host.json"
        for ranks, plans in PLANS.items():
            if (arguments.smallest and ranks > 2) or arguments.ranks not in (None, ranks):
                continue
            if arguments.profile is None:
                rounds = 1 if arguments.smallest else 5
                speed = launch(lambda rounds=rounds: measure_device(connect(), rounds=rounds), ranks)
                save(HostProfile({}, {ranks: speed}), path)
            on = cluster(f"{path}:{ranks}")
            for name, model in models.items():
                if arguments.model in (None, name):
                    of_all = plans[::2] if arguments.smallest else plans
                    rows += compare(name, model, of_all, on, arguments.steps, arguments.rounds)
    common.report("The planner against this machine", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
