"""Draw the losses of two hybrid plans over those of one process, in float64, and below them the differences.

pytest tests/ranks/test_hybrid_curve.py -m sweep    leaves the losses in build/hybrid_curve.json
python tools/plot_hybrid_curve.py                   draws docs/hybrid_float64.png
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1e-9  # that the test allows


def main() -> None:
    curves = json.loads((ROOT / "build" / "hybrid_curve.json").read_text())
    one_process, *_ = curves.values()
    figure, (losses, differences) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    largest = 0.0
    for number, (plan, found) in enumerate(curves.items()):
        style = {"color": f"C{number}", "linewidth": max(1.0, 5 - 2 * number)}
        steps = range(1, len(found) + 1)
        losses.plot(steps, found, label=plan, **style)
        relative = [loss / same - 1 for loss, same in zip(found, one_process, strict=True)]
        differences.plot(steps, relative, **style)
        largest = max(largest, *map(abs, relative))
    losses.set_ylabel("training loss")
    losses.legend(frameon=False, fontsize="small")
    differences.set_ylim(-LIMIT, LIMIT)
    differences.set_ylabel("relative difference")
    differences.set_xlabel("step")
    differences.text(
        0.99, 0.9, f"largest difference: {largest:.0e}", transform=differences.transAxes, ha="right", va="top"
    )
    figure.savefig(ROOT / "docs" / "hybrid_float64.png", dpi=110)


if __name__ == "__main__":
    main()
