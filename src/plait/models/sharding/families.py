"""Tensor plans of families for which transformers ships none, or one that shards less than is possible.

Patterns match paths below the base model; styles as in `models/sharding/styles.py`, sizes as in `heads.py`
[Note: packed sizes]. State-space and recurrent mixers are sharded by channels or by heads. With more columns
than heads, or than several groups, they are computed in full between sharded projections.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models.sharding.builder import TPPlanBuilder
from plait.models.sharding.heads import Heads
from plait.models.sharding.styles import Patterns
from plait.models.sharding.styles import plan_of_layers as _plan
from plait.models.task import pretrained_base
from plait.plan.sharding import ArgumentSharding

_BLOOM = _plan(
    "h.*", "self_attention.query_key_value mlp.dense_h_to_4h", "self_attention.dense mlp.dense_4h_to_h"
)


def _bloom(config: Any, _cols: int) -> Patterns:
    """Queries, keys and values are interleaved by head, so splitting by heads keeps them together."""
    if config.pretraining_tp > 1 and config.slow_but_exact:
        raise ModelError(
            "cannot shard a bloom model that slices its own weights",
            given=f"pretraining_tp={config.pretraining_tp} slow_but_exact=True",
            expected="weights that are used in full",
            hint="slow_but_exact=False",
        )
    return _BLOOM


def _falcon(config: Any, cols: int) -> Patterns:
    """Three layouts of one matrix: by head, one key for all heads, one key for a group of heads.

    If columns share keys, one part of the matrix is sharded and another shared: its output is gathered
    instead.
    """
    grouped = config.new_decoder_architecture
    kv_heads = config.num_kv_heads if grouped else 1 if config.multi_query else config.num_attention_heads
    packed, end = ("grouped_colwise" if grouped or config.multi_query else "colwise"), "rowwise"
    if cols > kv_heads:
        packed, end = "colwise_gather_output", "rowwise_split_input"
    return {
        **_BLOOM,
        "h.*.self_attention.query_key_value": packed,
        "h.*.self_attention.dense": end,
    }


# Their own plans gather gate and up, which are halves of one matrix: each half can be sharded.
_PACKED_GATE = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}

# Their own plan is colwise, for a single matrix; but gate and up are concatenated.
_PACKED_EXPERTS = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}

# Experts that all tokens go to, in tensors of the same form as those of the others.
_SHARED_EXPERTS = {"layers.*.mlp.shared_experts": "moe_tp_experts"}

# A layer that reads the values of all heads decides which tokens a head sees.
_GATHERED_ATTENTION = {
    **dict.fromkeys((f"layers.*.self_attn.{key}_proj" for key in "qkv"), "colwise_gather_output"),
    "layers.*.self_attn.dt_proj": "replicate",
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}

# Experts that return their input are next to the others: a sum over columns would count them several times.
_REPLICATED_EXPERTS = dict.fromkeys(
    (f"layers.*.mlp.experts{part}" for part in ("", ".gate_up_proj", ".down_proj", ".identity_expert")),
    "replicate",
)

# Its code reads where patches of bytes end, so no plan can be derived from a run on meta.
_BLT = _plan(
    "*.layers.*",
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj",
    "self_attn.o_proj mlp.down_proj",
)

# --- state-space and recurrent mixers

_ATTENTION = _plan("layers.*.self_attn", "q_proj k_proj v_proj", "o_proj")
_FEED_FORWARD = _plan("layers.*.feed_forward", "gate_proj up_proj", "down_proj")
_HEAD_NORM = "replicated_with_grad_allreduce"

# As in transformers' plan for deepseek_v2. Patterns for layers that a configuration lacks are ignored.
_LATENT_ATTENTION = {
    **_plan("layers.*.self_attn", "q_proj q_b_proj kv_b_proj", "o_proj"),
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
}

_LFM2 = {
    **_plan("layers.*.self_attn", "q_proj k_proj v_proj", "out_proj"),
    **_plan("layers.*.feed_forward", "w1 w3", "w2"),
    "layers.*.conv.in_proj": "packed_colwise:3",
    "layers.*.conv.conv": "depthwise",
    "layers.*.conv.out_proj": "rowwise",
}


def _channels(mixer: str) -> Patterns:
    """The first Mamba: a channel reads the inputs and outputs of states that all channels compute."""
    return {
        f"{mixer}.in_proj": "packed_colwise",
        f"{mixer}.conv1d": "fused_depthwise",
        f"{mixer}.x_proj": "rowwise_with_grad_allreduce",
        **dict.fromkeys((f"{mixer}.{key}_layernorm" for key in ("dt", "b", "c")), _HEAD_NORM),
        # Its forward is not called: the mixer reads its weight and its bias.
        **dict.fromkeys(
            (f"{mixer}.{key}" for key in ("dt_proj.weight", "dt_proj.bias", "A_log", "D")), "colwise"
        ),
        f"{mixer}.out_proj": "rowwise",
    }


_MAMBA = _channels("layers.*.mixer")
_JAMBA = {**_channels("layers.*.mamba"), **_ATTENTION, **_FEED_FORWARD}


def _by_units(mixer: str, styles: dict[str, str]) -> Patterns:
    return {f"{mixer}.{path}" if path else mixer: style for path, style in styles.items()}


def _mixer(path: str, cols: int, units: int, layers: tuple[str, str], styles: dict[str, str]) -> Patterns:
    """The plan of a mixer whose units have `styles`. With more columns than units it is computed in full on
    every column, between sharded projections: `layers`, its inputs, separated by spaces, and its output."""
    if cols > units:
        inputs, output = layers
        styles = dict.fromkeys(inputs.split(), "colwise_gather_output") | {output: "rowwise_split_input"}
    return _by_units(path, styles)


def _local(counts: dict[str, str]) -> str:
    """The style that divides attributes, which are sums of sizes."""
    return "local:" + ",".join(f"{key}={sizes}" for key, sizes in counts.items())


def _grouped_mamba(mixer: str, cols: int, heads: int, width: int, groups: int, state: int) -> Patterns:
    """The second Mamba: heads, of which a group reads the same inputs and outputs of its states."""
    units = heads if groups == 1 else groups
    each = heads // units
    x, states, numbers = f"{units}x{each * width}", f"{groups}x{state}", f"{units}x{each}"
    counts = {
        "num_heads": numbers,
        "intermediate_size": x,
        "conv_dim": f"{x}+{states}+{states}",
        **({"n_groups": f"{groups}x1"} if groups > 1 else {}),
    }
    styles = {
        "": _local(counts),
        "in_proj": f"colwise:{x}+{x}+{states}+{states}+{numbers}",
        "conv1d": f"fused_depthwise:{x}+{states}+{states}",
        **dict.fromkeys(("dt_bias", "A_log", "D"), f"colwise:{numbers}"),
        **({"norm": f"norm_over_columns:{x}"} if groups == 1 else {"norm.weight": f"colwise:{x}"}),
        "out_proj": f"rowwise:{x}",
    }
    return _mixer(mixer, cols, units, ("in_proj", "out_proj"), styles)


def _mamba2(config: Any, cols: int) -> Patterns:
    return _grouped_mamba(
        "layers.*.mixer", cols, config.num_heads, config.head_dim, config.n_groups, config.state_size
    )


def _hybrid(config: Any, cols: int) -> Patterns:
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state
    return _grouped_mamba("layers.*.mamba", cols, *sizes) | _ATTENTION


def _bamba(config: Any, cols: int) -> Patterns:
    return _hybrid(config, cols) | _FEED_FORWARD


def _granitemoehybrid(config: Any, cols: int) -> Patterns:
    shared = {"input_linear": "packed_colwise", "output_linear": "rowwise"}
    return _hybrid(config, cols) | _by_units("layers.*.shared_mlp", shared)


def _nemotron_h(config: Any, cols: int) -> Patterns:
    """A layer is a mixer, an attention, a feed-forward or experts, all of one name."""
    sizes = config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    plan = {
        **_plan("layers.*.mixer", "q_proj k_proj v_proj up_proj", "o_proj down_proj"),
        **_plan("layers.*.mixer.shared_experts", "up_proj", "down_proj"),
    }
    for layer, kind in enumerate(config.layers_block_type):
        if kind == "linear_attention":
            plan |= _grouped_mamba(f"layers.{layer}.mixer", cols, *sizes)
    return plan


def _zamba(config: Any, cols: int) -> Patterns:
    """Heads of the first Mamba, whose gates are interleaved with their inputs."""
    heads, width = config.n_mamba_heads, config.mamba_expand * config.hidden_size // config.n_mamba_heads
    plan = {
        **_plan("layers.*.shared_transf.self_attn", "q_proj k_proj v_proj", "o_proj"),
        **_plan("layers.*.shared_transf.feed_forward", "gate_proj up_proj", "down_proj"),
    }
    for mixer in ("layers.*.mamba", "layers.*.mamba_decoder.mamba"):
        rows = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
        styles = {
            "": _local({"n_mamba_heads": f"{heads}x1", "intermediate_size": f"{heads}x{width}"}),
            "in_proj": f"colwise:{heads}x{2 * width}",
            "conv1d": f"depthwise:{heads}x{width}",
            **dict.fromkeys(rows, f"colwise:{heads}x1"),
            "out_proj": f"rowwise:{heads}x{width}",
        }
        plan |= _mixer(mixer, cols, heads, ("in_proj", "out_proj"), styles)
    return plan


def _zamba2(config: Any, cols: int) -> Patterns:
    sizes = config.n_mamba_heads, config.mamba_headdim, config.mamba_ngroups, config.mamba_d_state
    attention, adapters = (
        "layers.*.shared_transformer.self_attn",
        "feed_forward.gate_up_proj_adapter_list.*.1",
    )
    packed = dict.fromkeys(("feed_forward.gate_up_proj", adapters), "packed_colwise")
    return {
        **_grouped_mamba("layers.*.mamba", cols, *sizes),
        **_grouped_mamba("layers.*.mamba_decoder.mamba", cols, *sizes),
        **_plan(attention, "q_proj k_proj v_proj", "o_proj"),
        **{f"{attention}.linear_{key}_adapter_list.*.1": "colwise" for key in "qkv"},
        **_by_units("layers.*.shared_transformer", packed | {"feed_forward.down_proj": "rowwise"}),
    }


def _gated_delta_net(
    projections: dict[str, str], config: Any, cols: int, output: str = "out_proj", norm: str = "norm"
) -> Patterns:
    """Linear attention by heads of keys, each with its heads of values. `projections`: their parts, and what
    a head has in each: features of a key (k), of its values (v), a number for each of these (n)."""
    mixer, heads = "layers.*.linear_attn", config.linear_num_key_heads
    each = config.linear_num_value_heads // heads
    widths = {"k": config.linear_key_head_dim, "v": config.linear_value_head_dim * each, "n": each}

    def sizes(parts: str) -> str:
        return "+".join(f"{heads}x{sum(map(widths.__getitem__, part))}" for part in parts.split())

    counts = {"num_k_heads": f"{heads}x1", "num_v_heads": sizes("n"), "key_dim": sizes("k")}
    counts |= {"value_dim": sizes("v"), "conv_dim": sizes("k k v")}
    styles = {
        "": _local(counts),
        "conv1d": f"depthwise:{sizes('k k v')}",
        **dict.fromkeys(("dt_bias", "A_log"), f"colwise:{sizes('n')}"),
        **{path: f"colwise:{sizes(parts)}" for path, parts in projections.items()},
        norm: _HEAD_NORM,
        output: f"rowwise:{sizes('v')}",
    }
    return _mixer(mixer, cols, heads, (" ".join(projections), output), styles)


def _kimi_linear(config: Any, cols: int) -> Patterns:
    """Linear attention by heads, with a decay for each feature, next to latent attention."""
    heads, width, plan = config.linear_num_heads, config.linear_head_dim, dict(_LATENT_ATTENTION)
    x, number = f"{heads}x{width}", f"{heads}x1"
    for layer, kind in enumerate(config.layer_types):
        mixer = f"layers.{layer}.self_attn"
        if kind != "linear_attention":
            continue
        counts = {"num_heads": number, "qkv_dim": x, "conv_dim": f"{x}+{x}+{x}"}
        styles = {
            "": _local(counts),
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_b_proj"), f"colwise:{x}"),
            "b_proj": f"colwise:{number}",
            "conv1d": f"depthwise:{x}+{x}+{x}",
            "forget_gate": _local({"num_heads": number, "qkv_dim": x}),
            "forget_gate.f_b_proj": f"colwise:{x}",
            "forget_gate.dt_bias": f"colwise:{x}",
            "forget_gate.A_log": f"colwise:{number}",
            "o_norm": _HEAD_NORM,
            "o_proj": f"rowwise:{x}",
        }
        plan |= _mixer(mixer, cols, heads, ("q_proj k_proj v_proj", "o_proj"), styles)
    return plan


def _recurrent_gemma(config: Any, cols: int) -> Patterns:
    """Recurrent units whose gates are block-diagonal: a block for each head."""
    heads, path = config.num_attention_heads, "layers.*.temporal_block"
    plan = {
        **_plan(path, "q_proj k_proj v_proj", "o_proj"),
        **_plan("layers.*.mlp_block", "gate_proj up_proj", "down_proj"),
    }
    x, number = f"{heads}x{config.lru_width // heads}", f"{heads}x1"
    gates = (f"rg_lru.{gate}_gate_{kind}" for gate in ("input", "recurrent") for kind in ("weight", "bias"))
    styles = {
        **dict.fromkeys(("linear_x", "linear_y", "rg_lru.recurrent_param"), f"colwise:{x}"),
        **dict.fromkeys(gates, f"colwise:{number}"),
        "conv_1d": f"depthwise:{x}",
        "rg_lru": _local({"num_attention_heads": number}),
        "linear_out": f"rowwise:{x}",
    }
    return plan | _mixer(path, cols, heads, ("linear_x linear_y", "linear_out"), styles)


FAMILIES: dict[str, Patterns | Callable[[Any, int], Patterns]] = {
    "gpt2": {"h.*.attn.c_attn": "packed_colwise:3", **_plan("h.*", "mlp.c_fc", "attn.c_proj mlp.c_proj")},
    "gpt_neo": _plan(
        "h.*",
        "attn.attention.q_proj attn.attention.k_proj attn.attention.v_proj mlp.c_fc",
        "attn.attention.out_proj mlp.c_proj",
    ),
    "gptj": _plan("h.*", "attn.q_proj attn.k_proj attn.v_proj mlp.fc_in", "attn.out_proj mlp.fc_out"),
    "opt": _plan(
        "decoder.layers.*", "self_attn.q_proj self_attn.k_proj self_attn.v_proj fc1", "self_attn.out_proj fc2"
    ),
    "bloom": _bloom,
    "blt": _BLT,
    "falcon": _falcon,
    "deepseek_v3": _LATENT_ATTENTION,
    "doge": _GATHERED_ATTENTION,
    # It reads numbers of tokens from the device, so no plan can be derived from a run on meta.
    "jetmoe": {"layers.*.self_attention.kv_proj": "colwise_gather_output"},
    "longcat_flash": _REPLICATED_EXPERTS,
    "phi3": _PACKED_GATE,
    "glm": _PACKED_GATE,
    "glm4": _PACKED_GATE,
    "inkling_text": {**_PACKED_EXPERTS, **_SHARED_EXPERTS},
    "inkling2_text": _PACKED_EXPERTS,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _LFM2),
    **dict.fromkeys(("mamba", "falcon_mamba"), _MAMBA),
    "jamba": _JAMBA,
    "zamba": _zamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "granitemoehybrid": _granitemoehybrid,
    "nemotron_h": _nemotron_h,
    "zamba2": _zamba2,
    "qwen3_next": partial(_gated_delta_net, {"in_proj_qkvz": "kkvv", "in_proj_ba": "nn"}),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        partial(
            _gated_delta_net,
            {"in_proj_qkv": "k k v", "in_proj_z": "v", "in_proj_b": "n", "in_proj_a": "n"},
        ),
    ),
    "olmo_hybrid": partial(
        _gated_delta_net,
        {"q_proj": "k", "k_proj": "k", "v_proj": "v", "g_proj": "v", "a_proj": "n", "b_proj": "n"},
        output="o_proj",
        norm="o_norm",
    ),
    "kimi_linear": _kimi_linear,
    "recurrent_gemma": _recurrent_gemma,
}

# Per-head keyword arguments of attention modules, and the dim of the heads.
_HEAD_ARGUMENTS = {"bloom": (("alibi", -3),), "falcon": (("alibi", -3), ("attention_mask", -3))}


def family_plan(model: nn.Module, cols: int) -> Patterns:
    """The plan that plait has for a transformers model, which overrides the model's own."""
    base = pretrained_base(model)
    if base is None or base.config.model_type not in FAMILIES:
        return {}
    family = FAMILIES[base.config.model_type]
    return family if isinstance(family, dict) else family(base.config.get_text_config(), cols)


def add_head_arguments(builder: TPPlanBuilder, heads: Heads) -> None:
    """Add the per-head arguments of an attention module whose layers are sharded by heads."""
    kind = getattr(builder.config, "model_type", None)
    for argument, dim in _HEAD_ARGUMENTS.get(kind or "", ()):
        sharding = ArgumentSharding(heads.module, argument, dim, heads.num_heads, heads.queries(1))
        if sharding not in builder.arguments:
            builder.arguments.append(sharding)
