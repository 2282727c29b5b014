"""A checkpoint of any plan resumes under any other, as if there had been one process all along."""

import contextlib
import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.checkpoint import open_checkpoint
from plait.checkpoint.reader import Reader
from plait.errors import CheckpointError
from support import hf_models, pipeline_plans, programs, routed_experts, trainings
from support.pool import Pool

LAYERS, SEQUENCES = 5, 24
STEPS, STEPS_BEFORE = 3, 2
PLANS = (
    "micro=2",
    "dp=2 zero=0 micro=2",
    "dp=4 shard=2 zero=1 micro=3",
    "dp=3 zero=2 micro=2",
    "dp=4 shard=2 zero=3 micro=2",
    "tp=2 micro=2",
    "tp=2x2 dp=2 zero=3 micro=2",
    "tp=3 sp=true micro=2",
    "pp=2 schedule=interleaved micro=4",
    "pp=3 schedule=zb-h1 dp=2 zero=1 micro=2",
    "pp=2 tp=2 dp=2 zero=1 schedule=1f1b micro=2",
    "pp=2 schedule=zbv dp=4 zero=3 shard=2 micro=3",
    "cp=2 micro=2",
    "cp=4 zero=1 micro=2",
    "cp=2 tp=2 zero=2 cp_method=ulysses micro=2",
    "cp=3 dp=2 zero=3 shard=1 cp_method=ring micro=3",
    "cp=2 pp=2 dp=2 zero=1 schedule=1f1b micro=2",
    "pp=2 dp=2 zero=1 schedule=zbv stages=0,3,2,0 micro=2",
)


def task_of(model: str) -> programs.Task:
    """With the loss of plait for models of transformers: `cp` divides this one only."""
    if model in ("mixtral", "list of experts"):
        build = functools.partial(hf_models.model_of, "mixtral", num_hidden_layers=3)
        if model != "mixtral":
            build = functools.partial(routed_experts.model_of, "list")
        return replace(
            pipeline_plans.task("tied_llama", LAYERS, SEQUENCES, STEPS), build=build, own_loss=True
        )
    task = pipeline_plans.task(model, LAYERS, SEQUENCES, STEPS)
    return replace(task, own_loss=model == "tied_llama")


def _fp64(words: str) -> str:
    return f"{words} precision=fp64"


def ranks_of(words: str) -> int:
    return plait.Plan.parse(words).num_ranks


def _through(model: str, plan: str, folder: Path) -> Any:
    """A training that saves after two of three steps and goes on."""
    engine = programs.engine_of(task_of(model), plan)
    results = []
    for step, batch in enumerate(task_of(model).data(STEPS)):
        if step == STEPS_BEFORE:
            engine.save(folder)
        results.append(engine.step(programs.share_of(batch, engine)))
    return results[STEPS_BEFORE:], engine.full_parameters(), engine.state()


def _goes_on(model: str, plan: str, checkpoints: list[Path], own: Path | None = None) -> Any:
    """One engine, given one checkpoint after the other; the state after that of `own` is returned, too."""
    engine = programs.engine_of(task_of(model), plan, seed=99)
    engine.step(programs.share_of(task_of(model).data(1)[0], engine))  # what it held is replaced
    found = []
    for checkpoint in checkpoints:
        engine.load(checkpoint)
        assert engine.num_steps == STEPS_BEFORE
        batches = task_of(model).data(STEPS)[STEPS_BEFORE:]
        results = [engine.step(programs.share_of(batch, engine)) for batch in batches]
        state = engine.state() if checkpoint == own else None
        found.append((results, engine.full_parameters(), state))
    return found


def saved_by(pool: Pool, model: str, words: str, root: Path) -> tuple[Path, Any]:
    """The path of a plan's checkpoint, and the result of its training. Saved once a session."""
    folder = root / model / words.replace(" ", "-")
    return folder / f"step-{STEPS_BEFORE:08d}", pool.run(
        _through, ranks_of(words), model, _fp64(words), folder
    )[0]


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda model, words: saved_by(pool, model, words, root))


def check_same(found: Any, expected: Any) -> None:
    results, weights, _ = found
    difference, name = programs.largest_difference(weights, expected[1])
    assert difference < 1e-9, name
    for mine, theirs in zip(results, expected[0], strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-9)


