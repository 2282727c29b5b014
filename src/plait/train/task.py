"""Defaults of a recipe's `task`, which are set before its keys are validated. The trainer is the same."""

from typing import Any

from plait.errors import ConfigError


def with_task_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the defaults of `task = "sft"`. Raises ConfigError."""
    if values.get("task") != "sft":
        return values
    sections: list[Any] = [values.get(name, {}) for name in ("model", "tokenizer", "data")]
    if not all(isinstance(section, dict) for section in sections):
        return values  # an error of its own
    model, tokenizer, data = sections
    path, pretrained, kind = model.get("path"), model.get("pretrained", True), data.get("kind", "chat")
    if not path or not pretrained or kind == "text":
        raise ConfigError(
            "fine-tuning trains given weights on conversations",
            given=f"task = 'sft', model.path = {path}, model.pretrained = "
            f"{str(pretrained).lower()}, data.kind = {kind!r}",
            expected="the folder of the weights as model.path, and rows of chats or prompts",
            hint="--set task=pretrain, which trains on text, too, and can start from model.path"
            if path
            else "--set model.path=FOLDER",
        )
    return values | {
        "model": {"pretrained": True, **model},
        "tokenizer": {"path": model["path"], **tokenizer},
        "data": {"kind": "chat", "samples": "bins", **data},
    }
