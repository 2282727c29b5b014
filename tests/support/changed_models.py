"""Models of families with changed blocks: adapters of PEFT, and modules that no table of styles knows."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support import programs, silent_error_models

Change = Callable[[Any], None]  # of a block

ATTENTIONS = {"gpt2": "attn", "opt": "self_attn"}
PROJECTIONS = {"gpt2": ("c_proj", "c_proj"), "phi3": ("o_proj", "down_proj")}
_LATENT = "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"
_PROJECTIONS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
LORA_TARGETS = {
    "gpt2": "c_attn c_proj c_fc",
    "phi3": "qkv_proj o_proj gate_up_proj down_proj",
    "mixtral": "q_proj k_proj v_proj o_proj",
    "deepseek_v3": _LATENT,
    "gpt_neox": "query_key_value dense dense_h_to_4h dense_4h_to_h",
    "starcoder2": "q_proj k_proj v_proj o_proj c_fc c_proj",
    "opt": "q_proj k_proj v_proj out_proj fc1 fc2",
    "qwen3_moe": "q_proj k_proj v_proj o_proj",
    "gpt_oss": "q_proj k_proj v_proj o_proj",
}

RANK = 4
FAMILIES = ("llama", "qwen3", "gpt2", "phi3")


def small_lora() -> nn.Module:
    return lora("llama")


def lora(
    family: str,
    *,
    wrapped: bool = True,
    targets: str = "",
    pad_token_id: int | None = None,
    on_meta: bool = False,
    **options: Any,
) -> nn.Module:
    """A family's model with adapters of rank 4. `wrapped`: as PEFT returns it, or the model in it.
    `pad_token_id`: whose row of the embedding gets no gradient."""
    import peft  # noqa: PLC0415 - takes seconds, and other tests import this file

    assert not on_meta, "adapters have values"
    model = silent_error_models.with_random_weights(family, pad_token_id=pad_token_id)
    names = targets or LORA_TARGETS.get(family, _PROJECTIONS)
    config = peft.LoraConfig(
        r=RANK,
        target_modules=names if names == "all-linear" else names.split(),
        fan_in_fan_out=family == "gpt2",
        task_type="CAUSAL_LM",
        **options,
    )
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of transformers and PEFT, about names and patterns
        adapted: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.double()
    return adapted if wrapped else adapted.base_model.model


class Scaled(nn.Module):
    """A layer of which the input or the output is multiplied with a parameter."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], of: str) -> None:
        super().__init__()
        self.layer, self.of = layer, of
        self.scale = nn.Parameter(1.0 + 0.3 * torch.randn(shape))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.of == "input":
            return self.layer(x * self.scale, *args, **kwargs)
        output = self.layer(x, *args, **kwargs)
        return (output[0] * self.scale, *output[1:]) if isinstance(output, tuple) else output * self.scale


class Appended(nn.Module):
    """A layer, and another one that reads its output."""

    def __init__(self, layer: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.layer, self.second = layer, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.layer(x))


class NextTo(nn.Module):
    """A layer plus an adapter that reads the same input."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(width, 6), nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(torch.tanh(self.down(x)))


def _with_forward(module: Any, forward: Callable[..., Any], **parts: Any) -> None:
    """Give a module parts and a class of its own, with this forward: it is called with the old one."""
    cls = type(module)
    changed = {"forward": lambda self, x: forward(self, cls.forward, x)}
    module.__class__ = type(cls.__name__, (cls,), changed)
    for key, part in parts.items():
        setattr(module, key, part)


def _scaled_output(module: Any, forward: Any, x: Tensor) -> Tensor:
    return forward(module, x) * module.scale


def _plus_adapter(module: Any, forward: Any, x: Tensor) -> Tensor:
    return forward(module, x) + module.adapter(x)


def _gated(module: Any, forward: Any, x: Tensor) -> Tensor:
    return forward(module, x * torch.sigmoid(module.gate(x)))


class OtherNorm(nn.Module):
    """A norm over the last dim of a name that no rule knows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1.0 + 0.3 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.gain


class OtherRMSNorm(OtherNorm):
    pass


def _widths(model: Any) -> tuple[int, int]:
    config = model.config
    hidden = getattr(config, "hidden_size", None) or config.n_embd
    ffn = next(
        (
            value
            for key in ("intermediate_size", "ffn_dim", "n_inner")
            if (value := getattr(config, key, None))
        ),
        4 * hidden,
    )
    return hidden, ffn


def _set(module: Any, key: str, wrap: Callable[[Any], nn.Module]) -> None:
    setattr(module, key, wrap(getattr(module, key)))


