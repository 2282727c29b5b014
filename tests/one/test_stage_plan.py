"""How a model's blocks are assigned to stages, and which plans are refused before."""

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import ModelError, PlanError
from plait.models import Chain, blocks_of, causal_lm_on_meta, plan_stages, receiving, split_stage
from plait.plan.stages import StageAssignment
from support import hf_models


def planned(model: nn.Module, num_stages: int, given: tuple[int, ...] | None = None) -> StageAssignment:
    return plan_stages(model, blocks_of(model), num_stages, given=given)


def numbers(cut: StageAssignment) -> list[int]:
    return [stop - start for start, stop in cut.blocks]


def llama(layers: int = 8, **more: Any) -> nn.Module:
    return hf_models.model_of("llama", exact=False, num_hidden_layers=layers, **more)


def test_with_a_small_head_equal_blocks_are_assigned_evenly() -> None:
    assert numbers(planned(llama(), 2)) == [4, 4]
    assert numbers(planned(llama(), 4)) == [2, 2, 2, 2]


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_vocabulary_costs_where_it_is_multiplied_not_where_it_is_looked_up(tied: bool) -> None:
    model = llama(vocab_size=700, tie_word_embeddings=tied)  # the head as two or three blocks
    first, last = numbers(planned(model, 2))
    assert (first, last) == (5, 3)


def test_experts_cost_what_a_token_uses_of_them() -> None:
    """Two dense blocks, then two of several times their size, of which a token meets an eighth."""
    sizes = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 44}
    model = hf_models.model_of(
        "deepseek_v3", exact=False, num_hidden_layers=4, first_k_dense_replace=2, **sizes
    )
    dense, sparse = (sum(p.numel() for p in model.model.layers[n].parameters()) for n in (0, 3))
    assert sparse > 4 * dense
    assert numbers(planned(model, 2)) == [2, 2]


def test_blocks_are_assigned_by_the_stages_option() -> None:
    cut = planned(llama(), 3, given=(1, 2, 5))
    assert cut.blocks == ((0, 1), (1, 3), (3, 8))
    assert cut.owner["model.layers.0.mlp.up_proj.weight"] == 0
    assert cut.owner["model.layers.2.mlp.up_proj.weight"] == 1
    assert cut.owner["lm_head.weight"] == 2


def test_nothing_of_the_model_changes() -> None:
    model = llama()
    before = {name: (id(p), p.requires_grad, p.is_meta) for name, p in model.named_parameters()}
    planned(model, 4)
    after = {name: (id(p), p.requires_grad, p.is_meta) for name, p in model.named_parameters()}
    assert after == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_and_meta_give_one_plan() -> None:
    with_weights = hf_models.model_of("gpt2", on_meta=False, exact=False)
    assert planned(with_weights, 2) == planned(hf_models.model_of("gpt2", exact=False), 2)


class Body(nn.Module):
    """A module whose inputs cannot be guessed."""

    def __init__(self, tie: bool = False) -> None:
        super().__init__()
        self.enter = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.leave = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        if tie:
            self.head.weight = self.blocks[0].weight

    def forward(self, *, signal: torch.Tensor) -> torch.Tensor:
        x = self.enter(signal)
        for block in self.blocks:
            x = block(x)
        return self.head(self.leave(x))


class ReadsValues(nn.Module):
    """Reads values of what its blocks return, as models do that find where patches of bytes end."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
            if any(map(math.isnan, hidden.flatten().tolist())):
                raise ValueError("not a number")
        return hidden


def test_values_that_a_model_reads_of_its_blocks_are_the_same_on_all_ranks() -> None:
    """They are not what was in memory before, of which NaN is an example."""
    torch.use_deterministic_algorithms(True)  # new memory is filled with NaN
    try:
        assert planned(ReadsValues(), 2).is_traced
    finally:
        torch.use_deterministic_algorithms(False)


def test_models_that_cannot_run_on_meta_are_assigned_by_registration_order() -> None:
    homes = planned(Body(), 3).owner
    assert {homes[f"enter.{key}"] for key in ("weight", "bias", "running_mean")} == {0}
    assert {homes[f"leave.{key}"] for key in ("weight", "bias", "running_mean")} == {2}
    assert homes["head.weight"] == 2
    cut = planned(Body(tie=True), 3)
    assert dict(cut.shared) == {"blocks.0.weight": (0, 2)}
    assert cut.stages_with("blocks.0.bias") == (0,)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PlanError, match="6 blocks cannot fill 9 stages") as message:
        planned(llama(6), 9)
    assert "\n  expected: at least one block on every stage but the first and the last" in str(message.value)
    assert "\n  try     : 2 or 3 or 6 stages" in str(message.value)
    assert numbers(planned(llama(6), 8)) == [0, 1, 1, 1, 1, 1, 1, 0]


def test_a_head_heavier_than_a_block_is_alone_if_that_is_faster() -> None:
    assert numbers(planned(llama(4, vocab_size=700), 4)) == [1, 1, 2, 0]
    assert numbers(planned(llama(4, vocab_size=100), 4)) == [1, 1, 1, 1]


@pytest.mark.parametrize("given", [(8, 8, 8, 6), (4, 4), (2, 0, 3, 3), (9, -1, 0, 0)])
def test_stages_that_do_not_add_up_are_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="do not add up to the model's") as message:
        planned(llama(), 4, given=given)
    listed = ",".join(map(str, given))
    assert f"\n  given   : stages={listed}: {len(given)} stages with {sum(given)} blocks" in str(
        message.value
    )
    assert "\n  expected: 4 numbers with the sum 8, of at least 1; the first and" in str(message.value)
    assert "\n  try     : stages=2,2,2,2" in str(message.value)


class Tanh(nn.Module):
    """Has parameters in its blocks alone, and its result reads what the last one leaves."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.layers, self.reads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), reads
        self.head = nn.Linear(4, 400) if reads else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        left: list[Tensor] = []
        self.layers[-1].register_forward_hook(lambda *call: left.append(call[-1]))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + left[0]) if self.reads else x


