"""Dropout on a grid of ranks, played one after the other: whose masks are equal, and whose are not."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import AutoModelForCausalLM

from plait.models import blocks_of, causal_lm_on_meta
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.parallel.tensor.rng import install_rng_streams
from plait.plan.sharding import DimSharding, LayerSharding, Style, TPPlan

CPU = torch.device("cpu")
# Widths of the pieces of each coordinate: residual features by row, feed-forward and head features by col
EVEN = {"row": (8, 8), "col": (8, 8, 8), "tokens": (4, 4, 4)}
UNEVEN = {"row": (6, 9), "col": (8, 5, 4), "tokens": (4, 3, 5)}
BATCH = 3
DROPPED, KEPT, NOTHING_TO_DROP = 0, 1, 2


@contextmanager
def watched() -> Iterator[list[Tensor]]:
    """Record the masks of all elements that are given to dropout, in the order of the program."""
    found: list[Tensor] = []

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        y = plain_dropout(x, p, training, inplace)
        if p and training:
            found.append(torch.where(x == 0, NOTHING_TO_DROP, (y != 0).int()).detach())
        return y

    def attention(*args: Any, dropout_p: float, **kwargs: Any) -> Tensor:
        y = plain_attention(*args, dropout_p=dropout_p, **kwargs)
        found.append((y != 0).int().detach())
        return y

    plain_dropout, plain_attention = F.dropout, F.scaled_dot_product_attention
    with mock.patch.multiple(F, dropout=dropout, scaled_dot_product_attention=attention):
        yield found


def agree(one: Tensor, other: Tensor) -> bool:
    """Wherever both had something to drop."""
    both = (one != NOTHING_TO_DROP) & (other != NOTHING_TO_DROP)
    return torch.equal(one[both], other[both])


class _Region(nn.Module):
    """Drops on its input, between its layers by a function, a module and in attention, and after them."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, width), nn.Linear(width, hidden)
        self.inner, self.after = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor, own: slice) -> Tensor:
        h = self.inner(1 + self.up(F.dropout(x, 0.5, self.training)).sigmoid())
        h = F.dropout(h + 1, 0.5, self.training)
        probs = torch.eye(h.shape[1]).expand(BATCH, h.shape[2], -1, -1)
        still = torch.zeros_like(probs)
        p = 0.5 if self.training else 0.0
        drops = F.scaled_dot_product_attention(still, still, probs, dropout_p=p)  # of 1 / S each
        return self.after(1 + self.down(h * drops.sum((2, 3))[:, None])[:, own].sigmoid())


IN_REGION = ("row", "col", "col", "col", "residual")  # what the activations that a region drops are cut over


