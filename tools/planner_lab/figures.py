"""Published figures next to predictions: scaling, throughput, memory, time and cost of trainings.

`data/figures.csv` has the columns of published runs (runs.py), and `published`: the value in the figure.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path

from plait.pages.figures import Axis, Curve, Figure, Listing, Point
from plait.plan import Plan
from plait.plan.cost_model import FIGURE_PARAMETERS
from plait.plan.devices import device
from plait.planner.calibrate import Run
from plait.planner.cluster import cluster, fat_tree, max_endpoints
from plait.planner.communication import Group, Links, collective_s
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import StepEstimate, estimate_step
from plait.planner.workload import Workload
from plait.tables import counted
from planner_lab.bills import trainings, walls, zero_bytes
from planner_lab.runs import read_runs

_PUBLISHED = Path(__file__).parent / "data" / "figures.csv"
_EPOCH_STEPS = 68_507  # 1909.08053, section 5.2
_DAY_S = 86_400.0
_DEVICES = ("v100", "a100", "h100", "h100-nvl", "h200-nvl", "h200", "b200")
_HOSTS = ("dgx-1", "dgx-2", "dgx-a100", "jean-zay", "dgx-h100", "dgx-h200", "dgx-b200")
_ZERO_RANKS = 64  # of the table of ZeRO's paper
_ZERO_GB = (120.0, 31.4, 16.6, 1.9)  # 1910.02054, figure 1
_CALLS = [1 << power for power in range(10, 26, 2)]
_NCCL = 61e-6, 135e9  # seconds, bus bytes/s: fitted to vTrain's tables of 8 V100, "trace/*/AR_GPU8_LUT"
_GLOO_S = ((1 << 10, 741.0), (1 << 14, 41.0), (1 << 18, 4.2), (1 << 22, 0.62), (1 << 24, 0.62))  # measured
_DEEPSPEED = ((1007.96, 165.4), (2062.0, 157.0))  # its page of 2022-07-26: 1,024 A100, 8 x 1,024 tokens each
_GPT = {
    "1.3": "layers=24 hidden=2048 heads=16 vocab=50257 tied=true",  # 2005.14165, table 2.1
    "13": "layers=40 hidden=5120 heads=40 vocab=50257 tied=true",
}
_OFFLOAD = "dp=1 zero=3 micro=8 precision=fp16 offload=cpu recompute=full"
_BRIDGED = ("h100-nvl", "h200-nvl")


Measure = tuple[Axis, Callable[["PublishedPoint"], float]]


@dataclass(frozen=True)
class PublishedPoint:
    """A point of a published figure, and its predicted step. `billions`: of parameters."""

    figure: str
    name: str
    published: float
    billions: float
    source: str
    run: Run
    estimate: StepEstimate

    @property
    def num_ranks(self) -> int:
        return self.estimate.plan.num_ranks

    @property
    def label(self) -> str:
        plan = self.estimate.plan
        return f"{self.name}: {counted(self.num_ranks, 'GPU')}, tp={plan.tp} pp={plan.pp}"

    @property
    def flops_per_s(self) -> float:
        """Per device, with recomputation, as 2104.04473 counts (equation 3)."""
        model, sequence = self.run.model, self.run.work.sequence
        blocks = 96 * model.layers * model.hidden**2 * (1 + sequence / (6 * model.hidden))
        flops = self.run.work.tokens * (blocks + 6 * model.hidden * model.vocab)
        return flops / self.estimate.step_s / self.num_ranks


def entries() -> list[PublishedPoint]:
    """Price the rows of the published figures."""
    with _PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row, run in zip(rows, read_runs(_PUBLISHED), strict=True):
        assert isinstance(run, Run), run
        published, billions = float(row["published"]), float(row["params_b"])
        found.append(
            PublishedPoint(
                row["figure"], row["model_name"], published, billions, row["source"], run, run.estimate()
            )
        )
    return found


def published_figures(known: Sequence[PublishedPoint]) -> list[Figure | Listing]:
    """Return the figures of `figures`."""
    one = known[0].flops_per_s
    ranks = Axis("GPUs", log=2), attrgetter("num_ranks")
    size = Axis("10^9 parameters", log=2), attrgetter("billions")
    rate = Axis("TFLOP/s per GPU, with recomputation"), lambda each: each.flops_per_s / 1e12
    share = Axis("efficiency", "percent"), lambda each: each.flops_per_s / one
    days = Axis("days"), lambda each: each.estimate.step_s * _EPOCH_STEPS / _DAY_S
    scaling = [each for each in known if each.figure in ("model parallel", "model and data parallel")]
    epochs = [each for each in known if each.figure == "epoch"]
    models = [each for each in known if each.figure in ("Megatron-LM", "BLOOM", "OPT")]
    throughput = _compared("Throughput from one to a thousand billion parameters on A100", models, size, rate)
    deepspeed = Curve("DeepSpeed, published", _DEEPSPEED, "dots")
    return [
        _walls(),
        _zero(),
        offloaded(),
        _all_reduces(),
        *machines(),
        *_trainings(),
        _compared("Weak scaling of GPT-2 on V100", scaling, ranks, share),
        _compared("Days of an epoch of GPT-2 on V100", epochs, size, days),
        replace(
            throughput,
            curves=(*throughput.curves, deepspeed),
            names=(*throughput.names, *((x, "1,024 GPUs, zero=3") for x, _ in _DEEPSPEED)),
            note=f"{throughput.note} DeepSpeed's runs keep activations on the host: not predicted.",
        ),
    ]


def _compared(title: str, own: Sequence[PublishedPoint], across: Measure, up: Measure) -> Figure:
    """Published points over `across`, and the predicted values of `up` with their intervals."""
    (x, place), (y, value) = across, up
    curves = []
    for name in dict.fromkeys(each.figure for each in own):
        points = [each for each in own if each.figure == name]
        published = tuple((place(each), each.published) for each in points)
        predicted = tuple((place(each), *_interval(value(each), each.estimate)) for each in points)
        curves.append(Curve(f"{name}, published", published, "dots"))
        curves.append(Curve(f"{name}, predicted", predicted, "dots", f"{name}, published"))
    names = tuple((place(each), each.label) for each in own)
    source = "; ".join(dict.fromkeys(each.source for each in own))
    return Figure(title, x, y, tuple(curves), names, source, "The vertical line is the predicted interval.")


def _interval(value: float, estimate: StepEstimate) -> tuple[float, float, float]:
    spread = estimate.high_s / estimate.step_s
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


def offloaded() -> Listing:
    """Return the memory of a model without, and of one ten times larger with its states on the host."""
    on, work, gib = cluster("v100:1gpus"), Workload(sequence=1024, batch=8), 2**30
    rows: list[tuple[str | float, ...]] = []
    for size, plan in product(_GPT, ("dp=1 micro=8 precision=fp16 recompute=full", _OFFLOAD)):
        found = estimate_step(ModelShape.parse(_GPT[size]), Plan.parse(plan), on, work)
        fits = "yes" if found.memory_high_bytes < on.device.memory_bytes else "no"
        device_gib, host_gib = found.memory_high_bytes / gib, found.memory.host / gib
        rows.append((size, "on the host" if "offload" in plan else "on the GPU", device_gib, fits, host_gib))
    title = f"GPT on one V100 of {on.device.memory_bytes / gib:.1f} GiB: fp16, 8 x 1,024 tokens"
    headings = "10^9 parameters", "states", "GiB, upper end", "fits", "GiB of the host"
    source = "DeepSpeed's training page: without offload up to 1.4 B parameters on one GPU, with it 13 B"
    return Listing(title, headings, tuple(rows), source, f"On the host: {_OFFLOAD}")


def _all_reduces() -> Figure:
    """Total time of all-reducing 60 M parameters by the size of a call: predicted and published for NCCL,
    measured for Gloo."""
    links, group = Links.of(host := cluster("dgx-1:1"), host.constants), Group(8, 1, 8)
    start_s, bus_bytes_per_s = _NCCL

    def total(call_s: Callable[[float], float]) -> tuple[Point, ...]:
        return tuple((size, math.ceil(FIGURE_PARAMETERS / size) * call_s(4.0 * size)) for size in _CALLS)

    published = total(lambda size: start_s + 2 * 7 / 8 * size / bus_bytes_per_s)
    predicted = total(lambda size: collective_s("all-reduce", links, group, size))
    names = "NCCL on 8 V100, published", "NCCL on 8 V100, predicted", "Gloo, 4 CPU ranks, measured"
    curves = (
        Curve(names[0], published, "dots"),
        Curve(names[1], predicted, "dashed", names[0]),
        Curve(names[2], _GLOO_S),
    )
    title = f"All-reduces of {FIGURE_PARAMETERS // 10**6} M parameters in fp32"
    axes = Axis("parameters per call", log=10), Axis("total time, s", "seconds", 10)
    source = "as 2006.15704, figure 2, for other machines; NCCL: vTrain's tables; Gloo: docs/figures.md"
    return Figure(title, *axes, curves, source=source, note="Calls one after the other, over NVLink or Gloo.")


def _bridges() -> Listing:
    """The pools of devices that NVLink bridges join, and the ratios of the second to the first."""
    pools = []
    for each in map(device, _BRIDGED):
        both = 2 * each.bridge_bytes_per_s  # ways
        numbers = (each.sheet_bytes, each.memory_bytes_per_s, both, both * each.bridged / 2)
        pools.append([each.bridged, *(number / 1e9 for number in (each.bridged * numbers[0], *numbers[1:]))])
    one, other = pools
    rows: list[tuple[str | float, ...]] = [(name, *pool) for name, pool in zip(_BRIDGED, pools, strict=True)]
    rows.append(("ratio", *(b / a for a, b in zip(one, other, strict=True))))
    headings = "", "devices", "pool, GB", "memory, GB/s", "bridge, GB/s both ways", "all bridges, GB/s"
    return Listing(
        "Devices joined by NVLink bridges", headings, tuple(rows), "data sheets, plan/devices.toml"
    )


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
    title = "Fat trees of k-port switches: k, k^2/2 and k^3/4 network cards"
    levels = "ports", "cards, 1 level", "2 levels", "3 levels", "switches", "cables", "in the bisection"
    device_headings = "", "memory, GB", "memory, GB/s", "link, GB/s a direction", "16-bit TFLOP/s", "W", "$/h"
    host_headings = "", "devices", "", "network, Gb/s", "network cards"
    source = "data sheets, named in plan/devices.toml and planner/data/clusters.toml; prices are assumptions"
    return [
        Listing(title, levels, tuple(trees)),
        Listing("Devices", device_headings, tuple(devices), source),
        _bridges(),
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
        names = tuple(
            (x, f"{each.name}, {each.device.name.partition('-')[0]}") for x, each in sorted(known.items())
        )
        note = "The vertical line is the interval of utilization; its point is the geometric mean."
        figures.append(Figure(*axes, curves, names, "tools/planner_lab/data/trainings.toml", note))
    return figures
