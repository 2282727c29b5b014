"""The price of a plan: facts that hold for every plan, and published runs."""

import csv
import random
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from plait.errors import ConfigError, PlanError
from plait.plan import Plan
from plait.plan.schedule import make_schedule
from plait.plan.schedule.action import Kind
from plait.plan.schedule.generators import GENERATORS
from plait.plan.schedule.load import in_flight
from plait.plan.schedule.simulate import Durations, pipeline_s, simulate
from plait.planner.calibrate import Run, fit
from plait.planner.cluster import cluster
from plait.planner.communication import Group, Links, collective_s
from plait.planner.constants import DEFAULT, PRIOR, Constants
from plait.planner.memory import rank_layouts, rank_memory, tokens_of_rank
from plait.planner.model_shape import ModelShape
from plait.planner.step_estimate import Software, StepEstimate, Workload, estimate_step, stage_seconds
from plait.planner.workload import PLAIT
from planner_lab.programs import recompute, report_says
from planner_lab.runs import Refused, read_runs
from planner_lab.score import ScoredRun, estimate_all, fit_without, score_runs

DATA = Path(__file__).parents[1] / "data" / "planner"
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
MODEL = ModelShape.from_config(LLAMA)
WORK = Workload(sequence=4096, batch=128)


def step_s(text: str, **changes: float) -> float:
    machines = cluster("dgx-h100:8")
    device = replace(machines.device, **{k: v for k, v in changes.items() if hasattr(machines.device, k)})
    own = {k: v for k, v in changes.items() if not hasattr(machines.device, k)}
    return estimate_step(MODEL, Plan.parse(text), replace(machines, device=device, **own), WORK).step_s


def test_config_json_of_llama_gives_its_published_number_of_parameters() -> None:
    assert MODEL.num_params == 8_030_261_248


def test_a_configuration_without_layers_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match="layers"):
        ModelShape.from_config({"hidden_size": 4096})


@pytest.mark.parametrize(
    "text", ["dp=64 zero=3 micro=2", "dp=8 tp=8 sp=true micro=4", "dp=8 tp=2 pp=4 zero=1 micro=8"]
)
@pytest.mark.parametrize("name", ["link_bytes_per_s", "network_bytes_per_s", "memory_bytes_per_s"])
def test_more_bandwidth_is_never_slower(text: str, name: str) -> None:
    text += " precision=bf16"
    machines = cluster("dgx-h100:8")
    base = getattr(machines.device, name, None) or getattr(machines, name)
    times = [step_s(text, **{name: base * factor}) for factor in (0.25, 0.5, 1, 2, 4)]
    assert times == sorted(times, reverse=True)


def test_bubbles_order_as_1f1b_interleaved_zero_bubble() -> None:
    """For even stages whose forward, backward and weight gradient take the same time."""
    idle = []
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zbv", 2)):
        durations = Durations.uniform(8 * chunks, forward=1 / chunks, backward=1 / chunks, weight=1 / chunks)
        ends = pipeline_s(name, 8, 16, chunks, durations)
        idle.append(ends.total - max(ends.busy))
    assert idle == sorted(idle, reverse=True)


def test_more_recompute_and_more_zero_never_need_more_memory() -> None:
    def total(text: str) -> int:
        return estimate_step(
            MODEL, Plan.parse(f"{text} precision=bf16"), cluster("dgx-h100:8"), WORK
        ).memory.total

    recompute = [total(f"dp=64 zero=1 micro=2 recompute={kind}") for kind in ("none", "every=2", "full")]
    zero = [total(f"dp=64 micro=2 zero={stage}") for stage in range(4)]
    assert recompute == sorted(recompute, reverse=True)
    assert zero == sorted(zero, reverse=True)


