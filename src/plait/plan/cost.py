"""Cost arithmetic: FLOPs of a training step."""


def training_flops_per_token(
    *, matmul_parameters: int, num_layers: int, attention_width: int, sequence: int
) -> float:
    """FLOPs of forward and backward for one token of a causal decoder.

    6 per parameter that takes part in a matrix product (2 forward, 4 backward; the embedding look-up
    takes part in none, the head does), and for attention 12 x layers x width x sequence for scores and
    values, halved because a causal token sees half the sequence on average. Recompute is not counted:
    this is the model's work, not the hardware's (MFU, not HFU; Chowdhery et al. 2204.02311, appendix B,
    who count attention in full).
    """
    return 6.0 * matmul_parameters + 6.0 * num_layers * attention_width * sequence
