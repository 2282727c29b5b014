"""Shapes of a decoder: what the arithmetic of FLOPs, bytes and memory needs of a model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A stack of equal decoder blocks between an embedding and a head.

    ffn            width of the MLP (of one expert, if there are experts)
    mlp_matrices   2: up and down; 3: gated, as in Llama
    experts        0: a dense model; else the number of experts, of which a token uses `experts_per_token`
    tied           embedding and head share one parameter
    positions      rows of a learned table of positions; 0: none
    biases         linear layers and norms have biases
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
