"""The planner against this machine: predicted and measured step times of plans on 2 and 4 ranks.

    python benchmarks/planner.py [--json FILE] [--steps N]

The ranks' devices are measured with as many ranks at work (`plait bench device`), all plans are priced, and
then run. The claim: Spearman's rank correlation is at least 0.9, the plan that the planner picks is at most
5 % slower than the fastest, and predictions are within 15 %. The last row of each model and number of ranks
has the results: the mean of absolute errors, and the regret.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

import common
from llama import LLAMA, TOY, Llama
from plait.bench.plans import speed_of_ranks, step_seconds
from plait.bench.report import machine
from plait.plan import Plan
from plait.plan.host_profile import HostProfile, save
from plait.planner.cluster import Cluster, cluster
from plait.planner.model_shape import ModelShape
from plait.planner.price import price
from plait.planner.score import spearman
from plait.planner.workload import Workload

PLANS = {
    2: ("dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2", "pp=2 micro=2"),
    4: ("dp=4", "dp=2 tp=2", "dp=2 pp=2 micro=2", "tp=2 pp=2 micro=2", "dp=4 zero=3"),
}
BATCH = 4
WIDE = Llama(LLAMA.config | {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4}, 128)


def compare(name: str, model: Llama, plans: tuple[str, ...], on: Cluster, steps: int) -> list[dict[str, Any]]:
    """A row per plan, predicted before measured, and a row with the comparison."""
    shape, work = ModelShape.from_config(model.config), Workload(model.sequence, BATCH)
    parsed = [Plan.parse(text) for text in plans]
    predicted = [price(shape, plan, on, work).step_s for plan in parsed]
    measured = [
        step_seconds(model.config, plan, sequence=model.sequence, batch=BATCH, steps=steps) for plan in parsed
    ]
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    case = f"{name}, {on.num_devices} ranks"
    rows = [
        {"case": case, "plan": text, "predicted_ms": 1e3 * p, "measured_ms": 1e3 * m, "error": error}
        for text, p, m, error in zip(plans, predicted, measured, errors, strict=True)
    ]
    picked = min(range(len(plans)), key=predicted.__getitem__)
    summary = {
        "case": case,
        "plan": f"Spearman {spearman(predicted, measured):.2f}, picks {plans[picked]}",
        "predicted_ms": None,
        "measured_ms": None,
        "error": statistics.fmean(map(abs, errors)),
        "regret": measured[picked] / min(measured) - 1,
    }
    return [*({**row, "regret": None} for row in rows), summary]


def main() -> None:
    made = common.parser(__doc__)
    made.add_argument("--steps", type=int, default=7)
    arguments = common.parse(made, steps=1)
    models = {"toy": TOY} if arguments.smallest else {"33.7 M": LLAMA, "wide": WIDE}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "host.json"
        for ranks, plans in PLANS.items():
            if arguments.smallest and ranks > 2:
                continue
            save(HostProfile({}, {ranks: speed_of_ranks(ranks, 1 if arguments.smallest else 5)}), path)
            on = cluster(f"{path}:{ranks}")
            for name, model in models.items():
                rows += compare(name, model, plans, on, arguments.steps)
    common.report("The planner against this machine", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
