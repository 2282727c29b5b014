"""Draws the losses of several runs over one another, and below them how far each is from the first.

    python tools/plot_losses.py docs/tensor_loss.png runs/tp-1 runs/tp-2 runs/tp-2x2
    python tools/plot_losses.py --validation docs/servers_loss.png runs/dp runs/stale runs/local-8

The demo's runs under three grids, for example:

    plait train recipes/demo.toml --plan "tp=2x2 precision=bf16" --set run.dir=runs/tp-2x2
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from plait.train.metrics import read_metrics
from plait.train.run_dir import RunDir
from plait.train.saved_recipe import SavedRecipe


def losses(run: RunDir, key: str) -> dict[int, float]:
    """By step."""
    return {record["step"]: record[key] for record in read_metrics(run.metrics) if key in record}


def draw(out: Path, folders: list[Path], *, validation: bool) -> None:
    figure, (curves, apart) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 5), height_ratios=(3, 1), layout="constrained"
    )
    runs = [RunDir(folder) for folder in folders]
    key = "validation_loss" if validation else "loss"
    first = losses(runs[0], key)
    for number, run in enumerate(runs):
        found = losses(run, key)
        width = 1.2 if validation else max(0.8, 2.5 - 0.8 * number)
        style = {"color": f"C{number}", "linewidth": width, "marker": "." if validation else None}
        curves.plot(found.keys(), found.values(), label=SavedRecipe.read(run.recipe).values["plan"], **style)
        steps = [step for step in found if step in first]
        apart.plot(steps, [100 * (found[step] / first[step] - 1) for step in steps], **style)
    curves.set_ylabel("validation loss" if validation else "training loss")
    curves.legend(frameon=False, fontsize="small")
    apart.set_ylabel("difference, %")
    apart.set_xlabel("step")
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--validation", action="store_true", help="validation losses, not those of training")
    parser.add_argument("out", type=Path, help="the picture")
    parser.add_argument("runs", type=Path, nargs="+", help="directories of runs")
    arguments = parser.parse_args()
    draw(arguments.out, arguments.runs, validation=arguments.validation)


if __name__ == "__main__":
    main()