@pytest.mark.parametrize("micros", [8, 24, 512])
@pytest.mark.parametrize(
    ("name", "chunks", "fills"),  # of forward, backward and weight gradient, per rank after the first
    [
        ("gpipe", 1, (1, 1, 1)),
        ("1f1b", 1, (1, 1, 1)),
        ("interleaved", 2, (1, 1, 1)),
        ("zb-h1", 1, (1, 1, -1)),
    ],
)
def test_schedules_idle_as_long_as_their_papers_state(
    name: str, chunks: int, fills: tuple[int, ...], micros: int
) -> None:
    """Bubbles of GPipe and 1F1B (Narayanan et al. 2104.04473, section 2.2) and of Qi et al. 2401.10241,
    table 2, for even stages."""
    ranks, seconds = 8, (1.0, 1.25, 0.75)
    forward, backward, weight = seconds
    stages = Durations.uniform(ranks * chunks, forward=forward, backward=backward, weight=weight)
    ends = pipeline_s(name, ranks, micros, chunks, stages)
    assert ends.busy == pytest.approx((micros * chunks * sum(seconds),) * ranks)
    idle = (ranks - 1) * sum(times * each for times, each in zip(fills, seconds, strict=True))
    assert ends.total - max(ends.busy) == pytest.approx(idle)


@pytest.mark.parametrize("spread", [0.2, 0.03])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "gpipe", "zb-h1", "zbv"])
def test_many_micro_batches_end_when_the_simulation_of_them_all_does(
    name: str, ranks: int, spread: float
) -> None:
    rng = random.Random(0)
    chunks = 2 if name in ("interleaved", "zbv") else 1
    stages = ranks * chunks
    durations = Durations(
        *(tuple(rng.uniform(1 - spread, 1 + spread) for _ in range(number)) for number in (stages,) * 3),
        tuple(rng.uniform(0, 0.2) for _ in range(stages - 1)),
    )
    for micros in (1, 5, 16, 41, 64):
        simulated = simulate(make_schedule(name, ranks, micros, chunks), durations).total
        ends = pipeline_s(name, ranks, micros, chunks, durations)
        assert ends.total == pytest.approx(simulated, rel=5e-3)
        assert ends.total >= max(ends.busy)


@pytest.mark.parametrize("name", [name for name, each in GENERATORS.items() if each.trains])
def test_a_rank_keeps_what_its_actions_leave_in_flight(name: str) -> None:
    ranks, chunks = 4, GENERATORS[name].chunks
    for micros, rank in product((1, 6, 16, 48), (0, 3)):
        most = now = 0
        schedule = make_schedule(name, ranks, micros, chunks)
        for kind, stage, micro in schedule.ranks[rank]:
            weights_follow = kind is not Kind.F and kind is not Kind.W and (stage, micro) in schedule.split
            now += (kind is Kind.F) - (not weights_follow and kind is not Kind.F)
            most = max(most, now)
        held = in_flight(name, ranks, micros, chunks, rank)
        assert max(sum(map(sum, moment)) for moment in held) == most, (micros, rank)


def test_parts_add_up_to_the_step() -> None:
    priced = estimate_step(
        MODEL, Plan.parse("dp=8 tp=2 pp=4 zero=1 micro=8 precision=bf16"), cluster("dgx-h100:8"), WORK
    )
    assert sum(priced.parts.values()) == pytest.approx(priced.step_s)


def test_a_batch_that_does_not_divide_is_an_error_with_one_that_does() -> None:
    with pytest.raises(PlanError, match="does not divide"):
        estimate_step(MODEL, Plan.parse("dp=3"), cluster("dgx-h100:1"), WORK)


def test_local_steps_have_no_price() -> None:
    with pytest.raises(PlanError, match="does not know the time of local steps"):
        estimate_step(MODEL, Plan.parse("dp=2 local_steps=8"), cluster("dgx-h100:1"), WORK)


def test_float8_has_a_peak_and_casts_of_its_own() -> None:
    """Faster than bf16 for wide layers, slower with a scale per row, and not faster for narrow ones: reading
    and writing what is cast takes longer than the products save."""

    def seconds(model: ModelShape, precision: str) -> float:
        plan = Plan.parse(f"dp=8 micro=1 precision={precision}")
        return estimate_step(model, plan, cluster("dgx-h100:1"), WORK).step_s

    wide, narrow = (
        ModelShape.parse(f"layers=4 hidden={h} heads={h // 128} ffn={4 * h} vocab=32000") for h in (8192, 512)
    )
    assert seconds(wide, "bf16") > 1.2 * seconds(wide, "fp8")
    assert seconds(wide, "fp8") < seconds(wide, "fp8-rowwise") < seconds(wide, "bf16")
    assert seconds(narrow, "fp8") > seconds(narrow, "bf16")
    with pytest.raises(PlanError, match="does not compute in this precision"):
        estimate_step(MODEL, Plan.parse("dp=8 precision=fp8"), cluster("dgx-a100:1"), WORK)