class _Block(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = _Region(hidden, width), _Region(hidden, width)
        self.fc1, self.fc2 = nn.Linear(hidden, width), nn.Linear(width, hidden)

    def forward(self, x: Tensor, own: slice, tokens: int) -> Tensor:
        x = F.dropout(1 + x.sigmoid(), 0.5, self.training)
        for region in (self.attention, self.mlp):
            x = x * region(torch.ones(BATCH, tokens, x.shape[2], requires_grad=True), own)
        h = F.dropout(1 + self.fc1(x).sigmoid(), 0.5, self.training)
        return x * F.dropout(1 + self.fc2(h).sigmoid(), 0.5, self.training)


IN_BLOCK = ("residual", *IN_REGION, *IN_REGION, "col", "residual")


class _Model(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.embedded, self.last = nn.Dropout(0.5), nn.Dropout(0.5)
        self.blocks = nn.ModuleList([_Block(hidden, width) for _ in range(2)])

    def forward(self, x: Tensor, own: slice) -> Tensor:
        tokens = x.shape[1]
        x = self.embedded(x)[:, own]
        for block in self.blocks:
            x = block(x, own, tokens)
        return self.last(torch.ones(BATCH, tokens, x.shape[2])).mean() * x.sum()


IN_MODEL = ("row", *IN_BLOCK, *IN_BLOCK, "row")


def plan_of(rows: int, cols: int) -> TPPlan:
    layers = []
    for block in range(2):
        for up, down in (("attention.up", "attention.down"), ("mlp.up", "mlp.down"), ("fc1", "fc2")):
            layers.append(LayerSharding(f"blocks.{block}.{up}", Style.COLUMN))
            layers.append(LayerSharding(f"blocks.{block}.{down}", Style.ROW))
    regions = [f"blocks.{b}.{name}" for b in range(2) for name in ("attention", "mlp", "fc1", "fc2")]
    return TPPlan(rows, cols, tuple(layers), regions=tuple(regions))


def played(
    row: int, col: int, cols: int, sizes: dict[str, Any], *, sequence: bool, how: str = "none"
) -> tuple[list[Tensor], Tensor, _Model]:
    """The masks of one rank, the common stream's state afterwards, the model."""
    model = _Model(sizes["row"][row], sizes["col"][col])
    blocks = list(model.blocks)
    install_rng_streams(
        model, blocks, plan_of(2, cols), {"row": row, "col": col}, sequence=sequence, device=CPU
    )
    recompute_blocks(blocks, how)
    return (*masks_of(model, row, col, cols, sizes, sequence=sequence), model)


def masks_of(
    model: nn.Module, row: int, col: int, cols: int, sizes: dict[str, Any], *, sequence: bool
) -> tuple[list[Tensor], Tensor]:
    tokens = sizes["tokens"][:cols]
    start = sum(tokens[:col])
    own = slice(start, start + tokens[col]) if sequence else slice(None)
    torch.manual_seed(11)
    with watched() as masks, set_checkpoint_early_stop(False):
        loss = model(torch.ones(BATCH, sum(tokens), sizes["row"][row], requires_grad=True), own)
        state = torch.get_rng_state()
        loss.backward()
    return masks, state


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sp"])
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_ranks_with_one_activation_have_one_mask_and_others_have_others(
    sizes: dict[str, Any], sequence: bool
) -> None:
    places = list(itertools.product(range(2), range(3)))
    ranks = {place: played(*place, 3, sizes, sequence=sequence) for place in places}
    assert all(len(masks) == len(IN_MODEL) for masks, *_ in ranks.values())
    for (one, other), (number, cut) in itertools.product(
        itertools.combinations(places, 2), enumerate(IN_MODEL)
    ):
        axes = {"row": (0,), "col": (1,), "residual": (0, 1) if sequence else (0,)}[cut]
        is_same = all(one[axis] == other[axis] for axis in axes)
        mine, its = ranks[one][0][number], ranks[other][0][number]
        assert mine.numel() > 40
        assert torch.equal(mine, its) == is_same, f"mask {number}, over {cut}, of {one} and {other}"


def test_no_two_masks_of_a_rank_are_equal() -> None:
    masks = played(1, 1, 2, EVEN, sequence=False)[0]
    shapes = {mask.shape for mask in masks}
    for shape in shapes:
        alike = [mask for mask in masks if mask.shape == shape]
        assert not any(torch.equal(one, other) for one, other in itertools.combinations(alike, 2))


def test_the_common_stream_goes_on_alike_whatever_pieces_ranks_have() -> None:
    states = [played(*place, 3, UNEVEN, sequence=True)[1] for place in ((0, 0), (0, 2), (1, 1))]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


@pytest.mark.parametrize("how", ["full", "selective"])
@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sp"])
def test_a_recomputed_block_drops_the_same_again(how: str, sequence: bool) -> None:
    plain = played(1, 2, 3, UNEVEN, sequence=sequence)[0]
    found = played(1, 2, 3, UNEVEN, sequence=sequence, how=how)[0]
    per_block = len(IN_BLOCK)
    forward, again = found[: len(IN_MODEL)], found[len(IN_MODEL) :]
    assert all(map(torch.equal, forward, plain))
    first, second = forward[1 : 1 + per_block], forward[1 + per_block : 1 + 2 * per_block]
    assert len(again) == 2 * per_block
    assert all(map(torch.equal, again, second + first))  # backward begins at the last block


def test_a_copy_drops_what_the_original_drops() -> None:
    masks, _, model = played(0, 1, 2, EVEN, sequence=False)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # the copy does not run the original's layers
    found = masks_of(copied, 0, 1, 2, EVEN, sequence=False)[0]
    assert all(map(torch.equal, found, masks))


@contextmanager
def common_stream_untouched() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def test_eval_and_meta_draw_nothing() -> None:
    model = played(0, 0, 2, EVEN, sequence=False)[2]
    on_meta = copy.deepcopy(model).to("meta")
    with common_stream_untouched():
        on_meta.embedded(torch.ones(2, 2, device="meta"))
        on_meta.blocks[0].mlp.up(torch.ones(2, 8, device="meta"))
    model.eval()
    with common_stream_untouched():
        model(torch.ones(BATCH, 8, 8), slice(None))


def test_after_an_exception_the_common_stream_goes_on() -> None:
    model = played(0, 0, 2, EVEN, sequence=False)[2]
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    drawn_once = torch.get_rng_state()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError):
        model.blocks[0](torch.ones(BATCH, 4, 5), slice(None), 4)  # 5 features of 8
    assert torch.equal(torch.get_rng_state(), drawn_once)
    again = masks_of(model, 0, 0, 2, EVEN, sequence=False)[0]
    assert all(map(torch.equal, again, played(0, 0, 2, EVEN, sequence=False)[0]))


class _Wholes(nn.Module):
    """A block with layers that are given whole features."""

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.up, self.gathered, self.down = (nn.Linear(8, 8) for _ in range(4))
        self.whole = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(1 + self.latent(x).sigmoid(), 0.5)
        x = F.dropout(1 + self.up(x).sigmoid(), 0.5)
        x = F.dropout(1 + self.gathered(x).sigmoid(), 0.5)
        x = F.dropout(1 + self.down(x).sigmoid(), 0.5)
        return F.dropout(1 + self.whole(1 + x).sigmoid(), 0.5)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole sequences", "sp"])
def test_whole_features_have_one_mask_on_all_ranks_that_have_the_tokens(sequence: bool) -> None:
    row = DimSharding("row", (((0, 8),), ((8, 16),)))
    layers = (
        LayerSharding("0.latent", Style.MLA_LATENT, inp=row),
        LayerSharding("0.up", Style.COLUMN),
        LayerSharding("0.gathered", Style.COLUMN, gathers=True),
        LayerSharding("0.down", Style.ROW, splits=True),
        LayerSharding("0.whole", Style.REPLICATE, inp=row, out=row),
    )
    found = {}
    for place in itertools.product(range(2), range(2)):
        model = nn.Sequential(_Wholes())
        plan = TPPlan(2, 2, layers)
        install_rng_streams(
            model, list(model), plan, {"row": place[0], "col": place[1]}, sequence=sequence, device=CPU
        )
        torch.manual_seed(5)
        with watched() as masks:
            model(torch.ones(4, 16, 8))
        found[place] = masks
    tokens, stream = ((1,), (0, 1)) if sequence else ((), (0,))
    for one, other in itertools.combinations(found, 2):
        for number, axes in enumerate((tokens, (1,), tokens, stream, tokens, stream)):
            is_same = all(one[axis] == other[axis] for axis in axes)
            assert torch.equal(found[one][number], found[other][number]) == is_same, (number, one, other)


class _Experts(nn.Module):
    """A region with experts, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = nn.Sequential(nn.Identity(), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.moe(x) + 1, 0.5)


def test_a_region_after_experts_has_full_sequences() -> None:
    found = []
    for col in range(2):
        model = nn.Sequential(_Experts())
        plan = TPPlan(1, 2, (LayerSharding("0.moe.0", Style.EXPERTS),), regions=("0.moe",))
        install_rng_streams(model, list(model), plan, {"row": 0, "col": col}, sequence=True, device=CPU)
        torch.manual_seed(5)
        with watched() as masks:
            model(torch.ones(4, 16, 8))
        found.append(masks)
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])


# --- transformers' own models


def living(config: dict[str, Any]) -> nn.Module:
    tokens = {"vocab_size": 31, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    on_meta = causal_lm_on_meta({**tokens, **config})
    return AutoModelForCausalLM.from_config(on_meta.config).train()


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}
BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_head": 2, "n_layer": 2, "attention_dropout": 0.1}
OPT = {
    "model_type": "opt",
    "hidden_size": 16,
    "ffn_dim": 32,
    "word_embed_proj_dim": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
}
NAMES = {
    "gpt2": (("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj"), ("attn", "mlp")),
    "bloom": (
        ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
        ("self_attention.dense", "mlp.dense_4h_to_h"),
        ("self_attention", "mlp"),
    ),
    "opt": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
        ("self_attn.out_proj", "fc2"),
        ("self_attn", "fc1", "fc2"),
    ),
}


def plan_of_hf(model: nn.Module, kind: str) -> TPPlan:
    columns, rows, regions = NAMES[kind]
    layers, places = [], []
    for block, _ in blocks_of(model):
        layers += [LayerSharding(f"{block}.{name}", Style.COLUMN) for name in columns]
        layers += [LayerSharding(f"{block}.{name}", Style.ROW) for name in rows]
        places += [f"{block}.{name}" for name in regions]
    return TPPlan(1, 2, tuple(layers), regions=tuple(places))


@pytest.mark.parametrize("how", ["none", "full"])
@pytest.mark.parametrize("config", [GPT2, BLOOM, OPT], ids=NAMES)
def test_hf_models_drop_alike_in_the_stream_and_apart_in_the_heads(config: dict[str, Any], how: str) -> None:
    """Their code drops the stream inside of attention and mlp too, where it is the same on all columns."""
    masks = []
    for col in range(2):
        model = living({**config, "hidden_dropout": 0.1, "attn_implementation": "eager"})
        plan, blocks = plan_of_hf(model, config["model_type"]), [block for _, block in blocks_of(model)]
        install_rng_streams(model, blocks, plan, {"row": 0, "col": col}, sequence=False, device=CPU)
        recompute_blocks(blocks, how)
        torch.manual_seed(2)
        with watched() as found:
            logits = model(input_ids=torch.arange(24).reshape(2, 12), use_cache=False).logits
            logits.sum().backward()
        masks.append(found)
    assert len(masks[0]) >= 6
    for one, other in zip(*masks, strict=True):
        is_attention = one.shape[-1] == 12  # (..., S, S)
        assert agree(one, other) == (not is_attention), one.shape


@pytest.mark.parametrize(
    ("changes", "is_wrapped"),
    [
        ({"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "summary_first_dropout": 0.0}, False),
        ({"attn_pdrop": 0.1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "summary_first_dropout": 0.0}, True),
    ],
)
def test_modules_without_dropout_are_not_changed(changes: dict[str, float], is_wrapped: bool) -> None:
    model = living({**GPT2, **changes})
    blocks = [block for _, block in blocks_of(model)]
    install_rng_streams(
        model, blocks, plan_of_hf(model, "gpt2"), {"row": 0, "col": 1}, sequence=False, device=CPU
    )
    assert any("forward" in vars(module) for module in model.modules()) == is_wrapped


def test_a_single_rank_drops_as_without_tensor_parallelism() -> None:
    model = _Model(8, 8)
    install_rng_streams(
        model, list(model.blocks), plan_of(1, 1), {"row": 0, "col": 0}, sequence=False, device=CPU
    )
    assert not any("forward" in vars(module) for module in model.modules())
