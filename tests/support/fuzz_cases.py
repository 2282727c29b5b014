"""Seeded bad input: recipes, plans, command lines, files and calls.

A generator takes a random state and a folder, a copy of a finished run with recipe.toml, text/, data/ and
run/; it writes files there and returns what to run.
"""

import hashlib
import json
import math
import os
import random
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plait
import plait.comm.launch
from plait.__main__ import main
from plait.errors import PlaitError
from plait.models import causal_lm_on_meta

Action = Callable[[], object]


def words_of(text: str) -> list[str]:
    return text.split()


CHECKPOINT = "run/checkpoints/step-00000006"
WORDS = """
.. ../other /dev/zero /dev/null /proc/self/mem ~unknown-user/a nan inf -1 0 1e400 [/red] a.b true null [
{ ' " \\ %s%n {} ${HOME} file:/dev/zero file:pipe hf: evil-org/repo * llama cuda pipe circle run text
recipe.toml
"""
TEXTS = [
    *WORDS.split(),
    *("", " ", "\n", "\x1b]0;title\x07", "a\0b", "\u202eabc", "\ud800", "\udc80", "\U0001f99c"),
    *("9" * 5000, "0x" + "f" * 6000, "a" * 300, "a/" * 3000),
]
INTEGERS = [0, 1, -1, 2, 3, 7, 100, 4096, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]
REALS = [0.0, -0.0, 0.5, 2.0, 1e-320, 1e308, -1e308, math.inf, -math.inf, math.nan]
RUN, RECIPE = ["train", "run", "--resume"], ["train", "recipe.toml", "--set", "run.dir=new"]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def junk(rng: random.Random) -> Any:
    """A value of any type that JSON has."""
    others = [None, True, False, [], {}, [1, "a"], {"a": 1}, {"": None}, deep(70), deep(500)]
    return rng.choice(rng.choice([INTEGERS, REALS, TEXTS, TEXTS, others]))


