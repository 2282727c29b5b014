"""The recipe: the configuration of a run, as a frozen value read from TOML.

Every section belongs to the part that uses it (`sections.py`, `data/config.py`). The error for an unknown key
names the nearest known one, the error for a value of the wrong type names its key.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from plait.data.config import DataConfig, TokenizerConfig, check_data
from plait.errors import ConfigError, PlanError, nearest, unknown_key_hint
from plait.fileio import MAX_DEPTH, parse_json, parse_toml, read_text, unique_keys
from plait.plan import Plan
from plait.plan.distillation import Distillation
from plait.plan.preference import Preference
from plait.train.saved_recipe import SavedRecipe
from plait.train.sections import (
    GROUP_OPTIMIZERS,
    OPTIMIZERS,
    AdapterConfig,
    BatchRampConfig,
    DistillationConfig,
    EvalConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceConfig,
    RunConfig,
    SampleConfig,
    ScheduleConfig,
    Section,
)
from plait.train.task import with_task_defaults


class Recipe(Section):
    """The configuration of a run. `plan` is text, e.g. "dp=2 precision=bf16". `task` selects defaults."""

    plan: str
    task: Literal["pretrain", "sft", "dpo", "kto", "reward"] = "pretrain"
    run: RunConfig
    batch_ramp: BatchRampConfig | None = None
    model: ModelConfig
    adapter: AdapterConfig | None = None
    data: DataConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    preference: PreferenceConfig | None = None
    distillation: DistillationConfig | None = None
    sample: SampleConfig = SampleConfig()
    eval: EvalConfig = EvalConfig()

    def loss_options(self) -> Preference | Distillation | None:
        """Return the loss that is not that of the model's task."""
        given = self.preference or self.distillation
        return None if given is None else given.options()


def check_batches(recipe: Recipe, plan: Plan) -> None:
    """Raise PlanError unless every batch of the recipe divides over the plan's ranks and micro-batches."""
    sizes = {"run.batch": recipe.run.batch}
    if recipe.batch_ramp is not None:
        sizes |= {"batch_ramp.start": recipe.batch_ramp.start, "batch_ramp.step": recipe.batch_ramp.step}
    for key, size in sizes.items():
        try:
            plan.check_batch(size)
        except PlanError as error:  # name the recipe's key
            given, hint = (str(text).replace("batch", key, 1) for text in (error.given, error.hint))
            raise PlanError(error.fact, given=given, expected=error.expected, hint=hint) from error
    shares, budget = plan.data_ranks * plan.micro, recipe.data.tokens_per_micro_batch
    if budget is not None and recipe.run.batch != shares:
        raise PlanError(
            "the micro-batches of a step are not those of the plan",
            given=f"run.batch = {recipe.run.batch}, {plan} (dp x micro = {shares})",
            expected="run.batch micro-batches, each of at most data.tokens_per_micro_batch tokens",
            hint=f"run.batch = {shares}, or micro={recipe.run.batch // plan.data_ranks}",
        )