def _mixing(what: str, first: nn.Module, last: nn.Module, norm: nn.Module) -> None:
    """Add code without parameters, as hooks."""
    if what == "mixed features":
        last.register_forward_pre_hook(lambda _, given: (F.normalize(given[0], dim=-1), *given[1:]))
    elif what == "mixed outputs":
        first.register_forward_hook(lambda *call: F.normalize(call[-1], dim=-1))
    else:
        norm.register_forward_hook(lambda *call: call[-1] - 0.5 * call[-1].mean(1, keepdim=True))


def changed(family: str, change: str, on_meta: bool = False) -> nn.Module:
    assert not on_meta, "changes have values"
    model: Any = silent_error_models.with_random_weights(family)
    torch.manual_seed(7)
    hidden, ffn = _widths(model)
    blocks = next(
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1
    )
    o, down = PROJECTIONS.get(family, ("o_proj", "down_proj"))
    up = "c_fc" if family == "gpt2" else "gate_up_proj" if family == "phi3" else "up_proj"
    act = "act" if family == "gpt2" else "activation_fn" if family == "phi3" else "act_fn"
    norm = "ln_2" if family == "gpt2" else "post_attention_layernorm"
    for block in blocks:
        attention, mlp = getattr(block, ATTENTIONS.get(family, "self_attn")), block.mlp
        match change:
            case "scalar in the mlp":
                _set(mlp, down, lambda layer: Scaled(layer, (), "input"))
            case "scalar after the first layer":
                _set(mlp, up, lambda layer: Scaled(layer, (1,), "output"))
            case "scalar before the first layer":
                _set(mlp, up, lambda layer: Scaled(layer, (), "input"))
            case "scale of features in the mlp":
                _set(mlp, down, lambda layer: Scaled(layer, (ffn,), "input"))
            case "temperature":
                _set(attention, o, lambda layer: Scaled(layer, (1,), "input"))
            case "layer scale":
                _set(mlp, down, lambda layer: Scaled(layer, (hidden,), "output"))
            case "layer scale in the mlp":
                _with_forward(mlp, _scaled_output, scale=nn.Parameter(torch.rand(hidden)))
            case "adapter in the mlp":
                adapter = nn.Sequential(nn.Linear(hidden, 6), nn.Tanh(), nn.Linear(6, hidden))
                _with_forward(mlp, _plus_adapter, adapter=adapter)
            case "gate of the input":
                _with_forward(mlp, _gated, gate=nn.Linear(hidden, 1))
            case "layer scale of the attention":
                _set(attention, o, lambda layer: Scaled(layer, (hidden,), "output"))
            case "layer scale of the module":
                block.mlp = Scaled(mlp, (hidden,), "output")
            case "layer in the mlp":
                _set(mlp, act, lambda layer: Appended(layer, nn.Linear(ffn, ffn)))
            case "layer after the mlp":
                _set(mlp, down, lambda layer: Appended(layer, nn.Linear(hidden, hidden)))
            case "layer after the module":
                block.mlp = Appended(mlp, nn.Linear(hidden, hidden))
            case "adapter next to the mlp":
                block.mlp = NextTo(mlp, hidden)
            case "adapter next to the last layer":
                _set(mlp, down, lambda layer: WithAdapter(layer, ffn, hidden))
            case "norm in the mlp":
                _set(mlp, act, lambda layer: Appended(layer, nn.LayerNorm(ffn)))
            case "mixed features" | "mixed outputs" | "mixed tokens":
                _mixing(change, getattr(mlp, up), getattr(mlp, down), getattr(block, norm))
            case "another norm":
                setattr(block, norm, OtherRMSNorm(hidden))
            case "norm of another name":
                setattr(block, norm, OtherNorm(hidden))
            case _:
                raise AssertionError(change)
    return model


class WithAdapter(nn.Module):
    """A layer plus an adapter with a norm between its layers."""

    def __init__(self, layer: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.norm, self.up = nn.Linear(width, 6), nn.LayerNorm(6), nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.norm(self.down(x)))


CHANGES = (
    "scalar in the mlp",
    "scalar after the first layer",
    "scalar before the first layer",
    "scale of features in the mlp",
    "temperature",
    "layer scale",
    "layer scale in the mlp",
    "adapter in the mlp",
    "gate of the input",
    "layer scale of the attention",
    "layer scale of the module",
    "layer in the mlp",
    "layer after the mlp",
    "layer after the module",
    "adapter next to the mlp",
    "adapter next to the last layer",
    "norm in the mlp",
    "another norm",
    "norm of another name",
    "mixed features",
    "mixed outputs",
    "mixed tokens",
)


def task(build: Callable[..., nn.Module], *args: Any, **options: Any) -> programs.Task:
    """The task of training a changed model for three steps: LoRA's first gradient is zero in half of its
    matrices."""
    built = functools.partial(build, *args, **options)
    return programs.Task(built, steps=3, own_loss=True, reuses_traces=False)