def test_casts_that_are_parts_of_other_operators_take_less() -> None:
    plan, node = Plan.parse("dp=8 micro=16 precision=fp8"), cluster("dgx-h100:1")
    own, fused = (
        estimate_step(MODEL, plan, node, WORK, Software(device_kernels=f)).step_s for f in (False, True)
    )
    assert fused < own


def test_a_wide_ring_takes_a_hop_for_every_rank_and_host() -> None:
    """NCCL's numbers: an all-gather of 512 ranks on 64 hosts takes 448 hops inside and 63 between hosts; a
    tree of all-reduces two for every doubling of hosts."""
    links = Links.of(cluster("dgx-a100:64"), DEFAULT)
    latency, group = links._replace(link=1e30, network=1e30, collective_s=0.0), Group(512, 1, 512)
    ring = 448 * links.hop_s + 63 * links.network_hop_s
    assert collective_s("all-gather", latency, group, 1.0) == pytest.approx(ring)
    tree = 2 * (7 * links.hop_s + 12 * links.network_hop_s)
    assert collective_s("all-reduce", latency, group, 1.0) == pytest.approx(tree)


def test_grouped_states_are_faster_than_flat_ones_over_many_hosts() -> None:
    """InternEvo's pairs: with ZeRO inside hosts, 512 ranks lose less than with ZeRO over all of them."""
    model = ModelShape.parse("layers=32 hidden=4096 heads=32 ffn=11008 vocab=103168 gated=true")
    hosts, work = replace(cluster("dgx-a100:64"), network_bytes_per_s=50e9), Workload(2048, 4096)
    program = Software(narrow_gradients=True, sends_tensors=True, overlaps_gathers=False)

    def seconds(shard: str) -> float:
        plan = Plan.parse(f"dp=512 zero=1 {shard} micro=4 precision=bf16 reduce=bf16")
        return estimate_step(model, plan, hosts, work, program).step_s

    assert seconds("shard=8") < 0.85 * seconds("")


def test_messages_of_tensors_take_more_calls_than_those_of_units() -> None:
    plan, hosts = Plan.parse("dp=512 zero=3 micro=1 precision=bf16"), cluster("dgx-a100:64")
    work = Workload(2048, 512)
    by_unit, by_tensor = (
        estimate_step(MODEL, plan, hosts, work, Software(sends_tensors=tensors)).step_s
        for tensors in (False, True)
    )
    assert by_tensor > by_unit


def test_a_gather_into_a_list_takes_the_host_a_start_for_each_rank() -> None:
    """DeepSpeed's of 2021; every tensor is gathered before the forward and before the backward."""
    plan, hosts = Plan.parse("dp=512 zero=3 micro=1 precision=bf16"), cluster("dgx-a100:64")
    work, program = Workload(2048, 512), Software(sends_tensors=True, overlaps_data=False)
    whole, listed = (
        estimate_step(MODEL, plan, hosts, work, replace(program, fills_lists=lists))
        for lists in (False, True)
    )
    tensors = sum(len(unit.params) for unit in rank_layouts(MODEL, plan, program)[0].units)
    starts = 512 * hosts.constants.launch_s * tensors
    assert (listed.step_s - whole.step_s) / starts == pytest.approx(2)  # before forward and backward


@pytest.mark.parametrize("schedule", ["zbv", "zb-h1"])
def test_neither_half_of_a_split_backward_is_faster_than_the_host(schedule: str) -> None:
    """A faster device is never slower."""
    model = ModelShape.parse("layers=16 hidden=512 heads=8 ffn=2048 vocab=1024")
    plan, node = Plan.parse(f"pp=2 micro=8 schedule={schedule} precision=bf16"), cluster("dgx-h100:2gpus")
    work, times = Workload(128, 8), []
    for factor in (0.1, 0.3, 1.0, 3.0, 10.0):
        peaks = {name: factor * peak for name, peak in node.device.peak_flops.items()}
        faster = replace(node, device=replace(node.device, peak_flops=peaks))
        for stage in stage_seconds(model, plan, faster, work):
            assert stage.weight >= stage.forward / 4 > 0
        times.append(estimate_step(model, plan, faster, work).step_s)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(("layers", "pp"), [(8, 8), (8, 4), (8, 2), (32, 1)])