def micro_batch_shape(recipe: Recipe, plan: Plan) -> tuple[int, int]:
    """Return samples and tokens of a data rank's largest micro-batch. Raises PlanError."""
    check_batches(recipe, plan)
    sequence, budget = recipe.data.sequence, recipe.data.tokens_per_micro_batch
    rows = 1 if recipe.preference is None else recipe.preference.options().trained_rows
    return (rows * plan.check_batch(recipe.run.batch) if budget is None else budget // sequence), sequence


def read_recipe(path: Path, sets: Iterable[str] = (), plan: str | None = None) -> Recipe:
    """Read a recipe from TOML (or the JSON that a run saved), overridden by `key=value` texts and `plan`.

    Raises ConfigError, and RunError for a damaged JSON of a run.
    """
    try:
        text = read_text(path)
        is_json = path.suffix == ".json"
        values = parse_json(text, object_pairs_hook=unique_keys) if is_json else parse_toml(text)
    except FileNotFoundError as error:
        raise ConfigError(
            "the recipe does not exist",
            given=path,
            expected="a TOML file, or a run's directory with --resume",
            hint=f"ls {path.absolute().parent}",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "cannot read the recipe",
            given=f"{path}: {error}",
            expected="a TOML file in UTF-8 that this user can read",
            hint=f"ls -l {path}",
        ) from error
    except ValueError as error:
        form = "JSON" if is_json else "TOML"
        raise ConfigError(
            f"the recipe is not valid {form}",
            given=f"{path}: {error}",
            expected=f"{form}, with each key once",
            hint="correct the file at that place",
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            "the recipe is not a JSON object",
            given=f"{path}: a {type(values).__name__}",
            expected="an object with the sections of a recipe",
            hint="the recipe.json of a run, or a TOML file",
        )
    if _DEEPSPEED & values.keys():
        raise ConfigError(
            "a configuration of DeepSpeed is not a recipe",
            given=f"{path}: {', '.join(sorted(_DEEPSPEED & values.keys()))}",
            expected="a recipe, whose plan says what is distributed",
            hint="docs/moving.md, which translates the keys",
        )
    if SavedRecipe.is_saved(values):
        values = SavedRecipe.from_document(values, path).values
    return override_recipe(values, sets, plan, source=str(path))


def override_recipe(values: dict[str, Any], sets: Iterable[str], plan: str | None, *, source: str) -> Recipe:
    """Return the recipe with these values, overridden as in `read_recipe`. Raises ConfigError."""
    for assignment in (assignments := list(sets)):
        _set(values, assignment)
    source = f"{source} and the command line" if assignments else source
    values |= {} if plan is None else {"plan": plan}
    return parse_recipe(values, source=source)


def parse_recipe(values: dict[str, Any], *, source: str) -> Recipe:
    """Validate `values`. The ConfigError names the key and `source`."""
    try:
        # Through JSON, as strict mode then has the types of TOML: text can be a Path but never a number.
        recipe = Recipe.model_validate_json(json.dumps(with_task_defaults(values), default=str), strict=True)
    except ValidationError as error:
        raise _config_error(error, source) from error
    _check_model(recipe.model)
    _check_optimizer(recipe.optimizer)
    _check_length(recipe)
    for key, off in (("keep_best", "false"), ("early_stopping", "0")):
        if (value := getattr(recipe.run, key)) and not recipe.run.evaluate_every:
            raise ConfigError(
                f"{key} needs a validation loss, but evaluation is off",
                given=f"run.{key} = {str(value).lower()}, run.evaluate_every = 0",
                expected="run.evaluate_every from 1",
                hint=f"--set run.evaluate_every=100, or run.{key}={off}",
            )
    recipe.loss_scale.scaling()
    check_data(recipe.data)
    _check_preference(recipe)
    _check_distillation(recipe)
    if recipe.batch_ramp is not None:
        _check_batch_ramp(recipe.batch_ramp, recipe.run.batch, recipe.data.tokens_per_micro_batch)
    return recipe


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe with so many steps instead of epochs. Raises ConfigError."""
    run = recipe.run.model_copy(update={"steps": steps, "epochs": None})
    changed = recipe.model_copy(update={"run": run})
    _check_length(changed)
    return changed


def differences(one: Recipe, other: Recipe) -> list[str]:
    """Return the keys in which two recipes differ, except `run.dir`."""
    first, second = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return [key for key in {**first, **second} if key != "run.dir" and first.get(key) != second.get(key)]


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _set(values: dict[str, Any], assignment: str) -> None:
    """Apply `key=value` to a recipe; `key=` removes the key, so that its default applies."""
    key, equals, text = assignment.partition("=")
    *parents, last = key.strip().split(".")
    if not equals or not last or not all(parents) or len(parents) > MAX_DEPTH:
        raise ConfigError(
            "--set needs key=value",
            given=assignment,
            expected="a key of the recipe, an equals sign and a value",
            hint="--set run.steps=100",
        )
    if not parents and last not in Recipe.model_fields:
        raise ConfigError(
            f"a recipe has no key {last!r}",
            given=f"--set {assignment}",
            expected="a key of docs/recipes.md with its section",
            hint=_qualified_key_hint(last),
        )
    table = values
    for depth, parent in enumerate(parents, start=1):
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{parent} is a value, not a section",
                given=f"--set {assignment}",
                expected="a section and a key in it, as in run.steps",
                hint=f"--set {'.'.join(parents[:depth])}={text.strip()}",
            )
    if not text.strip():
        table.pop(last, None)
        return
    try:
        table[last] = parse_toml(f"value = {text}")["value"]
    except ValueError:
        table[last] = text.strip()  # a bare word is text: quoting twice in a shell is tedious


def _qualified_key_hint(key: str) -> str:
    """Return the keys of sections that have this name, else the nearest name of all: run.steps for steps."""
    keys = [
        f"{section}.{name}"
        for section, field in Recipe.model_fields.items()
        if section not in ("plan", "task")
        for name in _section_of(field.annotation).model_fields
    ]
    match = nearest(key, [name.partition(".")[2] for name in keys] + [*Recipe.model_fields])
    qualified = [name for name in keys if name.partition(".")[2] == match]
    return " or ".join(qualified) or match or "run.steps"


# Keys of other trainers: what there is instead.
_RECORDS = "run.report_to, for TensorBoard and wandb; metrics.jsonl in run.dir; plait report RUN"
_ELSEWHERE = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "run.epochs"),
    **dict.fromkeys(("report_to", "wandb", "mlflow"), _RECORDS),
    **dict.fromkeys(("peft", "lora", "use_peft", "lora_r"), "[adapter], with peft's keys: docs/adapters.md"),
}
# By pydantic's type of an error
_EXAMPLES = {"int": "100", "float": "0.1", "bool": "true", "path": "FOLDER", "tuple": "'[\"...\"]'"}
_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


def _config_error(error: ValidationError, source: str) -> ConfigError:
    """Convert the first of pydantic's errors; an unknown key comes first, as it often explains the others."""
    first = sorted(error.errors(), key=lambda each: each["type"] != "extra_forbidden")[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        where, known = ".".join(path[:-1]), _keys(path[:-1])
        hint = unknown_key_hint(path[-1], known)
        hint = f"{where}.{hint}" if where and not hint.startswith("one of") else hint
        return ConfigError(
            f"{where or 'a recipe'} has no key {path[-1]!r}",
            given=f"{name} in {source}",
            expected="a key of docs/recipes.md",
            hint=_ELSEWHERE.get(path[-1], hint),
        )
    if first["type"] == "missing":
        return ConfigError(
            f"the recipe has no {name}",
            given=source,
            expected="a value, as this key has no default",
            hint=_set_hint(path, first["type"]),
        )
    message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ConfigError(
        f"{name or 'the recipe'} has an invalid value",
        given=f"{name} = {first['input']!r} in {source}",
        expected=message,
        hint=_set_hint(path, first["type"]),
    )


def _set_hint(path: list[str], problem: str) -> str:
    if not path or any(part.isdigit() for part in path):  # in a list, which --set replaces entirely
        return "another value in the recipe"
    example = next((value for kind, value in _EXAMPLES.items() if kind in problem), "...")
    return f"--set {'.'.join(path)}={example}"


def _keys(path: list[str]) -> list[str]:
    section: type[BaseModel] = Recipe
    for part in path:
        if not part.isdigit():  # the index in a list of sections
            section = _section_of(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel]:
    """Return the section in an annotation, which may be optional or a list of sections."""
    types = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
    return next(kind for kind in types if issubclass(kind, BaseModel))


def _check_model(model: ModelConfig) -> None:
    if (model.config is None) == (model.path is None) and not model.pretrained:
        raise ConfigError(
            "the model needs either a configuration or a path",
            given=f"model.config {_is_set(model.config)}, model.path {_is_set(model.path)}",
            expected="one of the two",
            hint="--set model.path= removes the path" if model.path else "--set model.path=FOLDER",
        )
    if model.pretrained and model.path is None:
        raise ConfigError(
            "pretrained weights need a path",
            given="model.pretrained = true",
            expected="model.path, the folder of the weights",
            hint="--set model.path=FOLDER",
        )


def _check_preference(recipe: Recipe) -> None:
    """Raise ConfigError unless pairs and their loss occur together, with what they need."""
    given, kind = recipe.preference, recipe.data.kind
    rows = given and ("answer" if given.options().of_single_answers else "preference")
    if rows != (kind if kind in ("preference", "answer") else None):
        raise ConfigError(
            "a loss of pairs and rows of pairs need each other, and the loss of answers and theirs",
            given=f"preference.loss = {given.loss!r}, data.kind = {kind!r}"
            if given
            else f"no [preference], data.kind = {kind!r}",
            expected="[preference] and data.kind = 'preference'; loss = 'kto' and data.kind = 'answer'",
            hint=f"--set task={'kto' if kind == 'answer' else 'dpo'}, which sets both"
            if given is None
            else f"--set data.kind={rows}, or --set preference= removes the section",
        )
    if given is None:
        if recipe.model.head == "reward":
            _check_head(recipe, Preference())
        return
    options = given.options()
    _check_head(recipe, options)
    _check_reference(recipe, given, options)
    for key in ("label_smoothing", "z_loss"):
        if value := getattr(recipe.optimizer, key):
            raise ConfigError(
                f"optimizer.{key} is a term of the loss of tokens",
                given=f"optimizer.{key} = {value}, and [preference]",
                expected="a loss of pairs without it",
                hint=f"--set optimizer.{key}=0"
                + ("; preference.label_smoothing is that of pairs" if key == "label_smoothing" else ""),
            )
    if recipe.run.probe:
        raise ConfigError(
            "the probe has no pairs",
            given="run.probe = true, and [preference]",
            expected="gradients of the loss of tokens",
            hint="--set run.probe=false",
        )
    folder = given.reference_model or (recipe.model.path if recipe.model.pretrained else None)
    if options.needs_reference and given.reference != "adapters_off" and folder is None:
        raise ConfigError(
            "a loss of pairs compares with the weights before training",
            given=f"preference.loss = {given.loss!r}, no model.path with model.pretrained = true",
            expected="the folder of weights of the reference",
            hint="--set preference.reference_model=FOLDER, or --set preference.loss=orpo",
        )


def _check_distillation(recipe: Recipe) -> None:
    """Raise ConfigError for a teacher that this run cannot have."""
    given = recipe.distillation
    if given is None:
        return
    given.options()
    has_servers = Plan.parse(recipe.plan).num_servers > 0
    others = {
        "[preference]": recipe.preference is not None,
        "run.probe = true": bool(recipe.run.probe),
        "parameter servers": has_servers,
    }
    for name, is_given in others.items():
        if is_given:
            raise ConfigError(
                "a distillation has the loss of tokens, and a teacher under the plan of the run",
                given=f"[distillation], and {name}",
                expected="one of the two",
                hint="--set distillation= removes the section",
            )


def _check_reference(recipe: Recipe, given: PreferenceConfig, options: Preference) -> None:
    """Raise ConfigError for a reference that this run cannot have."""
    if given.reference == "adapters_off" and recipe.adapter is None:
        raise ConfigError(
            "a model without adapters has none to turn off",
            given="preference.reference = 'adapters_off', no [adapter]",
            expected="[adapter], or a reference of its own",
            hint="--set preference.reference=model",
        )
    copies = recipe.adapter is not None and recipe.adapter.modules_to_save
    if copies and options.needs_reference and given.reference != "adapters_off" and "base=" in recipe.plan:
        raise ConfigError(
            "a reference of its own would have in codes what this model trains as copies",
            given=f"preference.reference = {given.reference!r}, adapter.modules_to_save, {recipe.plan}",
            expected="a reference with the weights that this model begins with",
            hint="--set preference.reference=adapters_off",
        )
    if given.reference == "precomputed" and options.of_single_answers:
        raise ConfigError(
            "answers of other prompts have no precomputed reference",
            given="preference.reference = 'precomputed', preference.loss = 'kto'",
            expected="a reference that runs in each step",
            hint="--set preference.reference=model",
        )
    if given.reference == "precomputed" and recipe.run.spike_factor:
        raise ConfigError(
            "batches after a loss spike have no precomputed reference",
            given=f"preference.reference = 'precomputed', run.spike_factor = {recipe.run.spike_factor}",
            expected="batches that are known before the first step",
            hint="--set preference.reference=model, or --set run.spike_factor=0",
        )


def _check_head(recipe: Recipe, options: Preference) -> None:
    """Raise ConfigError unless the loss is that of the model's head, with what the head allows."""
    head, is_reward = recipe.model.head, options.is_reward
    if is_reward != (head == "reward"):
        raise ConfigError(
            "a loss of scores and a reward model need each other",
            given=f"preference.loss = {options.loss!r}, model.head = {head!r}",
            expected="preference.loss = 'reward' with model.head = 'reward', or neither",
            hint="--set task=reward, which sets both" if is_reward else "--set preference.loss=reward",
        )
    refused = (
        ("recipes have no adapter of a reward model", "adapter", recipe.adapter, ""),
        ("a reward model generates no text", "sample.tokens", recipe.sample.tokens, "0"),
        ("a reward model has no probabilities of tokens", "eval.tasks", recipe.eval.tasks, "[]"),
    )
    for fact, key, value, off in refused if is_reward else ():
        if value:
            raise ConfigError(
                fact,
                given=f"{key}, and model.head = 'reward'",
                expected=f"a recipe without {key}",
                hint=f"--set {key}={off}",
            )


def _is_set(value: object) -> str:
    return "not given" if value is None else "given"


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    if optimizer.name not in OPTIMIZERS:
        raise ConfigError(
            "not an optimizer for all parameters of a model",
            given=f"optimizer.name = {optimizer.name!r}",
            expected="one of " + ", ".join(OPTIMIZERS),
            hint="name='Muon' in [[optimizer.groups]], for the matrices that match"
            if optimizer.name == "Muon"
            else unknown_key_hint(optimizer.name, OPTIMIZERS),
        )
    if optimizer.clip_norm is not None and optimizer.clip_value is not None:
        raise ConfigError(
            "gradients can be clipped by norm or by value, not both",
            given=f"optimizer.clip_norm = {optimizer.clip_norm}, clip_value = {optimizer.clip_value}",
            expected="one of the two",
            hint="--set optimizer.clip_norm= removes the key from the recipe",
        )
    for key in optimizer.args:
        if key in ("lr", "weight_decay"):
            raise ConfigError(
                f"{key} is a key of [optimizer] itself",
                given=f"optimizer.args.{key}",
                expected=f"optimizer.{key}",
                hint=f"--set optimizer.args.{key}= --set optimizer.{key}={optimizer.args[key]}",
            )
    for group in optimizer.groups:
        given = f"optimizer.groups: match = {group.match!r}"
        if group.name is None and not group.options():
            raise ConfigError(
                "a group of parameters has no options of its own",
                given=given,
                expected="lr, weight_decay or name",
                hint="weight_decay = 0.0 in this group",
            )
        if group.name not in (None, *GROUP_OPTIMIZERS):
            raise ConfigError(
                "not an optimizer for a group of parameters",
                given=f"{given}, name = {group.name!r}",
                expected="one of " + ", ".join(GROUP_OPTIMIZERS),
                hint=unknown_key_hint(f"{group.name}", GROUP_OPTIMIZERS),
            )
        if group.args and group.name is None:
            raise ConfigError(
                "a group of parameters has arguments for no optimizer of its own",
                given=f"{given}, args = {group.args}",
                expected="name, the class that takes them",
                hint=f"name = {optimizer.name!r}",
            )


def _check_length(recipe: Recipe) -> None:
    """Raise ConfigError unless there are either steps, which fit the schedule, or epochs."""
    run = recipe.run
    if bool(run.steps) == (run.epochs is not None):
        raise ConfigError(
            "the recipe has both run.steps and run.epochs" if run.steps else "the recipe has no run.steps",
            given=f"run.steps {'given' if run.steps else 'not given'}, run.epochs {_is_set(run.epochs)}",
            expected="one of the two: the number of steps, or of epochs",
            hint="--set run.steps= removes the steps" if run.steps else "--set run.steps=100",
        )
    if run.steps:
        _check_schedule(recipe.schedule, run.steps)


def _check_batch_ramp(ramp: BatchRampConfig, full: int, budget: int | None) -> None:
    if budget is not None:
        raise ConfigError(
            "a step with a budget of tokens has one micro-batch for each of the plan",
            given=f"data.tokens_per_micro_batch = {budget}, [batch_ramp]",
            expected="as many micro-batches in each step",
            hint="--set batch_ramp= removes the section from the recipe",
        )
    increments, remainder = divmod(full - ramp.start, ramp.step)
    if remainder or increments < 1:
        nearest_full = ramp.start + max(1, increments) * ramp.step
        raise ConfigError(
            "the batches do not reach run.batch",
            given=f"batch_ramp.start = {ramp.start}, batch_ramp.step = {ramp.step}, run.batch = {full}",
            expected="start + k x step = run.batch, with k of at least 1",
            hint=f"run.batch = {nearest_full}",
        )


_DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay")
_SCHEDULES_WITH = {  # key: the schedules that use it
    "min_lr_ratio": _DECAYING,
    "cycles": ("cosine_with_restarts",),
    "power": ("polynomial",),
    "timescale": ("inverse_sqrt",),
    "decay": ("warmup_stable_decay",),
    "decay_type": ("warmup_stable_decay",),
}


def _check_schedule(schedule: ScheduleConfig, steps: int) -> None:
    for key, names in _SCHEDULES_WITH.items():
        if schedule.name not in names and getattr(schedule, key) != getattr(ScheduleConfig(), key):
            raise ConfigError(
                f"schedule.{key} has no effect on this schedule",
                given=f"schedule.{key} = {getattr(schedule, key)!r}, schedule.name = {schedule.name!r}",
                expected=f"schedule.name = {' or '.join(names)}",
                hint=f"--set schedule.{key}= removes the key from the recipe",
            )
    if schedule.name == "warmup_stable_decay":
        if schedule.decay is None:
            raise ConfigError(
                "warmup_stable_decay needs the number of steps in which the rate decays",
                given="no schedule.decay",
                expected="schedule.decay from 1",
                hint=f"--set schedule.decay={max(1, steps // 5)}",
            )
        if schedule.decay_type is None:
            raise ConfigError(
                "warmup_stable_decay needs the form of its decay",
                given="no schedule.decay_type",
                expected="linear, cosine or 1-sqrt",
                hint="--set schedule.decay_type=cosine, which recipes without this key used to have",
            )
    if schedule.warmup + (schedule.decay or 0) > steps:
        raise ConfigError(
            "the learning rate schedule is longer than the run",
            given=f"schedule.warmup = {schedule.warmup}, schedule.decay {schedule.decay or 'not given'}",
            expected=f"a sum of at most run.steps = {steps}",
            hint=f"--set schedule.warmup={steps // 10}",
        )
