"""Published figures next to predictions: scaling, throughput, memory, time and cost of trainings.

`data/figures.csv` has the columns of published runs (runs.py), and `published`: the value in the figure.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from plait.pages.figures import Axis, Curve, Figure, Listing, Point
from plait.planner.bills import trainings, walls, zero_bytes
from plait.planner.cluster import cluster, fat_tree, max_endpoints
from plait.planner.hardware import device
from plait.planner.price import Price
from plait.planner.runs import Run, read_runs
from plait.tables import counted

_PUBLISHED = Path(__file__).parent / "data" / "figures.csv"
_EPOCH_STEPS = 68_507  # 1909.08053, section 5.2
_DAY_S = 86_400.0
_DEVICES = ("v100", "a100", "h100", "h100-nvl", "h200-nvl", "h200", "b200")
_HOSTS = ("dgx-1", "dgx-2", "dgx-a100", "jean-zay", "dgx-h100", "dgx-h200", "dgx-b200")
_ZERO_RANKS = 64  # of the table of ZeRO's paper
_ZERO_GB = (120.0, 31.4, 16.6, 1.9)  # 1910.02054, figure 1


Measure = tuple[Axis, Callable[["Entry"], float]]


@dataclass(frozen=True)
class Entry:
    """A point of a published figure, and its predicted step. `billions`: of parameters."""

    figure: str
    name: str
    published: float
    billions: float
    source: str
    run: Run
    price: Price

    @property
    def num_ranks(self) -> int:
        return self.price.plan.num_ranks

    @property
    def label(self) -> str:
        plan = self.price.plan
        return f"{self.name}: {counted(self.num_ranks, 'GPU')}, tp={plan.tp} pp={plan.pp}"

    @property
    def flops_per_s(self) -> float:
        """Per device, with recomputation, as 2104.04473 counts (equation 3)."""
        model, sequence = self.run.model, self.run.work.sequence
        blocks = 96 * model.layers * model.hidden**2 * (1 + sequence / (6 * model.hidden))
        flops = self.run.work.tokens * (blocks + 6 * model.hidden * model.vocab)
        return flops / self.price.step_s / self.num_ranks


def entries() -> list[Entry]:
    """Price the rows of the published figures."""
    with _PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row, run in zip(rows, read_runs(_PUBLISHED), strict=True):
        assert isinstance(run, Run), run
        published, billions = float(row["published"]), float(row["params_b"])
        found.append(
            Entry(row["figure"], row["model_name"], published, billions, row["source"], run, run.price())
        )
    return found


def published_figures(known: Sequence[Entry]) -> list[Figure | Listing]:
    """Return the figures of `plait plan figures`."""
    one = known[0].flops_per_s
    ranks = Axis("GPUs", log=2), attrgetter("num_ranks")
    size = Axis("10^9 parameters", log=2), attrgetter("billions")
    rate = Axis("TFLOP/s per GPU, with recomputation"), lambda each: each.flops_per_s / 1e12
    share = Axis("efficiency", "percent"), lambda each: each.flops_per_s / one
    days = Axis("days"), lambda each: each.price.step_s * _EPOCH_STEPS / _DAY_S
    scaling = [each for each in known if each.figure in ("model parallel", "model and data parallel")]
    epochs = [each for each in known if each.figure == "epoch"]
    models = [each for each in known if each.figure in ("Megatron-LM", "BLOOM")]
    return [
        _walls(),
        _zero(),
        *machines(),
        *_trainings(),
        _compared("Weak scaling of GPT-2 on V100", scaling, ranks, share),
        _compared("Days of an epoch of GPT-2 on V100", epochs, size, days),
        _compared("Throughput from one to a thousand billion parameters on A100", models, size, rate),
    ]


def _compared(title: str, own: Sequence[Entry], across: Measure, up: Measure) -> Figure:
    """Published points over `across`, and the predicted values of `up` with their intervals."""
    (x, place), (y, value) = across, up
    curves = []
    for name in dict.fromkeys(each.figure for each in own):
        points = [each for each in own if each.figure == name]
        published = tuple((place(each), each.published) for each in points)
        predicted = tuple((place(each), *_interval(value(each), each.price)) for each in points)
        curves.append(Curve(f"{name}, published", published, "dots"))
        curves.append(Curve(f"{name}, predicted", predicted, "dots", f"{name}, published"))
    names = tuple((place(each), each.label) for each in own)
    source = "; ".join(dict.fromkeys(each.source for each in own))
    return Figure(title, x, y, tuple(curves), names, source, "The vertical line is the predicted interval.")


def _interval(value: float, price: Price) -> tuple[float, float, float]:
    spread = price.high_s / price.step_s
    return value, value / spread, value * spread


def _walls() -> Listing:
    rows = tuple((wall.name.strip(), wall.arithmetic, wall.value, wall.unit) for wall in walls())
    return Listing("Walls", ("", "arithmetic", "value", "unit"), rows)


def _zero() -> Figure:
    ranks = [1 << power for power in range(11)]
    curves = []
    for stage, published in enumerate(_ZERO_GB):
        name = f"zero={stage}"
        points = tuple((number, zero_bytes(7.5e9, number, stage) / 1e9) for number in ranks)
        curves.append(Curve(f"{name}, published", ((_ZERO_RANKS, published),), "dots"))
        curves.append(Curve(name, points, "dashed", f"{name}, published"))
    title, note = "Memory of 7.5 B parameters under ZeRO", "Adam in mixed precision, 16 bytes per parameter."
    axes = Axis("ranks", log=2), Axis("GB per rank", log=10)
    return Figure(title, *axes, tuple(curves), source="1910.02054, figure 1", note=note)


def machines() -> list[Listing]:
    """Return tables of fat trees, devices and hosts."""
    trees = []
    for ports in (24, 48, 64):
        sizes = [max_endpoints(ports, levels) for levels in (1, 2, 3)]
        tree = fat_tree(sizes[-1], ports)
        trees.append((ports, *sizes, tree.num_switches, tree.links, tree.bisection_links))
    devices: list[tuple[str | float, ...]] = []
    for name in _DEVICES:
        each = device(name)
        peak = each.peak_flops.get("bf16", each.peak_flops["fp16"])
        rates = [rate / 1e9 for rate in (each.sheet_bytes, each.memory_bytes_per_s, each.link_bytes_per_s)]
        devices.append((name, *rates, peak / 1e12, each.watts, each.dollars_per_hour))
    hosts = [
        (name, each.host_size, each.device.name, each.network_bytes_per_s * 8 / 1e9, each.rails)
        for name in _HOSTS
        for each in [cluster(f"{name}:1")]
    ]
    title = "Fat trees of k-port switches: k, k^2/2 and k^3/4 hosts"
    levels = "ports", "hosts, 1 level", "2 levels", "3 levels", "switches", "cables", "in the bisection"
    device_headings = "", "memory, GB", "memory, GB/s", "link, GB/s a direction", "16-bit TFLOP/s", "W", "$/h"
    host_headings = "", "devices", "", "network, Gb/s", "network cards"
    source = "data sheets, named in plan/devices.toml and planner/data/clusters.toml; prices are assumptions"
    return [
        Listing(title, levels, tuple(trees)),
        Listing("Devices", device_headings, tuple(devices), source),
        Listing("Hosts", host_headings, tuple(hosts), source),
    ]


def _trainings() -> list[Figure]:
    """Hours and dollars of published trainings, within the intervals of a bill."""
    known = {each.bill().flops / 1e21: each for each in trainings().values()}
    figures = []
    for title, unit in (("Time", "1,000 device-hours"), ("Cost", "M$")):
        reported: list[Point] = []
        bills: list[Point] = []
        for x, each in sorted(known.items()):
            factor = 1e-3 if title == "Time" else each.device.dollars_per_hour / 1e6
            low, high = (factor * hours for hours in each.bill().hours)
            reported.append((x, factor * each.hours))
            bills.append((x, (low * high) ** 0.5, low, high))
        axes = f"{title} of published trainings", Axis("ZFLOP", log=10), Axis(unit, log=10)
        curves = Curve("reported", tuple(reported), "dots"), Curve("bill", tuple(bills), "dots")
        names = tuple((x, f"{each.name}, {each.device.name.partition('-')[0]}") for x, each in sorted(known.items()))
        note = "The vertical line is the interval of utilization; its point is the geometric mean."
        figures.append(Figure(*axes, curves, names, "planner/data/trainings.toml", note))
    return figures