def test_zero_2_needs_at_most_the_own_range_more_than_zero_1(layers: int, pp: int) -> None:
    """With no more units on a stage than reductions in flight, all full gradients exist at once, next to the
    rank's range; zero=3 is the least from three units on."""
    model = ModelShape.parse(f"layers={layers} hidden=2048 heads=16 ffn=8192 vocab=32000")
    uses = [
        estimate_step(
            model,
            Plan.parse(f"dp={64 // pp} pp={pp} micro={pp} zero={zero} precision=bf16"),
            cluster("dgx-h100:8"),
            WORK,
        ).memory
        for zero in range(4)
    ]
    own = uses[2].gradients
    assert uses[1].total <= uses[0].total
    assert uses[2].total - uses[2].allocator <= uses[1].total - uses[1].allocator + own
    if layers // pp > 4:
        assert uses[3].total < uses[2].total < uses[1].total


def runs() -> list[Run]:
    return [run for run in read_runs(DATA / "published_runs.csv") if isinstance(run, Run)]


def test_predictions_of_published_runs_stay_within_their_measured_accuracy() -> None:
    priced, refused = estimate_all(read_runs(DATA / "published_runs.csv"))
    result = score_runs(priced, refused)
    assert result["error"] < 0.08
    assert result["p90_error"] < 0.2
    assert result["memory"]["rows"] == 65
    assert result["memory"]["error_mean"] < 0.08
    assert result["false_refusals"] < 0.1 * result["rows_ran"]
    assert {one.reason for one in refused} == {"schedule zb-2p is not one of this product's"}


@pytest.mark.parametrize("name", ["published_runs", "published_wide"])
def test_no_row_is_a_special_case(tmp_path: Path, name: str) -> None:
    """Estimates do not depend on what names a row or its publisher, but on its columns and on its program,
    which a column may say as well as the entry of its report."""
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:60]
    for row in rows:
        row["program"] = report_says(row["source"], "program", row["gpu"], row["model_name"]) or ""
        row["recompute"] = recompute(row, row["source"])
        row |= {"id": "x", "source": "anonymous", "confidence": ""}
    with (tmp_path / "anonymous.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    named, anonymous = (
        [run.estimate() for run in read_runs(path) if isinstance(run, Run)]
        for path in (DATA / f"{name}.csv", tmp_path / "anonymous.csv")
    )
    assert [each.step_s for each in anonymous] == [each.step_s for each in named[: len(anonymous)]]
    memory = [each.memory for each in anonymous]
    assert memory == [each.memory for each in named[: len(anonymous)]]


@pytest.mark.parametrize(
    ("text", "gigabytes_per_s"),
    [
        ("8x200Gb/s HDR IB/node", 200),
        ("400Gb/s per GPU", 400),
        ("1.6Tb/s per node", 200),
        ("not stated", 200),
    ],
)
def test_the_network_of_a_row_is_that_of_its_hosts(tmp_path: Path, text: str, gigabytes_per_s: int) -> None:
    (tmp_path / "one.csv").write_text(
        "source,layers,hidden,seq_len,gpu,n_gpus,global_batch,step_time_s,inter_bw,program\n"
        f"one,8,1024,1024,A100-SXM-80GB,16,16,1,{text},messages=tensors\n"
        f"one,8,1024,1024,A100-SXM-80GB,16,16,1,{text},messages=pages\n",
        encoding="utf-8",
    )
    run, refused = read_runs(tmp_path / "one.csv")
    assert isinstance(run, Run)
    assert run.software.sends_tensors
    assert run.cluster.network_bytes_per_s == gigabytes_per_s * 1e9
    assert isinstance(refused, Refused)
    assert refused.reason == "messages=pages is not a property of a program"


def test_wide_groups_and_float8_are_priced_within_their_measured_accuracy() -> None:
    priced, refused = estimate_all(read_runs(DATA / "published_wide.csv"))
    assert {each.run.publisher for each in priced} == {"internlm", "nvidia"}
    assert not [each for each in refused if "fp8" in each.reason]
    result = score_runs(priced, refused)
    assert result["publishers"]["internlm"]["error"] < 0.08
    assert result["groups"]["regret_max"] < 0.07
    float8 = [each for each in priced if each.run.precision == "fp8"]
    assert len(float8) > 10
    assert sum(abs(each.error) for each in float8) / len(float8) < 0.15