@pytest.mark.parametrize(
    ("words", "steps_back"),
    [
        *((words, (0, 1, 4, 7, 10)) for words in PLANS if not words.startswith("cp=")),
        *((words, (0, 1, 4, 7, 10, at)) for at, words in enumerate(PLANS) if words.startswith("cp=")),
        *(pytest.param(words, tuple(range(len(PLANS))), marks=pytest.mark.sweep) for words in PLANS),
    ],
)
def test_a_checkpoint_of_any_plan_goes_on_under_this_one(
    pool: Pool, saved: Any, words: str, steps_back: tuple[int, ...]
) -> None:
    """To 1e-9 of one process that never stopped, to the bit of itself. From as many plans in the circle, so
    that each strand goes on from each other, and `cp` from one process; the sweep has all ordered pairs."""
    alone = saved("tied_llama", PLANS[0])[1]
    sources = [PLANS[PLANS.index(words) - back] for back in steps_back]
    checkpoints = [saved("tied_llama", source)[0] for source in sources]
    own = checkpoints[0]
    ranks = pool.run(_goes_on, ranks_of(words), "tied_llama", _fp64(words), checkpoints, own, timeout_s=180)
    for source, found in zip(sources, ranks[0], strict=True):
        check_same(found, alone)
        if source == words:
            whole = saved("tied_llama", words)[1]
            assert found[0] == whole[0]
            assert trainings.differing(found[1], whole[1]) == trainings.differing(found[2], whole[2]) == []


@pytest.mark.parametrize(
    ("model", "plans", "num_sources"),
    [
        pytest.param("pair", (0, 4, 9), 2, marks=pytest.mark.quick),
        ("frozen", (0, 4, 9), 2),
        ("gpt2", (0, 10, 6), 2),  # its packed projections are cut by `tp`
        *(pytest.param(model, (0, 4, 9), 3, marks=pytest.mark.sweep) for model in ("pair", "frozen")),
        pytest.param("gpt2", (0, 4, 9, 10, 6), 5, marks=pytest.mark.sweep),
    ],
)
def test_shared_blocks_frozen_weights_and_packed_projections_are_saved_once(
    pool: Pool, saved: Any, model: str, plans: tuple[int, ...], num_sources: int
) -> None:
    words_of = [PLANS[number] for number in plans]
    alone = saved(model, words_of[0])[1]
    for at, words in enumerate(words_of):
        sources = [words_of[at - back] for back in range(1, 1 + min(num_sources, len(words_of)))]
        checkpoints = [saved(model, source)[0] for source in sources]
        for found in pool.run(_goes_on, ranks_of(words), model, _fp64(words), checkpoints)[0]:
            check_same(found, alone)


def test_every_element_is_written_once_and_by_all_ranks_alike(pool: Pool, saved: Any) -> None:
    """Also where ranks hold copies: these share the work."""
    whole = sum(
        facts.bytes for facts in open_checkpoint(saved("tied_llama", PLANS[0])[0]).manifest.files.values()
    )
    for words in PLANS[1:]:
        manifest = open_checkpoint(saved("tied_llama", words)[0]).manifest
        by_rank: dict[str, int] = {}
        for name, facts in manifest.files.items():
            by_rank[name[:10]] = by_rank.get(name[:10], 0) + facts.bytes - facts.header_bytes
        assert sum(by_rank.values()) < whole
        if "pp" not in words and "tp" not in words:
            assert max(by_rank.values()) < 1.3 * sum(by_rank.values()) / ranks_of(words), words


def _load_counting(model: str, plan: str, checkpoint: Path) -> tuple[int, int]:
    """(bytes read but for headers, bytes of what this rank needs of it)."""
    engine = programs.engine_of(task_of(model), plan)
    found = open_checkpoint(checkpoint)
    needed = 0

    class Counting(Reader):
        def read(self, key: str, boxes: Any, start: int, into: torch.Tensor, *, counted: bool = True) -> None:
            nonlocal needed
            needed += into.numel() * found.manifest.tensors[key].torch_dtype.itemsize
            super().read(key, boxes, start, into, counted=counted)

    with Counting(found.path, found.manifest) as reader:
        engine.load_from(reader)
        headers = sum(
            found.manifest.files[reader._names[file]].header_bytes for file in reader._valid_headers
        )
        return reader.bytes_read - headers, needed


