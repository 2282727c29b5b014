"""The files of a model that commands use: those of a run, a checkpoint, or a Hugging Face folder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from plait.api import parallelize
from plait.checkpoint import MANIFEST, Checkpoint, open_checkpoint, steps
from plait.checkpoint.base import adapter_configs, choose_adapter
from plait.comm import World
from plait.engine.engine import Engine
from plait.errors import RunError
from plait.models import causal_lm_on_meta, check_predicts_tokens
from plait.models.adapters import attach
from plait.plan import Plan
from plait.train.export import newest_checkpoint, recorded_config
from plait.train.model import initial_model
from plait.train.run_dir import RunDir
from plait.train.saved_recipe import check_is_folder_of_model
from plait.train.sections import ModelConfig


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model: a checkpoint of plait, or a Hugging Face folder."""

    path: Path
    saved: Checkpoint | None
    tokenizer: Path

    @classmethod
    def find(cls, model: str, tokenizer: str | None) -> "ModelFiles":
        """Find a model's files. Raises RunError or CheckpointError for another kind of path."""
        path, given_tokenizer = Path(model), Path(tokenizer) if tokenizer else None
        check_is_folder_of_model(path)
        if (path / "config.json").is_file():
            return cls(path, None, given_tokenizer or path)
        is_run = RunDir(path).recipe.is_file()
        if not is_run and not (path / MANIFEST).exists() and not steps(path):
            raise RunError(
                "the directory is not that of a model",
                given=f"{path}, without a config.json",
                expected="a run, a checkpoint, or a Hugging Face folder",
                hint=f"ls {path.absolute()}",
            )
        saved = newest_checkpoint(RunDir(path)) if is_run else open_checkpoint(path)
        run = RunDir(saved.path.absolute().parent.parent)
        if tokenizer is None and not run.tokenizer.is_dir():
            raise RunError(
                "the checkpoint is not in the directory of a run, which would have its tokenizer",
                given=path,
                expected="the tokenizer that the model was trained with",
                hint="--tokenizer with the directory of its tokenizer",
            )
        own_tokenizer = run.checked_tokenizer if run.recipe.is_file() else lambda: run.tokenizer
        return cls(path, saved, given_tokenizer or own_tokenizer())

    def model(self) -> tuple[Any, dict[str, Any]]:
        """Return the model, and arguments of `parallelize` for what a checkpoint does not hold: the folder of
        weights that each rank reads its part of, or a seed. Raises ModelError, CheckpointError."""
        check_predicts_tokens(self.path if self.saved is None else recorded_config(self.saved))
        if self.saved is None:
            model, weights = initial_model(ModelConfig(path=self.path, pretrained=True))
            return model, {"weights": weights}
        on_meta = causal_lm_on_meta(recorded_config(self.saved))
        if not (configs := adapter_configs(self.saved)):
            return on_meta, {}
        name, base = choose_adapter(self.saved, None), self.saved.facts.get("base") or {}
        return attach(on_meta, configs[name], adapter=name), (
            {"weights": base["path"]} if "path" in base else {"seed": base.get("seed", 0)}
        )

    def engine(self, model: Any, arguments: Mapping[str, Any], plan_text: str, world: World) -> Engine:
        """Return an engine of what `model` has returned, with the weights; it trains nothing. An adapter is
        on the base that it was trained on. Every rank makes the call."""
        model.requires_grad_(False)
        plan = Plan.parse(plan_text).resolved(world.size)
        if self.saved is not None and plan.base == "none":
            plan = replace(plan, base=(self.saved.facts.get("base") or {}).get("format", "none"))
        engine = parallelize(model, plan, optimizer=torch.optim.SGD, world=world, **arguments)
        if self.saved is not None:
            engine.load(self.saved.path, weights_only=True)
        return engine