def test_memory_is_compared_with_what_the_whole_report_counts(tmp_path: Path) -> None:
    """Tensors if the report's entry or a column says so, all of the device's memory otherwise."""
    measured = [run for run in runs() if run.memory_bytes]
    counts = {run.source: set[bool]() for run in measured}
    for run in measured:
        counts[run.source].add(run.counts_tensors)
    assert sorted(map(sorted, counts.values())) == [[False], [True]]
    header, *lines = (DATA / "published_runs.csv").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("bloom-001,"))
    (tmp_path / "own.csv").write_text(f"memory_counts,{header}\ntensors,{row}\n", encoding="utf-8")
    own = next(run for run in read_runs(tmp_path / "own.csv") if isinstance(run, Run))
    assert own.counts_tensors
    both = [ScoredRun(replace(own, counts_tensors=c), own.estimate()).memory_error for c in (True, False)]
    use = own.estimate().memory
    assert both[1] - both[0] == pytest.approx((use.runtime + use.allocator) / own.memory_bytes)


def test_input_gradients_are_reduced_during_the_products_of_weight_gradients() -> None:
    """Without the overlap, or under a schedule that moves these products away, all of it is exposed."""
    node = cluster("dgx-h100:1")

    def tensor_s(text: str, overlaps: bool) -> float:
        plan, software = Plan.parse(f"{text} precision=bf16"), Software(overlaps_tensor=overlaps)
        return sum(stage.tensor for stage in stage_seconds(MODEL, plan, node, WORK, software))

    for text in ("tp=8 micro=32", "tp=8 sp=true micro=32"):
        assert tensor_s(text, True) < 0.85 * tensor_s(text, False)
    assert tensor_s("tp=4 pp=2 micro=32 schedule=zb-h1", True) == tensor_s("tp=4 pp=2 micro=32", False)


def test_slow_instructions_of_single_warps_slow_attention_and_not_other_products() -> None:
    """Twice as slow, they add as many seconds to a step as attention's products take."""
    plan = "dp=64 zero=3 micro=2 precision=bf16"
    one, half, third = (step_s(plan, warp_fraction=1 / factor) for factor in (1, 2, 3))
    assert third - half == pytest.approx(half - one, rel=0.05)
    assert 0 < half - one < one / 4
    assert cluster("h100:8").device.warp_fraction < 1 == cluster("a100:8").device.warp_fraction


def test_virtual_stages_that_a_row_leaves_open_are_taken_at_the_best_price(tmp_path: Path) -> None:
    header, *lines = (DATA / "published_runs.csv").read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith("mcore-h100-70B,"))
    (tmp_path / "one.csv").write_text(f"{header}\n{row}\n", encoding="utf-8")
    run = next(run for run in read_runs(tmp_path / "one.csv") if isinstance(run, Run))
    assert {plan.num_chunks for plan in run.plans} == {1, 2, 3, 6, 7, 14, 21, 42}
    assert run.estimate().plan.num_chunks > 1


def test_fused_attention_is_faster_than_stored_scores() -> None:
    plan = Plan.parse("dp=64 zero=3 micro=2 precision=bf16")
    times = [
        estimate_step(MODEL, plan, cluster("dgx-h100:8"), WORK, Software(fused_attention=f)).step_s
        for f in (True, False)
    ]
    assert times[0] < times[1]


def test_a_ring_over_two_hosts_sends_what_all_of_its_ranks_send() -> None:
    """A ring of 16 ranks passes 15/16 of the bytes through every link, between the hosts too."""
    links = Links.of(cluster("dgx-h100:2"), DEFAULT)
    slow = links._replace(collective_s=0.0, hop_s=0.0, network_hop_s=0.0, link=links.network)
    assert collective_s("all-gather", slow, Group(16, 1, 16), 16e9) == pytest.approx(15e9 / links.network)


