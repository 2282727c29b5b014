"""Tensor plans of families with state-space or recurrent mixers, by channels or by heads.

Patterns match paths below the base model; sizes as in `mixers.py` [Note: packed sizes]. With more columns
than heads, or than several groups, a mixer is computed in full between sharded projections.
"""

from typing import Any

from plait.models.sharding.styles import Patterns, plan_of_layers

_ATTENTION = plan_of_layers("layers.*.self_attn", "q_proj k_proj v_proj", "o_proj")
_FEED_FORWARD = plan_of_layers("layers.*.feed_forward", "gate_proj up_proj", "down_proj")
_HEAD_NORM = "replicated_with_grad_allreduce"

# As in transformers' plan for deepseek_v2. Patterns for layers that a configuration lacks are ignored.
LATENT_ATTENTION = {
    **plan_of_layers("layers.*.self_attn", "q_proj q_b_proj kv_b_proj", "o_proj"),
    "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
}

LFM2 = {
    **plan_of_layers("layers.*.self_attn", "q_proj k_proj v_proj", "out_proj"),
    **plan_of_layers("layers.*.feed_forward", "w1 w3", "w2"),
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


MAMBA = _channels("layers.*.mixer")
JAMBA = {**_channels("layers.*.mamba"), **_ATTENTION, **_FEED_FORWARD}


def _gathered(mixer: str, inputs: str, output: str) -> Patterns:
    """A mixer that is computed in full on every column, between sharded projections."""
    styles = dict.fromkeys((f"{mixer}.{key}" for key in inputs.split()), "colwise_gather_output")
    return {**styles, f"{mixer}.{output}": "rowwise_split_input"}


def _by_units(mixer: str, styles: dict[str, str]) -> Patterns:
    return {f"{mixer}.{path}" if path else mixer: style for path, style in styles.items()}


def _local(counts: dict[str, str]) -> str:
    """The style that divides attributes, which are sums of sizes."""
    return "local:" + ",".join(f"{key}={sizes}" for key, sizes in counts.items())


def _mamba2(mixer: str, cols: int, heads: int, width: int, groups: int, state: int) -> Patterns:
    """The second Mamba: heads, of which a group reads the same inputs and outputs of its states."""
    units = heads if groups == 1 else groups
    if cols > units:
        return _gathered(mixer, "in_proj", "out_proj")
    each = heads // units
    x, states, numbers = f"{units}x{each * width}", f"{groups}x{state}", f"{units}x{each}"
    counts = {
        "num_heads": numbers,
        "intermediate_size": x,
        "conv_dim": f"{x}+{states}+{states}",
        **({"n_groups": f"{groups}x1"} if groups > 1 else {}),
    }
    return _by_units(
        mixer,
        {
            "": _local(counts),
            "in_proj": f"colwise:{x}+{x}+{states}+{states}+{numbers}",
            "conv1d": f"fused_depthwise:{x}+{states}+{states}",
            **dict.fromkeys(("dt_bias", "A_log", "D"), f"colwise:{numbers}"),
            **({"norm": f"norm_over_columns:{x}"} if groups == 1 else {"norm.weight": f"colwise:{x}"}),
            "out_proj": f"rowwise:{x}",
        },
    )


def mamba2(config: Any, cols: int) -> Patterns:
    return _mamba2(
        "layers.*.mixer", cols, config.num_heads, config.head_dim, config.n_groups, config.state_size
    )


def _hybrid(config: Any, cols: int) -> Patterns:
    sizes = config.mamba_n_heads, config.mamba_d_head, config.mamba_n_groups, config.mamba_d_state
    return _mamba2("layers.*.mamba", cols, *sizes) | _ATTENTION


def bamba(config: Any, cols: int) -> Patterns:
    return _hybrid(config, cols) | _FEED_FORWARD


def granitemoehybrid(config: Any, cols: int) -> Patterns:
    shared = {"input_linear": "packed_colwise", "output_linear": "rowwise"}
    return _hybrid(config, cols) | _by_units("layers.*.shared_mlp", shared)


def nemotron_h(config: Any, cols: int) -> Patterns:
    """A layer is a mixer, an attention, a feed-forward or experts, all of one name."""
    sizes = config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size
    plan = {
        **plan_of_layers("layers.*.mixer", "q_proj k_proj v_proj up_proj", "o_proj down_proj"),
        **plan_of_layers("layers.*.mixer.shared_experts", "up_proj", "down_proj"),
    }
    for layer, kind in enumerate(config.layers_block_type):
        if kind == "linear_attention":
            plan |= _mamba2(f"layers.{layer}.mixer", cols, *sizes)
    return plan


def zamba(config: Any, cols: int) -> Patterns:
    """Heads of the first Mamba, whose gates are interleaved with their inputs."""
    heads, width = config.n_mamba_heads, config.mamba_expand * config.hidden_size // config.n_mamba_heads
    plan = {
        **plan_of_layers("layers.*.shared_transf.self_attn", "q_proj k_proj v_proj", "o_proj"),
        **plan_of_layers("layers.*.shared_transf.feed_forward", "gate_proj up_proj", "down_proj"),
    }
    for mixer in ("layers.*.mamba", "layers.*.mamba_decoder.mamba"):
        if cols > heads:
            plan |= _gathered(mixer, "in_proj", "out_proj")
            continue
        rows = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
        plan |= _by_units(
            mixer,
            {
                "": _local({"n_mamba_heads": f"{heads}x1", "intermediate_size": f"{heads}x{width}"}),
                "in_proj": f"colwise:{heads}x{2 * width}",
                "conv1d": f"depthwise:{heads}x{width}",
                **dict.fromkeys(rows, f"colwise:{heads}x1"),
                "out_proj": f"rowwise:{heads}x{width}",
            },
        )
    return plan


def zamba2(config: Any, cols: int) -> Patterns:
    sizes = config.n_mamba_heads, config.mamba_headdim, config.mamba_ngroups, config.mamba_d_state
    attention, adapters = (
        "layers.*.shared_transformer.self_attn",
        "feed_forward.gate_up_proj_adapter_list.*.1",
    )
    packed = dict.fromkeys(("feed_forward.gate_up_proj", adapters), "packed_colwise")
    return {
        **_mamba2("layers.*.mamba", cols, *sizes),
        **_mamba2("layers.*.mamba_decoder.mamba", cols, *sizes),
        **plan_of_layers(attention, "q_proj k_proj v_proj", "o_proj"),
        **{f"{attention}.linear_{key}_adapter_list.*.1": "colwise" for key in "qkv"},
        **_by_units("layers.*.shared_transformer", packed | {"feed_forward.down_proj": "rowwise"}),
    }


def _gated_delta_net(config: Any, cols: int, projections: dict[str, str], output: str, norm: str) -> Patterns:
    """Linear attention by heads of keys, each with its heads of values. `projections`: their parts, and what
    a head has in each: features of a key (k), of its values (v), a number for each of these (n)."""
    mixer, heads = "layers.*.linear_attn", config.linear_num_key_heads
    if cols > heads:
        return _gathered(mixer, " ".join(projections), output)
    each = config.linear_num_value_heads // heads
    widths = {"k": config.linear_key_head_dim, "v": config.linear_value_head_dim * each, "n": each}

    def sizes(parts: str) -> str:
        return "+".join(f"{heads}x{sum(map(widths.__getitem__, part))}" for part in parts.split())

    counts = {"num_k_heads": f"{heads}x1", "num_v_heads": sizes("n"), "key_dim": sizes("k")}
    counts |= {"value_dim": sizes("v"), "conv_dim": sizes("k k v")}
    return _by_units(
        mixer,
        {
            "": _local(counts),
            "conv1d": f"depthwise:{sizes('k k v')}",
            **dict.fromkeys(("dt_bias", "A_log"), f"colwise:{sizes('n')}"),
            **{path: f"colwise:{sizes(parts)}" for path, parts in projections.items()},
            norm: _HEAD_NORM,
            output: f"rowwise:{sizes('v')}",
        },
    )


def qwen3_next(config: Any, cols: int) -> Patterns:
    projections = {"in_proj_qkvz": "kkvv", "in_proj_ba": "nn"}
    return _gated_delta_net(config, cols, projections, "out_proj", "norm")


def qwen3_5(config: Any, cols: int) -> Patterns:
    projections = {"in_proj_qkv": "k k v", "in_proj_z": "v", "in_proj_b": "n", "in_proj_a": "n"}
    return _gated_delta_net(config, cols, projections, "out_proj", "norm")


def olmo_hybrid(config: Any, cols: int) -> Patterns:
    parts = {"q_proj": "k", "k_proj": "k", "v_proj": "v", "g_proj": "v", "a_proj": "n", "b_proj": "n"}
    return _gated_delta_net(config, cols, parts, "o_proj", "o_norm")


def kimi_linear(config: Any, cols: int) -> Patterns:
    """Linear attention by heads, with a decay for each feature, next to latent attention."""
    heads, width, plan = config.linear_num_heads, config.linear_head_dim, dict(LATENT_ATTENTION)
    x, number = f"{heads}x{width}", f"{heads}x1"
    for layer, kind in enumerate(config.layer_types):
        mixer = f"layers.{layer}.self_attn"
        if kind != "linear_attention":
            continue
        if cols > heads:
            plan |= _gathered(mixer, "q_proj k_proj v_proj", "o_proj")
            continue
        counts = {"num_heads": number, "qkv_dim": x, "conv_dim": f"{x}+{x}+{x}"}
        plan |= _by_units(
            mixer,
            {
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
            },
        )
    return plan


def recurrent_gemma(config: Any, cols: int) -> Patterns:
    """Recurrent units whose gates are block-diagonal: a block for each head."""
    heads, path = config.num_attention_heads, "layers.*.temporal_block"
    plan = {
        **plan_of_layers(path, "q_proj k_proj v_proj", "o_proj"),
        **plan_of_layers("layers.*.mlp_block", "gate_proj up_proj", "down_proj"),
    }
    if cols > heads:
        return plan | _gathered(path, "linear_x linear_y", "linear_out")
    x, number = f"{heads}x{config.lru_width // heads}", f"{heads}x1"
    gates = (f"rg_lru.{gate}_gate_{kind}" for gate in ("input", "recurrent") for kind in ("weight", "bias"))
    return plan | _by_units(
        path,
        {
            **dict.fromkeys(("linear_x", "linear_y", "rg_lru.recurrent_param"), f"colwise:{x}"),
            **dict.fromkeys(gates, f"colwise:{number}"),
            "conv_1d": f"depthwise:{x}",
            "rg_lru": _local({"num_attention_heads": number}),
            "linear_out": f"rowwise:{x}",
        },
    )