def test_an_end_without_blocks_is_refused_where_it_has_nothing_or_lacks_something() -> None:
    batch = {"x": torch.randn(2, 4)}
    plan = functools.partial(plan_stages, batch=batch)
    for given, stage in (((0, 3), 0), ((3, 0), 1)):
        model = Tanh(reads=False)
        with pytest.raises(PlanError, match=f"stage {stage} would have nothing to compute") as message:
            plan(model, blocks_of(model), 2, given=given)
        assert f"try     : at least one block on stage {stage}" in str(message.value)
    model = Tanh(reads=True)
    with pytest.raises(ModelError, match="the model's result uses a result of block 2"):
        plan(model, blocks_of(model), 2, given=(3, 0))
    assert numbers(plan(model, blocks_of(model), 2)) == [2, 1]  # though the head is heavier


class Counting(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._seen = 3
        return super().forward(x)


class Counted(Tanh):
    """Its result reads what the last block's forward has set."""

    def __init__(self) -> None:
        super().__init__(reads=True)
        self.layers = nn.ModuleList(Counting(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.layers[-1].calls


def test_no_end_without_blocks_is_chosen_where_blocks_set_attributes() -> None:
    """They cannot be read on other stages, and the last block's may be in the model's result."""
    model = Counted()
    assert numbers(plan_stages(model, blocks_of(model), 2, batch={"x": torch.randn(2, 4)})) == [2, 1]


class Private(Counted):
    """Reads a private attribute, for which it has a default."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * getattr(self.layers[-1], "_seen", 1)


def test_a_private_attribute_of_another_stages_block_has_no_default() -> None:
    model, batch = Private(), {"x": torch.randn(2, 4)}
    assert numbers(plan_stages(model, blocks_of(model), 2, batch=batch)) == [2, 1]
    given = plan_stages(model, blocks_of(model), 2, batch=batch, given=(3, 0))
    stage = split_stage(model, blocks_of(model), given, 1, device=torch.device("cpu"))
    with (
        receiving(stage.module, torch.zeros(2, 4)),
        pytest.raises(ModelError, match=r"_seen of layers\.2 is set in another stage"),
    ):
        stage.module(**batch)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="no repeated blocks to split it between") as message:
        planned(nn.Bilinear(2, 2, 2), 2)
    assert "Bilinear without an nn.ModuleList, nn.Sequential or plait.Chain" in str(message.value)
    assert "blocks=BlockClass, or blocks=[module, ...] in forward order" in str(message.value)


def test_a_chain_of_one_kind_is_assigned_by_its_weights() -> None:
    sizes = [8, 8, 8, 8, 24, 8]
    chain = Chain(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
    assert numbers(planned(chain, 2)) == [4, 1]  # as slow as [3, 2], and heavy early


def test_keys_that_layers_share_keep_their_layers_on_one_stage() -> None:
    """Gemma's last layers attend to keys that earlier ones made, by a dict that no layer returns."""
    sizes: dict[str, Any] = {"head_dim": 8, "vocab_size_per_layer_input": 61, "laurel_rank": 4}
    sizes |= {"hidden_size_per_layer_input": 8, "sliding_window": 8, "activation_sparsity_pattern": None}
    common = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
    types = ["sliding_attention", "full_attention"] * 3
    model = causal_lm_on_meta({"model_type": "gemma3n_text", **common, **sizes, "layer_types": types})
    with pytest.raises(
        ModelError, match=r"block 4 uses a result of block 2, bypassing the blocks"
    ) as message:
        planned(model, 2, given=(3, 3))
    assert "blocks 2 to 4 on one stage" in str(message.value)
    cut = planned(model, 2, given=(2, 4))
    assert cut.stages_with("model.embed_tokens_per_layer.weight") == (0, 1)


class TiedDecoder(nn.Module):
    """Its decoder multiplies with the encoder's weights, transposed."""

    def __init__(self, *, registers: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        weights = [layer.weight for layer in reversed(self.encoder)]
        self.weights = nn.ParameterList(weights) if registers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        for weight in self.weights or [layer.weight for layer in reversed(self.encoder)]:
            x = x @ weight
        return x


def test_a_blocks_weight_read_on_another_stage_is_refused_unless_it_is_registered_there() -> None:
    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return (outputs - batch["x"]).square().sum(), outputs.numel()

    batch, plan = {"x": torch.randn(4, 8)}, "schedule=interleaved chunks=2 micro=2 precision=fp64"
    with pytest.raises(ModelError, match="parameter is read outside of the block, on another stage") as error:
        plait.parallelize(TiedDecoder(registers=False), plan, loss=loss, example_batch=batch)
    assert "encoder.0.weight of stage 0, on stage 1" in str(error.value)
    model = TiedDecoder(registers=True)
    alone = plait.parallelize(copy.deepcopy(model), "micro=2 precision=fp64", loss=loss)
    staged = plait.parallelize(model, plan, loss=loss, example_batch=batch)
    for _ in range(2):
        assert staged.step(batch).loss == pytest.approx(alone.step(batch).loss, rel=1e-12)