def test_fitted_constants_predict_runs_that_other_constants_made() -> None:
    """Times of known constants, which a fit of another source's runs leaves out."""
    made = replace(PRIOR, product_fraction=0.6, network_fraction=0.3, memory_fraction=0.5)
    some = [run for run in runs() if run.step_s and len(run.plans) == 1][::24]
    assert len({run.source for run in some}) > 2
    learned = [replace(run, publisher="one", step_s=run.estimate(made).step_s) for run in some]

    def error(constants: Constants) -> float:
        return max(abs(run.estimate(constants).step_s / (run.step_s or 0) - 1) for run in learned)

    fitted = fit(learned)
    assert error(PRIOR) > 0.2
    assert error(fitted) < 0.08
    slow = [replace(run, publisher="other", step_s=10 * (run.step_s or 0)) for run in learned]
    assert fit_without([*learned, *slow], ["other"])["other"] == fitted


@pytest.mark.parametrize("reduce", ["fp32", "int8", "topk:0.01"])
def test_a_worker_of_servers_holds_the_tensors_of_one_rank(reduce: str) -> None:
    """Its pushes are compressed apart from its gradients."""
    plan = Plan.parse(f"dp=4 servers=2 precision=bf16 micro=2 reduce={reduce}")
    alone = Plan.parse("dp=1 precision=bf16 micro=2")
    own, of_one = (rank_memory(MODEL, each, 0, 1, 512, PLAIT, False) for each in (plan, alone))
    assert (own.gradients, own.parameters, own.master) == (of_one.gradients, of_one.parameters, of_one.master)


def test_servers_are_priced_by_the_links_that_carry_most() -> None:
    """Two servers for four workers receive and send twice what a worker does."""
    machines, work = cluster("dgx-h100:1"), Workload(sequence=4096, batch=128)
    links = Links.of(machines, machines.constants)
    seconds = {}
    for text in ("servers=4", "servers=2", "server=colocated"):
        found = estimate_step(MODEL, Plan.parse(f"dp=4 {text} precision=bf16"), machines, work)
        hidden = (1 - machines.constants.overlap_tax) * found.hidden["data communication"]
        seconds[text] = found.parts["data communication"] + hidden - 2 * links.collective_s
        assert found.step_s == pytest.approx(sum(found.parts.values()))
    by_one = MODEL.num_params * (4 + 2) / links.link
    assert seconds["servers=4"] == pytest.approx(by_one, rel=1e-3)
    assert seconds["servers=2"] == pytest.approx(2 * by_one, rel=1e-3)
    assert seconds["server=colocated"] == pytest.approx(0.75 * by_one, rel=1e-3)
    with pytest.raises(PlanError, match="sync=all"):
        estimate_step(MODEL, Plan.parse("dp=4 servers=2 sync=async precision=bf16"), machines, work)


LONG = Workload(sequence=131_072, batch=8)


def long_step(text: str, software: Software = PLAIT, work: Workload = LONG) -> StepEstimate:
    plan = Plan.parse(f"{text} precision=bf16 recompute=full")
    return estimate_step(MODEL, plan, cluster("dgx-h100:1"), work, software)


def test_ranks_of_cp_compute_equal_parts_of_the_sequences() -> None:
    """As much as data ranks, each of which has an eighth of the sequences."""
    by_tokens, by_samples = long_step("cp=8 micro=8 zero=1"), long_step("dp=8 zero=1")
    for part in ("compute", "recompute"):
        assert by_tokens.parts[part] == pytest.approx(by_samples.parts[part], rel=0.01), part
    assert sum(by_tokens.parts.values()) == pytest.approx(by_tokens.step_s)
    assert "attention communication" not in by_samples.parts


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_of_cp_hold_parts_of_the_states_and_of_the_activations(zero: int, fused: bool) -> None:
    """States as data ranks do; of the activations those of their tokens, gathered keys and values, and what
    recomputed blocks keep of attention."""
    software = Software(fused_attention=fused)
    by_tokens, by_samples = (
        long_step(f"{text} zero={zero}", software).memory for text in ("cp=8 micro=8", "dp=8")
    )
    for name in ("parameters", "gradients", "master", "optimizer"):
        of_rank, of_data_rank = getattr(by_tokens, name), getattr(by_samples, name)
        assert of_rank == of_data_rank, name
    assert by_tokens.activations is not None
    assert by_samples.activations is not None
    head = MODEL.vocab * MODEL.hidden * 2  # the gradient of its weight, on each rank
    more = 8 * (by_tokens.activations - head) - (by_samples.activations - head)
    kept = MODEL.layers * LONG.sequence * (2 * MODEL.hidden + 4 * 32)  # attention's, and sums of 32 heads
    assert kept < more < 1.05 * kept, "and the gathered keys and values of one layer"


