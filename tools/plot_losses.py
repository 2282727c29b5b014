"""Draws the training losses of several runs over one another, and below them how far each is from the first.

    python tools/plot_losses.py docs/tensor_loss.png runs/tp-1 runs/tp-2 runs/tp-2x2

The demo's runs under three grids, for example:

    plait train recipes/demo.toml --plan "tp=2x2 precision=bf16" --set run.dir=runs/tp-2x2
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def losses(run: Path) -> dict[int, float]:
    """By step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def plan(run: Path) -> str:
    text: str = json.loads((run / "recipe.json").read_text(encoding="utf-8"))["plan"]
    return text


def main(out: Path, runs: list[Path]) -> None:
    figure, (curves, apart) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    first = losses(runs[0])
    for number, run in enumerate(runs):
        found = losses(run)
        style = {"color": f"C{number}", "linewidth": max(0.8, 2.5 - 0.8 * number)}
        curves.plot(found.keys(), found.values(), label=plan(run), **style)
        steps = [step for step in found if step in first]
        apart.plot(steps, [found[step] - first[step] for step in steps], **style)
    curves.set_ylabel("training loss")
    curves.legend(frameon=False)
    apart.set_ylabel("difference")
    apart.set_xlabel("step")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(run) for run in sys.argv[2:]])
