"""Models in which commonly forgotten parameters matter: biases, norms and sinks far from their initial
values."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from support import hf_models, programs

_LAYERS = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
    "sinks": "colwise",
}
_SINKS = {f"model.layers.*.self_attn.{name}": word for name, word in _LAYERS.items()}


def with_random_weights(family: str, on_meta: bool = False, **more: Any) -> nn.Module:
    """Build a model with random weights. By default biases are zero and norms one, so that a bias added
    twice, or a missing norm, would change nothing."""
    torch.manual_seed(1)  # sinks have random first values
    model = hf_models.model_of(family, on_meta=on_meta, **more)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def tensor_plan_of(family: str) -> dict[str, str] | None:
    """Tensor plan of a model without one of its own."""
    return _SINKS if family == "gpt_oss" else None


def task(family: str, **overrides: Any) -> programs.Task:
    """Training task of a model. `overrides`: options of `programs.Task`."""
    options = {"steps": 2, "own_loss": True, "tensor_plan": tensor_plan_of(family)} | overrides
    return programs.Task(functools.partial(with_random_weights, family), **options)


def assert_each_same(ours: dict[str, Tensor], reference: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    """Compare every tensor relative to its own largest element, so that small ones count like large ones,
    except those that are nearly zero."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    floor = 1e-6 * max(float(tensor.abs().max()) for tensor in reference.values())
    for name, theirs in reference.items():
        difference = float((ours[name] - theirs).abs().max()) / max(float(theirs.abs().max()), floor)
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"
