"""Defaults of a recipe's `task`, which are set before its keys are validated. The trainer is the same."""

from typing import Any

from plait.errors import ConfigError

# By task: what its data is, in words, and defaults of sections.
_TASKS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "sft": ("chats or prompts", {"data": {"kind": "chat", "samples": "bins"}}),
    "dpo": (
        "pairs",
        {
            "data": {"kind": "preference", "samples": "documents"},
            "optimizer": {"lr": 1e-6},  # TRL's
            "preference": {},
        },
    ),
    "kto": (
        "answers",
        {
            "data": {"kind": "answer", "samples": "documents"},
            "optimizer": {"lr": 1e-6},  # TRL's
            "preference": {"loss": "kto"},
        },
    ),
    "reward": (
        "pairs",
        {
            "model": {"head": "reward"},
            "data": {"kind": "preference", "samples": "documents"},
            "optimizer": {"lr": 1e-5},
            "preference": {"loss": "reward"},
        },
    ),
}
_KINDS = {"sft": ("chat", "prompt"), "dpo": ("preference",), "kto": ("answer",), "reward": ("preference",)}


def with_task_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the defaults of the task. Raises ConfigError."""
    task = values.get("task")
    if not isinstance(task, str) or task not in _TASKS:
        return values
    rows, defaults = _TASKS[task]
    names = dict.fromkeys(("model", "tokenizer", "data", *defaults))
    sections: dict[str, Any] = {name: values.get(name, {}) for name in names}
    if not all(isinstance(section, dict) for section in sections.values()):
        return values  # an error of its own
    model, data = sections["model"], sections["data"]
    path, pretrained = model.get("path"), model.get("pretrained", True)
    kind = data.get("kind", defaults["data"]["kind"])
    if not path or not pretrained or kind not in _KINDS[task]:
        raise ConfigError(
            "fine-tuning trains given weights on conversations",
            given=f"task = {task!r}, model.path = {path}, model.pretrained = "
            f"{str(pretrained).lower()}, data.kind = {kind!r}",
            expected=f"the folder of the weights as model.path, and rows of {rows}",
            hint="--set task=pretrain, which trains on text, too, and can start from model.path"
            if path
            else "--set model.path=FOLDER",
        )
    of_model = {"pretrained": True, **defaults.get("model", {})}
    own = {**defaults, "model": of_model, "tokenizer": {"path": path}}
    return values | {name: {**own.get(name, {}), **section} for name, section in sections.items()}
