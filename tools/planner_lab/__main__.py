"""Measures of the planner, and the arithmetic that needs no plan.

python tools/planner_lab score FILE...   predictions next to published runs
python tools/planner_lab figures         published figures next to predictions
python tools/planner_lab walls           what models need, devices, hosts and fat trees
python tools/planner_lab bill            hours, money and energy of trainings
"""

import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner_lab.commands import bill, figures, score, walls

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (score, figures, walls, bill):
    app.command()(command)

if __name__ == "__main__":
    app(prog_name="planner_lab")