@pytest.mark.parametrize("words", [PLANS[4], PLANS[6], PLANS[7], PLANS[10], PLANS[13]])
def test_a_rank_reads_only_the_bytes_it_needs(pool: Pool, saved: Any, words: str) -> None:
    for source in (PLANS[0], PLANS[3], PLANS[6], PLANS[8], PLANS[15]):
        ranks = pool.run(
            _load_counting, ranks_of(words), "tied_llama", _fp64(words), saved("tied_llama", source)[0]
        )
        for read, needed in ranks:
            assert read == needed > 0


def flip_a_bit(checkpoint: Path, key: str) -> str:
    """In the middle of its largest chunk; the file's name."""
    manifest = open_checkpoint(checkpoint).manifest
    facts = manifest.tensors[key]
    chunk = max(facts.chunks, key=lambda chunk: chunk.box.numel)
    name = list(manifest.files)[chunk.file]
    content = bytearray((checkpoint / name).read_bytes())
    content[chunk.offset + chunk.box.numel * facts.torch_dtype.itemsize // 2] ^= 16
    (checkpoint / name).write_bytes(content)
    return name


def _damaged(model: str, plan: str, checkpoint: Path, good: Path) -> Any:
    engine = programs.engine_of(task_of(model), plan)
    batch = programs.share_of(task_of(model).data(1)[0], engine)
    try:
        engine.load(checkpoint)
    except CheckpointError as error:
        message = str(error)
    else:
        return None
    try:
        engine.step(batch)
    except plait.errors.ModelError as error:
        refused = str(error)
    engine.load(good)
    return message, refused, engine.step(batch).loss


@pytest.mark.parametrize("words", [PLANS[0], PLANS[3], PLANS[6], PLANS[7], PLANS[10], PLANS[11], PLANS[13]])
def test_damage_found_by_one_reader_is_raised_on_all_ranks(
    pool: Pool, saved: Any, tmp_path: Path, words: str
) -> None:
    """Also when each of several ranks reads some rows of a chunk, so that no rank has read all of it."""
    good = saved("tied_llama", PLANS[2])[0]
    bad = tmp_path / good.name
    bad.mkdir()
    for file in good.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    name = flip_a_bit(bad, "exp_avg/model.layers.1.mlp.down_proj.weight")
    ranks = pool.run(_damaged, ranks_of(words), "tied_llama", _fp64(words), bad, good)
    assert len({found[0] for found in ranks}) == 1, "all ranks tell the same"
    message, refused, loss = ranks[0]
    assert name in message
    assert "exp_avg/model.layers.1.mlp.down_proj.weight" in message
    assert "does not have the checksum" in message
    assert "was interrupted" in refused
    assert loss == pytest.approx(saved("tied_llama", PLANS[0])[1][0][0].loss, rel=0.5)


def _loads(model: str, plan: str, checkpoint: Path) -> str | None:
    """The error, if it is not taken."""
    task = task_of(model)
    engine = programs.engine_of(task, plan)
    try:
        engine.load(checkpoint)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "words",
    ["pp=2 schedule=zbv micro=3", "pp=2 schedule=zbv dp=2 zero=1 micro=3", "pp=2 schedule=zbv tp=2 micro=3"],
)
@pytest.mark.parametrize("kind", ["weights", "exp_avg", "scalar.step"])
def test_tensors_that_a_rank_reads_twice_are_verified_too(
    pool: Pool, saved: Any, tmp_path: Path, words: str, kind: str
) -> None:
    """A tied weight that is on two stages of one rank, of which each reads the half or all of a chunk."""
    good = saved("tied_llama", PLANS[0])[0]
    key = f"{kind}/model.embed_tokens.weight"
    assert len(open_checkpoint(good).manifest.tensors[key].chunks) == 1
    plan, ranks = _fp64(words), ranks_of(words)
    assert pool.run(_loads, ranks, "tied_llama", plan, good) == [None] * ranks
    bad = Path(shutil.copytree(good, tmp_path / good.name))
    name = flip_a_bit(bad, key)
    messages = set(pool.run(_loads, ranks, "tied_llama", plan, bad))
    assert len(messages) == 1
    assert name in str(messages.pop())