@pytest.mark.parametrize(("cp", "method"), [(2, "allgather"), (8, "ulysses"), (8, "allgather"), (8, "ring")])
def test_attention_communicates_for_as_long_as_its_bytes_take(cp: int, method: str) -> None:
    """Formulas of docs/context.md; where a block is recomputed, ulysses exchanges once more."""
    machines = replace(cluster("dgx-h100:1"), constants=replace(DEFAULT, collective_s=0.0, hop_s=0.0))
    plan = Plan.parse(f"dp={8 // cp} cp={cp} cp_method={method} micro={cp} precision=bf16 recompute=full")
    found = estimate_step(MODEL, plan, machines, LONG)
    width = 2 * MODEL.head_dim
    exchanged = method == "ulysses"
    forward = (cp - 1) / cp * (32 + 8) * width if exchanged else (cp - 1) * 8 * width
    passes = 3  # forward, backward, and again; or keys twice, and their gradients
    num_bytes = 2 * forward * passes * MODEL.layers * LONG.tokens / 8
    seconds = num_bytes / Links.of(machines, machines.constants).link
    assert found.parts["attention communication"] == pytest.approx(seconds)


def test_rings_of_neighbours_send_less_between_hosts() -> None:
    """Heads are exchanged inside a host; between hosts, keys of an eighth of the heads go around."""
    machines, work = cluster("dgx-h100:2"), replace(LONG, batch=1)
    times = {}
    for method in ("2x8", "ring", "ulysses"):
        plan = Plan.parse(f"cp=16 cp_method={method} precision=bf16")
        times[method] = estimate_step(MODEL, plan, machines, work).parts["attention communication"]
    assert times["2x8"] < min(times["ring"], times["ulysses"])


def test_a_method_that_is_not_named_is_the_one_that_sends_less() -> None:
    for cp, least in ((2, "allgather"), (8, "ulysses")):
        texts = (f"dp={8 // cp} cp={cp} micro={cp}{method}" for method in ("", f" cp_method={least}"))
        auto, named = (long_step(text) for text in texts)
        assert (auto.step_s, auto.memory_high_bytes) == (named.step_s, named.memory_high_bytes)
    hosts, work = cluster("dgx-h100:2"), replace(LONG, batch=1)
    auto, named = (
        estimate_step(MODEL, Plan.parse(f"cp=16{method} precision=bf16"), hosts, work)
        for method in ("", " cp_method=2x8")
    )
    assert (auto.step_s, auto.memory_high_bytes) == (named.step_s, named.memory_high_bytes)
    with pytest.raises(PlanError, match="heads do not divide"):
        estimate_step(MODEL, Plan.parse("cp=3 cp_method=ulysses"), cluster("dgx-h100:1"), LONG)


def test_an_all_to_all_between_hosts_passes_nothing_on() -> None:
    """Each of 8 ranks of a host sends half of its bytes to the other host; a ring passes on what they all
    need once."""
    links = Links.of(cluster("dgx-h100:2"), DEFAULT)
    slow = links._replace(collective_s=0.0, hop_s=0.0, network_hop_s=0.0, link=links.network)
    group = Group(16, 1, 16)
    assert collective_s("exchange in layers", slow, group, 1e9) == pytest.approx(8 * 0.5e9 / links.network)
    assert collective_s("all-gather", slow, group, 1e9) == pytest.approx(15 / 16 * 1e9 / links.network)


def test_ranks_of_cp_share_the_network_of_their_hosts() -> None:
    """Groups of four within hosts are faster than groups of four with ranks on two."""
    machines = cluster("dgx-h100:2")
    within, across = (
        estimate_step(MODEL, Plan.parse(f"{text} cp=4 precision=bf16"), machines, LONG).parts
        for text in ("dp=4 micro=2", "tp=4 micro=8")
    )
    seconds = "attention communication"
    assert across[seconds] > 2 * within[seconds]


@pytest.mark.parametrize(
    ("words", "tokens"), [("dp=2", 33), ("cp=2 cp_method=ring", 18), ("cp=2 cp_method=ulysses", 17)]
)
def test_a_rank_has_the_tokens_of_its_runs_which_are_filled_up(words: str, tokens: int) -> None:
    assert tokens_of_rank(MODEL, Plan.parse(words), 33) == tokens