def mutate(value: Any, rng: random.Random) -> None:
    """Change one place of a JSON object: most often a value that others of its type could be."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = rng.choice(keys)
        if not isinstance(value[key], dict | list) or not value[key] or rng.random() < 0.1:
            break
        value = value[key]
    how, present = rng.random(), value[key]
    if how < 0.1:
        del value[key]
    elif how < 0.2 and isinstance(value, dict):
        value[rng.choice([*TEXTS, str(key)[:-1]])] = junk(rng)
    elif how < 0.7 and isinstance(present, int | float) and not isinstance(present, bool):
        value[key] = rng.choice(
            [present + 1, present - 1, present * 2, present * 1000, -present, *INTEGERS[:7]]
        )
    elif how < 0.6 and isinstance(present, str):
        value[key] = rng.choice([present[:-1], present.upper(), present * 2, rng.choice(TEXTS)])
    else:
        value[key] = junk(rng)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat or insert bytes."""
    at = rng.randrange(len(content) + 1)
    before, after = content[:at], content[at:]
    inserted = rng.choice([b"\0", b"\xff\xfe", b"[" * 2000, b"{" * 100_000, b'"', b"\n", b"9" * 5000])
    flipped = before + bytes([rng.randrange(256)]) + after[1:]
    return rng.choice([flipped, flipped, before, before + content[at // 2 :], before + inserted + after, b""])


# --- commands


def run_command(words: list[str]) -> Action:
    """The command line `plait words...`, up to where it would start ranks."""

    def run() -> None:
        plait.comm.launch.launch_local = lambda *_, **__: 0  # type: ignore[assignment]
        sys.argv = ["plait", *words]
        main()

    return run


def argument(value: object) -> str:
    """A text that can be an argument of a process."""
    return re.sub(
        "[\0\ud800-\udc7f\udd00-\udfff]", "", value if isinstance(value, str) else json.dumps(value)
    )


LLAMA_KEYS = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
hidden_act max_position_embeddings rms_norm_eps pad_token_id eos_token_id vocab_size
attention_dropout rope_parameters tie_word_embeddings attn_implementation _attn_implementation
initializer_range attention_bias mlp_bias model_type auto_map quantization_config dtype
"""
MODEL_KEYS = {
    "llama": LLAMA_KEYS.split(),
    "mixtral": words_of(
        """
    num_local_experts num_experts_per_tok num_key_value_heads experts_implementation sliding_window
    router_jitter_noise output_router_logits
    """
    ),
    "gpt2": words_of(
        """
    n_embd n_head n_layer n_inner n_positions activation_function attn_pdrop resid_pdrop
    layer_norm_epsilon scale_attn_weights reorder_and_upcast_attn
    """
    ),
}
RECIPE_KEYS = words_of(
    """
    run.steps run.dir run.batch data.dir data.sources optimizer.lr optimizer.args plan model model.path
    model.config.hidden_act tokenizer.path tokenizer.vocab_size sample.prompt a.b.c run.trace
    run.offload_dir data.sequence loss_scale.initial schedule.name data.text_key data.validation
    optimizer.name run.device
    """
)


def recipe(rng: random.Random, here: Path) -> Action:
    """A mutated recipe, as JSON or TOML, and values on the command line."""
    text = (here / "recipe.toml").read_text()
    if rng.random() < 0.2:
        path = here / "case.toml"
        path.write_bytes(damaged(text.encode(), rng))
    else:
        path, values = here / "case.json", tomllib.loads(text)
        if rng.random() < 0.6:
            family = rng.choice([*MODEL_KEYS])
            config = values["model"]["config"]
            if family != "llama":
                config["model_type"] = family
            key = rng.choice(MODEL_KEYS[family])
            config[key] = rng.choice([junk(rng), rng.choice(INTEGERS[:7]), rng.choice(REALS[:4])])
        values["run"]["dir"] = "new"
        for _ in range(rng.choice([0, 0, 1, 2])):
            mutate(values, rng)
        path.write_text(json.dumps(values))
    sets = [
        word
        for _ in range(rng.choice([0, 0, 0, 1, 2]))
        for word in ("--set", f"{rng.choice(RECIPE_KEYS)}={argument(junk(rng))}")
    ]
    command = rng.choice([["train"], ["train"], ["data", "build"], ["explain"]])
    return run_command([*command, str(path), *sets])


PLAN_VALUES = {
    **dict.fromkeys(("dp", "pp", "micro", "shard"), "1 1 1 2 4 8 0 -1 auto 1024 100000 99999999999"),
    **dict.fromkeys(("chunks", "prefetch"), "1 1 2 4 0 -1 1024 100000"),
    "tp": "1 2 2x1 1x2 2x2 0 2x 99999x99999",
    "zero": "0 1 2 3 4 two",
    "stages": "1 1,1 2,1 1,1,1,1 0 , 9999999",
    "schedule": "1f1b gpipe interleaved bfs zb-h1 zbv dualpipev inference file:case.csv file:/dev/zero",
    **dict.fromkeys(("sp", "compile", "sync_batchnorm", "tf32", "deterministic"), "true false 1"),
    "accumulate": "auto sharded unsharded cut",
    "reshard": "use step always",
    "router_balance": "micro step micro-batch",
    "precision": "fp32 bf16 fp16 fp64 fp8",
    "reduce": "fp32 bf16 int8 powersgd:2 powersgd:999999 powersgd:0",
    "algorithm": "auto ring two-level rings",
    "optim_dtype": "fp32 bf16 int8",
    "offload": "none cpu disk gpu",
    "recompute": "none full selective every=1 every=999999 every=0",
    **dict.fromkeys(("local_steps", "exchange_parts"), "1 2 8 0 -1 99999999999"),
    "outer": "average nesterov:0.7:0.9 nesterov:0.7 nesterov:x:0.9 adam",
    "exchange": "fp32 bf16 int8 fp8",
    "xp": "2",
}  # fmt: skip


def plan_text(rng: random.Random) -> str:
    if rng.random() < 0.05:
        return argument(rng.choice(TEXTS))
    words = []
    for key in rng.sample([*PLAN_VALUES], rng.randint(1, 4)):
        value = rng.choice(PLAN_VALUES[key].split()) if rng.random() < 0.9 else argument(rng.choice(TEXTS))
        words.append(f"{key}{rng.choice(['='] * 20 + ['==', '', ' '])}{value}")
    return rng.choice([" ", " ", ",", ", "]).join(words)


def plan(rng: random.Random, here: Path) -> Action:
    """A plan, or a schedule, of words that plans have and others."""
    numbers = ("0.0", "0.0", "0.1", "1.0", "1.1", "999999999.0", "x")
    cells = [rng.choice("FBBW") + rng.choice(numbers) for _ in range(rng.randrange(12))]
    text = rng.choice([",", "\n"]).join(cells) * rng.choice([1, 1, 1, 100_000])
    (here / "case.csv").write_text(rng.choice([text, "F0.0,B0.0", "F0.0,B0.0\nF1.0,B1.0"]))
    if rng.random() < 0.7:
        return run_command([*rng.choice([RECIPE, ["explain", "recipe.toml"]]), "--plan", plan_text(rng)])
    sizes = [1, 2, 2, 4, 8, 8, 0, -1, 1000, 100_000, 99_999_999, 10**30]
    words = ["--pp", str(rng.choice(sizes)), "--micro", str(rng.choice(sizes))]
    words += rng.choice([[], [], ["--chunks", str(rng.choice(sizes))]])
    outputs: list[list[str]] = [[], ["--text"], ["--csv", "-"], ["--png", "out.png"], ["--html", "out.html"]]
    name = rng.choice(PLAN_VALUES["schedule"].split())
    return run_command(["schedule", name, *words, *rng.choice(outputs)])


OPTIONS = {
    "train": "--plan --ranks --set --resume --from --probe --trace",
    "generate": "--prompt --prompts --tokens --temperature --top-k --top-p --min-p --seed --plan --batch",
    "export": "--dtype",
    "schedule": "--pp --micro --chunks --forward --transfer --trace --png --html --csv --text",
    "explain": "--plan --set --model --run --batch --sequence --rank --host-size --json",
    "checkpoint show": "--tensors --json",
    "checkpoint verify": "--all",
    "checkpoint diff": "--json --all",
    "checkpoint convert": "--to --dtype --max-shard-size --config",
    "data build": "--set --force",
    "--version": "",
    "--help": "",
}
FLAGS = words_of("--resume --probe --text --tensors --all --force")
PLACES = words_of(
    f"""
    recipe.toml run data text run/checkpoints {CHECKPOINT} run/recipe.json run/export run/measured.json
    run/export/config.json out out/deep/er pipe circle - 1f1b /dev/null fp32 hf run.steps=8 dp=1 2 4 0.5
    5GB
    """
)


def command(rng: random.Random, here: Path) -> Action:
    """A command with some of its options, or with one that it does not have."""
    name = rng.choice([*OPTIONS])

    def word() -> str:
        return rng.choice(PLACES) if rng.random() < 0.75 else argument(junk(rng))

    words = [*name.split(), *(word() for _ in range(rng.choice([0, 1, 1, 1, 2, 2])))]
    for _ in range(rng.randrange(3)):
        flag = rng.choice([*OPTIONS[name].split(), *OPTIONS[name].split(), "--plan"])
        words += [flag] if flag in FLAGS else [flag, word()]
    return run_command(words)


# --- files


def damage_json(path: Path, rng: random.Random) -> None:
    values = json.loads(path.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        mutate(values, rng)
    text = json.dumps(values)
    if path.name == "manifest.json" and rng.random() < 0.8:  # with a valid hash
        values.pop("sha256", None)
        body = json.dumps(values).removesuffix("}")
        text = f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'
    path.write_text(text)


def damage_file(path: Path, rng: random.Random) -> None:
    """Change the contents, or put something else in the place of the file."""
    how = rng.random()
    if path.suffix == ".json" and how < 0.5:
        damage_json(path, rng)
    elif how < 0.7:
        path.write_bytes(damaged(path.read_bytes(), rng))
    elif how < 0.78:
        is_source = path.suffix in (".txt", ".jsonl")  # of which all would be read
        os.truncate(path, rng.choice([0, 3, 2**20] if is_source else [0, 3, 2**33, 2**40]))
    else:
        path.unlink()
        kind = rng.randrange(5)
        if kind == 0:
            path.mkdir()
        elif kind == 1:
            os.mkfifo(path)
        elif kind < 4:
            path.symlink_to(path if kind == 2 else "/dev/zero")


def sets(*values: str) -> list[str]:
    return [word for value in values for word in ("--set", value)]


CONVERT, BUILD = ["checkpoint", "convert", "run", "out"], ["data", "build", "recipe.toml"]
READERS: dict[str, list[list[str]]] = {
    "run": [
        RUN,
        CONVERT,
        [*RECIPE, "--from", CHECKPOINT],
        ["generate", "run", "--tokens", "4"],
        ["export", "run", "out"],
        ["explain", "--run", "run"],
    ],
    "run/checkpoints": [
        RUN,
        CONVERT,
        ["checkpoint", "verify", "run", "--all"],
        ["checkpoint", "show", "run", "--tensors"],
        ["checkpoint", "diff", "run/checkpoints/step-00000003", CHECKPOINT],
    ],
    "run/export": [
        [*RECIPE, *sets("model.config=", "model.path=run/export", "model.pretrained=true")],
        [*BUILD, *sets("tokenizer.vocab_size=", "tokenizer.path=run/export", "data.dir=new")],
        ["explain", "--model", "run/export", "--plan", "dp=1", "--sequence", "16"],
    ],
    "data": [BUILD, RECIPE],
    "text": [
        BUILD,
        [*BUILD, *sets("data.dir=new")],
        [*BUILD, *sets("data.dir=new", 'data.sources=["text/r*"]')],
    ],
}


def file(rng: random.Random, here: Path) -> Action:
    """Damaged files of a run, its data, its export or its text, and a command that reads them."""
    rows = b'{"text": "a row"}\n' * rng.choice([1, 100]) + b'{"\\u001b[31m": 1}\n' * rng.choice([0, 0, 1])
    (here / "text" / "rows.jsonl").write_bytes(rows)
    (here / "text" / "rows.jsonl.gz").write_bytes(rows)
    folder = rng.choice([*READERS])
    files = sorted(path for path in (here / folder).rglob("*") if path.is_file() and not path.is_symlink())
    for path in rng.sample(files, rng.choice([1, 1, 1, 2])):
        damage_file(path, rng)
    return run_command(rng.choice(READERS[folder]))


# --- calls

CHANGES: list[Callable[[Tensor], Any]] = [
    *[lambda ids: ids] * 12, Tensor.int, Tensor.float, Tensor.to_sparse, Tensor.tolist, Tensor.numpy,
    lambda ids: ids[:, 0], lambda ids: ids[:0], lambda ids: ids[:3], lambda ids: ids[:, :0],
    lambda ids: ids[0, 0], lambda ids: ids[..., None], lambda ids: ids + 60, lambda ids: ids - 100,
    lambda ids: ids > 3, lambda ids: ids + 0j, lambda ids: ids.to("meta"), lambda ids: ids.half() * math.nan,
]  # fmt: skip
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
}
PARALLELIZE = words_of(
    """
    optimizer optimizer_args param_groups clip_norm clip_value loss loss_scaling blocks offload_dir
    tensor_plan layout probe example_batch seed weights world
    """
)


def some_value(rng: random.Random) -> Any:
    """A value of any type that Python has."""
    others = [
        nn.Linear(2, 2),
        torch.ones(2),
        b"x",
        object(),
        len,
        {1, 2},
        [nn.Linear(2, 2)],
        {5: 6},
        1j,
        deep(2000),
    ]
    return rng.choice([junk(rng), rng.choice(others)])


def some_batch(rng: random.Random) -> Any:
    if rng.random() < 0.08:
        return rng.choice([some_value(rng), [], {}, [{}], [None, None], {"labels": 1}])
    ids = torch.randint(0, 60, (4, 8), generator=torch.Generator().manual_seed(rng.randrange(99)))
    batch: dict[Any, Any] = {"input_ids": rng.choice(CHANGES)(ids), "labels": rng.choice(CHANGES)(ids)}
    if rng.random() < 0.15:
        batch[rng.choice(["attention_mask", "position_ids", "foo", 5, None])] = rng.choice(CHANGES)(ids)
    return batch if rng.random() < 0.9 else [batch] * rng.choice([1, 2, 3])


def some_use(rng: random.Random, engine: plait.Engine, here: Path) -> Callable[[], Any]:
    """A use of an engine, some with invalid arguments."""
    state: Any = engine.state()
    state[rng.choice([*state, "extra", 5])] = rng.choice([some_value(rng), torch.ones(3), *state.values()])
    value = some_value(rng)
    uses: list[Callable[[], Any]] = [
        *[lambda: engine.step(some_batch(rng))] * 3,
        lambda: engine.evaluate(some_batch(rng)),
        lambda: engine.outputs(some_batch(rng), rng.choice([None, value])),
        lambda: engine.load_state(rng.choice([state, state, value])),
        lambda: engine.save(rng.choice([here / "saved", value]), rng.choice([None, {"a": junk(rng)}, value])),
        lambda: engine.load(rng.choice([here / CHECKPOINT, value])),
        lambda: engine.estimated_memory(rng.choice([(2, 8), value])),
        lambda: engine.backward(
            *rng.choice([(value, value), (value,), (torch.ones((), requires_grad=True), value)])
        ),
        engine.update,
    ]
    return rng.choice(uses)


def call(rng: random.Random, here: Path) -> Action:
    """Calls of the Python API, each of which succeeds or raises a PlaitError."""

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except PlaitError as error:
            print(error.message())
            return None

    def run() -> None:
        config = {**CONFIG, "num_attention_heads": 2}
        if rng.random() < 0.2:
            config |= {rng.choice(MODEL_KEYS["llama"]): junk(rng)}
        model = attempt(lambda: causal_lm_on_meta(config)) if rng.random() < 0.95 else some_value(rng)
        options = {name: some_value(rng) for name in PARALLELIZE if rng.random() < 0.03}
        plans = [
            "dp=1",
            "micro=2",
            "micro=2",
            "micro=2 precision=bf16 zero=3",
            plan_text(rng),
            some_value(rng),
        ]
        text: Any = rng.choice(plans)
        engine = attempt(lambda: plait.parallelize(model, text, **options))
        for _ in range(4 if engine is not None else 0):
            group = rng.choice(engine.optimizer.param_groups)
            rate = group["lr"]
            group["lr"] = some_value(rng) if rng.random() < 0.1 else rate
            use = attempt(lambda: some_use(rng, engine, here))
            if use is not None:
                attempt(use)
            group["lr"] = rate

    return run


GENERATORS: dict[str, Callable[[random.Random, Path], Action]] = {
    "recipe": recipe,
    "plan": plan,
    "command": command,
    "file": file,
    "call": call,
}