def _states_in_bf16(model: str, folder: Path) -> tuple[bool, str | None]:
    engine = programs.engine_of(task_of(model), "micro=2 precision=bf16 optim_dtype=bf16")
    engine.step(task_of(model).data(1)[0])
    path = engine.save(folder)
    engine.load(path)
    flip_a_bit(path, "scalar.step/model.embed_tokens.weight")
    return True, _loads(model, "micro=2 precision=bf16 optim_dtype=bf16", path)


def test_counters_that_many_slices_share_are_verified(pool: Pool, tmp_path: Path) -> None:
    was_loaded, message = pool.run(_states_in_bf16, 1, "tied_llama", tmp_path)[0]
    assert was_loaded
    assert "scalar.step" in str(message)


def _saves_torn(model: str, checkpoint: Path, folder: Path) -> str:
    engine = programs.engine_of(task_of(model), _fp64("dp=2 zero=1 micro=2"))
    with contextlib.suppress(CheckpointError):
        engine.load(checkpoint)
    try:
        engine.save(folder)
    except plait.errors.ModelError as error:
        return str(error)
    return "saved"


def test_a_half_loaded_state_is_not_saved(pool: Pool, saved: Any, tmp_path: Path) -> None:
    good = saved("tied_llama", PLANS[0])[0]
    bad = Path(shutil.copytree(good, tmp_path / good.name))
    flip_a_bit(bad, "weights/model.norm.weight")
    for message in pool.run(_saves_torn, 2, "tied_llama", bad, tmp_path / "new"):
        assert "was interrupted" in message
    assert not (tmp_path / "new").exists()


def _saves_apart(model: str, root: Path) -> str:
    engine = programs.engine_of(task_of(model), _fp64("dp=2 zero=1 micro=2"))
    folder = root / f"of-rank-{engine.world.rank}"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.checkpoint.saver._VISIBLE_TIMEOUT_S", 0.3)
        with pytest.raises(CheckpointError) as caught:
            engine.save(folder)
    return str(caught.value)


def test_hosts_that_do_not_share_the_folder_are_an_error_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    messages = pool.run(_saves_apart, 2, "tied_llama", tmp_path)
    assert messages[0] == messages[1]
    assert "not the same one on all hosts" in messages[0]
    assert list((tmp_path / "of-rank-0").glob("step-*")) == []


EXPERT_PLANS = (
    "micro=2",
    "dp=2 ep=2",
    "dp=4 ep=2 zero=3",
    "dp=4 ep=4 zero=1 micro=2",
    "dp=2 cp=2 ep=4 zero=3",
    "tp=2",
    "pp=2 dp=2 ep=2 zero=2 micro=2",
    "dp=4 ep=2 zero=1 shard=2",
    "dp=4 ep=2",
    "dp=2 ep=2 tp=2 zero=1",
)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        *(("mixtral", words) for words in EXPERT_PLANS),
        *(("list of experts", EXPERT_PLANS[n]) for n in (2, 3)),
    ],
)
def test_a_mixture_goes_on_with_other_ranks_for_its_experts(
    pool: Pool, saved: Any, model: str, words: str
) -> None:
    """Full tensors by name: every rank reads its experts, whichever rank had them."""
    alone = saved(model, EXPERT_PLANS[0])[1]
    plans = [each for each in EXPERT_PLANS if model == "mixtral" or "tp" not in each]  # tp refuses lists
    sources = [plans[plans.index(words) - back] for back in (0, 1, 3)]
    checkpoints = [saved(model, source)[0] for source in sources]
    ranks = pool.run(
        _goes_on, ranks_of(words), model, _fp64(words), checkpoints, checkpoints[0], timeout_s=180
    )
    for source, found in zip(sources, ranks[0], strict=True):
        check_same(found, alone)
        if source == words:
            whole = saved(model, words)[1]
            assert found[0] == whole[0]
            assert trainings.differing(found[1], whole[1]) == trainings.differing(found[2], whole[2]) == []
