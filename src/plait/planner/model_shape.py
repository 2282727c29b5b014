"""Shapes of a decoder: what the arithmetic of FLOPs, bytes and memory needs of a model."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, nearest, shown
from plait.fileio import parse_json, parse_toml, read_text
from plait.plan.context import MethodChoice, heads_of_columns
from plait.plan.cost_model import training_flops_per_token
from plait.plan.hashed_once import hashed_once

# Names of the same figure in the config.json of different families. The first that is present counts.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "L"),
    "hidden": ("hidden_size", "n_embd", "d_model", "model_dim", "dim", "hidden", "h"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads", "a"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "attention_head_size", "d_head"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "ffn", "ffn_hidden"),
    "vocab": ("vocab_size", "padded_vocab_size", "vocab", "V"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_topk", "top_k"),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "shared_experts"),
    "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size", "shared_ffn"),
    "dense_layers": ("first_k_dense_replace", "moe_layer_start_index", "dense_layers"),
    "dense_ffn": ("dense_ffn",),
    "q_rank": ("q_lora_rank", "q_rank"),
    "kv_rank": ("kv_lora_rank", "kv_rank"),
    "rope_dim": ("qk_rope_head_dim", "rope_dim"),
    "nope_dim": ("qk_nope_head_dim", "nope_dim"),
    "value_dim": ("v_head_dim", "value_dim"),
    "positions": ("n_positions", "max_position_embeddings", "max_seq_len", "positions"),
}
_OTHERS = ("gated", "tied", "biases", "model_type", "tie_word_embeddings", "bias", "hidden_act")
_EXAMPLE = '--model "layers=32 hidden=4096 heads=32 ..."'
_MOST_LAYERS, _MOST = 2**12, 2**32  # of all other sizes
_DATA = Path(__file__).parent / "data"
_FROM_ONE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "mlp_matrices", "vocab")
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu", "reglu")


@hashed_once
@dataclass(frozen=True)
class ModelShape:
    """A stack of decoder blocks between an embedding and a head: equal ones, after `dense_layers` of them
    whose MLP has no experts.

    ffn            width of the MLP (of one expert, if there are experts)
    mlp_matrices   2: up and down; 3: gated, as in Llama
    experts        0: a dense model; else the number of experts; a token uses `experts_per_token` of them
    shared_ffn     width of the experts that every token uses
    tied           embedding and head share one parameter
    positions      rows of a learned table of positions; 0: none
    biases         linear layers and norms have biases
    embedding_norm the embedding is followed by a norm (BLOOM)
    dense_ffn      width of the MLP of the first `dense_layers` blocks
    latent         latent attention: ranks of queries (0: none) and of keys and values, width of rotary keys
    value_dim      of a head; 0: head_dim
    vectors        elements of a block that no other size counts: norms of heads and ranks, biases, sinks
    shared_gate    the shared experts are weighted by a row of the router
    expert_biases  each expert, and the router, have biases
    head_norms     queries and keys have norms
    shards_tokens  sp=true is possible
    adapter_rank   of LoRA on all linear layers of blocks, over frozen weights; 0: all weights train
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    mlp_matrices: int
    vocab: int
    tied: bool = False
    positions: int = 0
    biases: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    embedding_norm: bool = False
    dense_layers: int = 0
    dense_ffn: int = 0
    latent: tuple[int, int, int] | None = None
    value_dim: int = 0
    vectors: int = 0
    shared_gate: bool = False
    expert_biases: bool = False
    head_norms: bool = False
    shards_tokens: bool = True
    adapter_rank: int = 0

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            least = int(key in _FROM_ONE)
            most = _MOST_LAYERS if key == "layers" else _MOST
            if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
                raise ConfigError(
                    "a size of the model is out of range",
                    given=f"{key}={value}",
                    expected=f"an integer from {least} to {most}",
                    hint=f"{key}={min(max(value, least), most)}",
                )

    @classmethod
    def named(cls, text: str) -> "ModelShape":
        """Read what `--model` names: a path, sizes, or a model of data/models.toml. Raises ConfigError."""
        models = _table("models")
        name = text.rpartition("/")[2].lower().removeprefix("meta-")
        is_path = os.path.exists(text)  # noqa: PTH110  False for a text that is too long for a path
        if is_path and (text not in models or Path(text, "config.json").is_file()):
            return cls.from_config(Path(text))
        if name in models:
            return cls.from_config(models[name], name)
        if "=" in text:
            return cls.parse(text)
        near, repository = nearest(name, models), re.fullmatch(r"[\w.-]+/[\w.-]+(?<!\.json)", text)
        raise ConfigError(
            "no such model",
            given=f"--model {text}",
            expected=f"a config.json, a folder with one, sizes, or one of {', '.join(models)}",
            hint=(f"--model {near}, or " if near else "")
            + f"hf download {text if repository else 'NAME'} config.json --local-dir FOLDER",
        )

    @classmethod
    def from_config(cls, config: "str | Path | Mapping[str, Any]", name: str = "") -> "ModelShape":
        """Read a Hugging Face config.json (a path or its content), or the sizes by their plain names (layers,
        hidden, heads, kv_heads, head_dim, ffn, vocab, gated, tied, ...). Raises ConfigError."""
        values, name = _load(config, name)
        family = str(values.get("model_type", "")).lower()
        layers, hidden, heads, vocab = (
            _number(values, key) for key in ("layers", "hidden", "heads", "vocab")
        )
        latent = _latent(values)
        head_dim = _number(values, "head_dim", 0) or hidden // heads
        if latent is not None:
            head_dim = _number(values, "nope_dim") + latent[2]
        elif not _find(values, "head_dim") and hidden % heads:
            raise ConfigError(
                "the heads do not divide the hidden size",
                given=f"hidden={hidden} heads={heads}",
                expected="a multiple of heads, or a head_dim",
                hint=f"head_dim={max(1, hidden // heads)}",
            )
        experts = _number(values, "experts", 0)
        ffn = _number(values, "ffn", 0) or round(hidden * _ratio(values))
        expert_ffn = (_number(values, "expert_ffn", 0) or ffn) if experts else ffn
        shared = _number(values, "shared_ffn", 0) or _number(values, "shared_experts", 0) * expert_ffn
        kv_heads, value_dim = _kv_heads(values, heads), _number(values, "value_dim", 0) if latent else 0
        return cls(
            name=name or family or "model",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=expert_ffn,
            mlp_matrices=3 if _is_gated(values, family) else 2,
            vocab=vocab,
            tied=bool(values.get("tie_word_embeddings", values.get("tied", _is_of(family, "tied")))),
            positions=_positions(values, family),
            biases=_has_biases(values, family),
            experts=experts,
            experts_per_token=_number(values, "experts_per_token", 2) if experts else 0,
            shared_ffn=shared if experts else 0,
            embedding_norm=family == "bloom",
            dense_layers=_dense_layers(values, layers) if experts else 0,
            dense_ffn=(_number(values, "dense_ffn", 0) or ffn) if experts else 0,
            latent=latent,
            value_dim=value_dim,
            vectors=sum(latent[:2])
            if latent
            else _vectors(values, family, (hidden, heads, kv_heads, head_dim)),
            shared_gate=_is_of(family, "shared_gate"),
            expert_biases=_is_of(family, "expert_biases"),
            head_norms=_is_of(family, "wide_norms") or _has_head_norms(values, family),
            shards_tokens=not _is_of(family, "complete_tokens"),
        )

    @classmethod
    def parse(cls, text: str) -> "ModelShape":
        """Read `layers=32 hidden=4096 heads=32 kv_heads=8 ffn=14336 vocab=128256`. Raises ConfigError."""
        pairs = dict(word.partition("=")[::2] for word in re.split(r"[\s,]+", text.strip()))
        names = [*(alias for aliases in _KEYS.values() for alias in aliases), *_OTHERS]
        for key in pairs:
            if key not in names:
                raise ConfigError(
                    "unknown size of a model",
                    given=f"{key}={pairs[key]}",
                    expected=", ".join((*_KEYS, *_OTHERS[:3])),
                    hint=nearest(key, names) or _EXAMPLE,
                )
        known = {"true": True, "false": False}
        is_number = re.compile("[0-9]{1,18}").fullmatch
        return cls.from_config(
            {key: int(text) if is_number(text) else known.get(text, text) for key, text in pairs.items()}
        )

    @property
    def value_width(self) -> int:
        """Elements of the values of all query heads: the input of the output projection."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def kv_width(self) -> int:
        """Elements of all keys and values of a token."""
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def attention_width(self) -> int:
        """Elements of all query heads of a token: the mean of those of scores and of values."""
        return (self.heads * self.head_dim + self.value_width) // 2

    @property
    def qkv_width(self) -> int:
        return self.heads * self.head_dim + self.kv_width

    @property
    def normed_width(self) -> int:
        """Elements of queries and keys that norms of heads compute."""
        return (self.heads + self.kv_heads) * self.head_dim if self.head_norms else 0

    @property
    def active_ffn(self) -> int:
        """Width of the MLPs that one token uses."""
        return self.ffn * (self.experts_per_token if self.experts else 1) + self.shared_ffn

    @cached_property
    def dense_block(self) -> "ModelShape":
        """The model with the first blocks only: those without experts."""
        dense = replace(self, ffn=self.dense_ffn, dense_layers=0, shared_gate=False, expert_biases=False)
        return replace(dense, experts=0, experts_per_token=0, shared_ffn=0)

    def attention_products(self, hidden: int, heads: int, kv_heads: int) -> list[tuple[int, int]]:
        """Outputs and inputs of the linear layers of attention, the one after attention last."""
        value_dim = self.value_dim or self.head_dim
        last = (hidden, heads * value_dim)
        if self.latent is None:
            return [(heads * self.head_dim + kv_heads * (self.head_dim + value_dim), hidden), last]
        q_rank, kv_rank, rope = self.latent
        queries = [(q_rank, hidden), (heads * self.head_dim, q_rank or hidden)][q_rank == 0 :]
        up = heads * (self.head_dim - rope + value_dim), kv_rank
        return [*queries, (kv_rank + rope, hidden), up, last]

    def with_adapter(self, rank: int) -> "ModelShape":
        """The model with LoRA of this rank on all linear layers of its blocks, whose other weights are frozen
        (Hu et al. 2106.09685). Raises ConfigError for a mixture of experts."""
        if self.experts:
            raise ConfigError(
                "adapters of a mixture of experts are not priced",
                given=f"adapter r={rank}, {self.name} with {self.experts} experts",
                expected="a model without experts",
                hint='plait explain RECIPE --plan "dp=2"',
            )
        return replace(self, adapter_rank=rank)

    def linear_layers(self, cols: int = 1) -> list[tuple[int, int]]:
        """Outputs and inputs, on a column of `tp`, of the linear layers of a block that adapters are on."""
        h, kv_cols, value_dim = self.hidden, min(cols, self.kv_heads), self.value_dim or self.head_dim
        queries, values = self.heads * self.head_dim // cols, self.heads * value_dim // cols
        kv = [self.kv_heads * dim // kv_cols for dim in (self.head_dim, value_dim)]
        ups = [(self.ffn // cols, h)] * (self.mlp_matrices - 1)
        return [(queries, h), *((width, h) for width in kv), (h, values), *ups, (h, self.ffn // cols)]

    def adapter_params(self, cols: int = 1) -> int:
        """Parameters of a block's adapters, on a column of `tp`."""
        return self.adapter_rank * sum(map(sum, self.linear_layers(cols))) if self.adapter_rank else 0

    @cached_property
    def attention_params(self) -> int:
        """Elements of the matrices of attention."""
        return sum(n * k for n, k in self.attention_products(self.hidden, self.heads, self.kv_heads))

    @property
    def latent_params(self) -> int:
        """Elements of the matrices of attention that every column has."""
        if self.latent is None:
            return 0
        return self.hidden * sum(self.latent)

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        has_biases = self.biases or self.expert_biases
        vectors = has_biases * ((self.mlp_matrices - 1) * self.ffn + self.hidden)
        return self.mlp_matrices * self.hidden * self.ffn + vectors

    @property
    def block_vectors(self) -> int:
        """Elements of a block that are in no matrix, of all but the experts."""
        norms = 2 * self.norm_params + self.vectors + self.expert_biases * self.experts
        if not self.biases:
            return norms
        width = self.shared_ffn if self.experts else self.ffn
        of_mlp = (self.mlp_matrices - 1) * width + (0 if self.experts else self.hidden)
        return norms + self.qkv_width + self.hidden + of_mlp

    @cached_property
    def block_params(self) -> int:
        """Parameters of one block."""
        width = self.shared_ffn if self.experts else self.ffn
        return (
            self.attention_params
            + self.mlp_matrices * self.hidden * width
            + self.hidden * (self.experts + self.shared_gate)
            + self.experts * self.expert_params
            + self.block_vectors
        )

    @property
    def norm_params(self) -> int:
        return self.hidden * (2 if self.biases else 1)

    @property
    def embedding_params(self) -> int:
        norm = self.norm_params if self.embedding_norm else 0
        return (self.vocab + self.positions) * self.hidden + norm

    @property
    def head_params(self) -> int:
        """Parameters after the blocks, without a tied head's."""
        return self.norm_params + (0 if self.tied else self.vocab * self.hidden)

    @property
    def num_params(self) -> int:
        """All parameters; a tied one counts once."""
        dense = self.dense_layers * self.dense_block.block_params if self.dense_layers else 0
        blocks = (self.layers - self.dense_layers) * self.block_params
        return self.embedding_params + blocks + dense + self.head_params

    @property
    def active_params(self) -> int:
        """Parameters that one token uses: of the experts, those that it is sent to."""
        unused = (self.layers - self.dense_layers) * (self.experts - self.experts_per_token)
        return self.num_params - unused * self.expert_params

    @property
    def block_matmul_params(self) -> int:
        """Parameters of a block that one token is multiplied with."""
        mlp = self.mlp_matrices * self.hidden * self.active_ffn
        return self.attention_params + mlp + self.hidden * (self.experts + self.shared_gate)

    def heads_of_column(self, columns: int) -> tuple[int, int, int]:
        """Heads, kv heads, and the width of a key and a value on the first column of `tp`."""
        return (*heads_of_columns(self.heads, self.kv_heads, columns)[0], self.kv_width // self.kv_heads)

    def expert_columns(self, columns: int, ep: int) -> int:
        """Columns of `tp` over which complete experts of a rank of `ep` are divided; 1: each column has a
        part of every expert. As `TPPlan.with_own_experts`."""
        return columns if ep > 1 and self.experts % (ep * columns) == 0 else 1

    def training_flops_per_token(self, sequence: int, *, causal: bool = True) -> float:
        """FLOPs of forward and backward, recomputation not counted: with those of adapters, and without those
        of frozen weights' gradients."""
        of_blocks = (self.layers - self.dense_layers) * self.block_matmul_params
        if self.dense_layers:
            of_blocks += self.dense_layers * self.dense_block.block_matmul_params
        multiplied = of_blocks + self.vocab * self.hidden
        flops = training_flops_per_token(
            matmul_parameters=multiplied,
            num_layers=self.layers,
            attention_width=self.attention_width,
            sequence=sequence,
            causal=causal,
        )
        if self.adapter_rank:
            flops += 6.0 * self.layers * self.adapter_params() - 2.0 * multiplied
        return flops


@lru_cache(maxsize=1 << 10)
def attention_method(
    model: ModelShape,
    columns: int,
    cp: int,
    cp_method: str,
    on_host: int | None = None,
    recomputed: float = 0.0,
) -> str:
    """How attention reaches the tokens of other ranks in a plan with these keys. `on_host`: neighbours on
    each host; None: all. Raises PlanError if the heads do not divide."""
    pairs = heads_of_columns(model.heads, model.kv_heads, columns)
    heads = [(*each, model.kv_width // model.kv_heads) for each in pairs]
    return MethodChoice.of(cp_method, heads, cp, on_host, recomputed).method


def _load(config: "str | Path | Mapping[str, Any]", name: str) -> tuple[Mapping[str, Any], str]:
    values: Any = config
    if isinstance(config, str | Path):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            values = parse_json(read_text(path))
        except OSError as error:
            raise ConfigError(
                "the model's configuration cannot be read",
                given=f"{path}: {error.strerror}",
                expected="a Hugging Face config.json, or a folder with one",
                hint=_EXAMPLE,
            ) from error
        except (ValueError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the model's configuration is not JSON",
                given=f"{path}: {error}",
                expected="a Hugging Face config.json",
                hint="plait explain RECIPE, or --model CONFIG --adapter r=16"
                if path.suffix == ".toml"
                else "correct the file at that place",
            ) from error
        name = name or (path.parent.name if path.name == "config.json" else path.stem)
    if not isinstance(values, Mapping):
        raise ConfigError(
            "the model's configuration is not a JSON object",
            given=shown(values),
            expected="the keys and values of a config.json",
            hint=_EXAMPLE,
        )
    text = values.get("text_config") or values.get("llm_config")
    if isinstance(text, Mapping):
        values = text
    attention = values.get("attn_config")  # of MPT
    if isinstance(attention, Mapping):
        values = {**attention, **values}
    return values, name


@cache
def _table(name: str) -> Mapping[str, Any]:
    return parse_toml(read_text(_DATA / f"{name}.toml"))


def _is_of(family: str, kind: str) -> bool:
    return family in _table("families")[kind]


def _find(values: Mapping[str, Any], key: str) -> Any:
    return next((values[alias] for alias in _KEYS[key] if values.get(alias) is not None), None)


def _number(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = _find(values, key)
    if found is None and default is not None:
        return default
    if isinstance(found, bool) or not isinstance(found, int) or found < (1 if default is None else 0):
        raise ConfigError(
            f"the model's configuration has no usable {key}",
            given=f"no {key}" if found is None else f"{key}={shown(found)}",
            expected=f"a positive integer named {', '.join(_KEYS[key][:4])} ...",
            hint=_EXAMPLE,
        )
    return found


def _ratio(values: Mapping[str, Any]) -> float:
    """The width of the MLP by the hidden size, of MPT."""
    found = values.get("expansion_ratio", 4)
    if isinstance(found, int | float) and 0 < found <= 2**10:
        return float(found)
    raise ConfigError(
        "the model's configuration has no usable expansion_ratio",
        given=shown(found),
        expected="a number above 0",
        hint="expansion_ratio=4",
    )


def _kv_heads(values: Mapping[str, Any], heads: int) -> int:
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return 1
    return _number(values, "kv_heads", heads)


def _latent(values: Mapping[str, Any]) -> tuple[int, int, int] | None:
    kv_rank = _number(values, "kv_rank", 0)
    return (_number(values, "q_rank", 0), kv_rank, _number(values, "rope_dim")) if kv_rank else None


def _dense_layers(values: Mapping[str, Any], layers: int) -> int:
    """The number of blocks without experts; of Qwen, those are not the first."""
    step, listed = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
    if step == 1 and not listed:
        return min(layers, _number(values, "dense_layers", 0))
    return sum((layer + 1) % step != 0 or layer in listed for layer in range(layers))


def _vectors(values: Mapping[str, Any], family: str, sizes: tuple[int, int, int, int]) -> int:
    hidden, heads, kv_heads, head_dim = sizes
    kv, queries = kv_heads * head_dim, heads * head_dim
    of_keys = values.get("attention_bias") is True and not _is_of(family, "qkv_biases")
    return (
        2 * head_dim * _has_head_norms(values, family)
        + (queries + kv) * _is_of(family, "wide_norms")
        + (queries + 2 * kv) * (of_keys or _is_of(family, "qkv_biases"))
        + hidden * of_keys
        + heads * _is_of(family, "sinks")
    )


def _has_head_norms(values: Mapping[str, Any], family: str) -> bool:
    return _is_of(family, "head_norms") or values.get("use_qk_norm") is True


def _is_gated(values: Mapping[str, Any], family: str) -> bool:
    if isinstance(values.get("gated"), bool):
        return bool(values["gated"])
    activation = str(values.get("hidden_act") or values.get("activation_function") or "").lower()
    if not family:
        return activation in _GATED_ACTIVATIONS
    return not _is_of(family, "two_matrices")


def _has_biases(values: Mapping[str, Any], family: str) -> bool:
    if isinstance(values.get("biases"), bool):
        return bool(values["biases"])
    if isinstance(values.get("no_bias"), bool):  # of MPT
        return not values["no_bias"]
    return bool(values.get("bias", _is_of(family, "two_matrices") and not _is_of(family, "unbiased")))


def _positions(values: Mapping[str, Any], family: str) -> int:
    if family == "mpt":
        learned = values.get("learned_pos_emb", True) and not values.get("alibi", False)
        return _number(values, "positions", 0) if learned else 0
    if _is_of(family, "learned_positions") or not family:
        named = _KEYS["positions"] if family else ("positions",)
        found = next((values[key] for key in named if values.get(key)), 0)
        return (found if isinstance(found, int) else 0) + (2 if family == "opt" else 0)
    return 0
