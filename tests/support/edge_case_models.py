"""Small plain modules, each with one obstacle to sharding parameters or gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.comm import connect
from support import programs

WIDTH = 24


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, programs.VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(make: Callable[[], nn.Module], on_meta: bool) -> nn.Module:
    """Build a module with weights that differ between ranks: the engine must broadcast rank 0's."""
    assert not on_meta, "plain modules come with their weights"
    torch.manual_seed(5 + connect().rank)
    return make()


def uneven(on_meta: bool = False) -> nn.Module:
    """Units of very unequal size, none of which divides by 3 or 4."""
    return built(lambda: Stack([Block(inner) for inner in (3, 97, 8, 1)]), on_meta)


class Scale(nn.Module):
    """A block with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Shift(nn.Module):
    """A block with three elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


def tiny(on_meta: bool = False) -> nn.Module:
    """Units smaller than the shard degree."""
    return built(lambda: Stack([Block(8), Scale(), Shift(), Block(8)]), on_meta)


def frozen_blocks(on_meta: bool = False) -> nn.Module:
    """Only the second and fourth block, the norm and the head are trained."""

    def make() -> nn.Module:
        model = Stack([Block(16) for _ in range(4)])
        for module in (model.embedding, model.blocks[0], model.blocks[2]):
            module.requires_grad_(False)
        return model

    return built(make, on_meta)


class Adapted(Block):
    """A frozen block with a trained low-rank correction (LoRA)."""

    def __init__(self, inner: int, rank: int = 2) -> None:
        super().__init__(inner)
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, WIDTH) / WIDTH)
        self.b = nn.Parameter(torch.full((inner, rank), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x) + F.linear(F.linear(x, self.a), self.b)
        return x + self.down(torch.tanh(inner))


def adapted(on_meta: bool = False, inner: int = 96) -> nn.Module:
    """Everything is frozen except the corrections."""

    def make() -> nn.Module:
        model = Stack([Adapted(inner) for _ in range(3)])
        for module in (model.embedding, model.norm, model.head):
            module.requires_grad_(False)
        return model

    return built(make, on_meta)


def wide_adapted(on_meta: bool = False) -> nn.Module:
    """So wide that the padding of its units is below 2 %."""
    return adapted(on_meta, inner=2048)


def many_dtypes(on_meta: bool = False) -> nn.Module:
    """A unit with weights of three dtypes."""

    def make() -> nn.Module:
        model = Stack([Block(16) for _ in range(2)])
        for block in model.blocks:
            block.up.to(torch.bfloat16)
            block.down.weight.data = block.down.weight.data.float()
            block.down.bias.data = block.down.bias.data.double()
        return model

    return built(make, on_meta)


class Borrowed(Stack):
    """nanoGPT's weight tying: the embedding's weight is also the head, used outside of its module."""

    def __init__(self) -> None:
        super().__init__([Block(16) for _ in range(2)])
        del self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def borrowed(on_meta: bool = False) -> nn.Module:
    return built(Borrowed, on_meta)


class Reached(Stack):
    """The root's forward reads a weight from inside a block, before that block runs."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids) + self.blocks[1].down.bias
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def reached(on_meta: bool = False) -> nn.Module:
    return built(lambda: Reached([Block(16) for _ in range(3)]), on_meta)


class Disordered(nn.Module):
    """Registered in a different order from execution: head first, blocks reversed, embedding last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, programs.VOCABULARY)
        self.blocks = nn.ModuleList([Block(inner) for inner in (4, 8, 12, 16)])
        self.embedding = nn.Embedding(programs.VOCABULARY, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


def disordered(on_meta: bool = False) -> nn.Module:
    return built(Disordered, on_meta)


class Separate(nn.Module):
    """Blocks outside of any list: only parallelize's `blocks` identifies them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(programs.VOCABULARY, WIDTH)
        self.first, self.second, self.third = Block(12), Block(20), Block(12)
        self.head = nn.Linear(WIDTH, programs.VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(self.embedding(input_ids)))))


def separate(on_meta: bool = False) -> nn.Module:
    return built(Separate, on_meta)


def by_class(model: nn.Module) -> type[nn.Module]:
    return Block


def by_classes(model: nn.Module) -> tuple[type[nn.Module], ...]:
    return (Block, nn.Embedding)


def by_list(model: Any) -> list[nn.Module]:
    return [model.first, model.second, model.third]


class Skipping(Stack):
    """The second block is skipped in every other step, on all ranks."""

    def forward(self, input_ids: Tensor, number: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            if index != 1 or int(number[0]) % 2:
                x = block(x)
        return self.head(self.norm(x))


def skipping(on_meta: bool = False) -> nn.Module:
    return built(lambda: Skipping([Block(16) for _ in range(3)]), on_meta)


def numbered_batches(steps: int) -> list[dict[str, Tensor]]:
    """Batches with the step's number for every sequence."""
    numbers = (torch.full((programs.SEQUENCES,), step) for step in range(steps))
    return [{**b, "number": n} for b, n in zip(programs.batches(steps), numbers, strict=True)]


class Choosing(Stack):
    """The second block only runs for some sequences, which not every rank has."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            if index != 1 or int(input_ids[0, 0]) % 2:
                x = block(x)
        return self.head(self.norm(x))


def choosing(on_meta: bool = False) -> nn.Module:
    return built(lambda: Choosing([Block(16) for _ in range(3)]), on_meta)


def bare_linear(on_meta: bool = False) -> nn.Module:
    return built(lambda: nn.Linear(WIDTH, programs.VOCABULARY), on_meta)


def float_batches(steps: int) -> list[dict[str, Tensor]]:
    """The batches' labels, with random vectors as inputs."""
    generator = torch.Generator().manual_seed(13)
    shape = (programs.SEQUENCES, programs.LENGTH, WIDTH)
    return [
        {"input": torch.randn(shape, generator=generator, dtype=torch.float64), "labels": batch["labels"]}
        for batch in programs.batches(steps)
    ]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Param groups in torch's format: blocks have a lower learning rate and no weight decay."""
    inside = {
        name for name, _ in model.named_parameters() if ".layers." in name or name.startswith("blocks.")
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in named if name in inside], "lr": 1e-3, "weight_decay": 0.0},
        {"params": [p for name, p in named if name not in inside], "weight_decay": 0.3},
    ]


def interleaved_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Every third parameter in a group: no group is a whole unit or a contiguous part of one."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rates = (1e-3, 3e-3, 2e-3)
    return [
        {"params": parameters[place::3], "lr": lr, "weight_decay": 0.1 * place}
        for place, lr in enumerate(rates)
    ]


def hook_gradients(model: nn.Module) -> None:
    """Register user tensor hooks: they receive full gradients, and their results are used."""
    for index, (_, parameter) in enumerate(model.named_parameters()):
        if parameter.requires_grad and index % 2:
            parameter.register_hook(_GradientHook(index))


class _GradientHook:
    """Scales rows differently: on a shard of the gradient the result would differ."""

    def __init__(self, index: int) -> None:
        self._factor = 1.0 + index / 8

    def __call__(self, gradient: Tensor) -> Tensor:
        rows = torch.linspace(1.0, self._factor, len(gradient), dtype=gradient.dtype)
        return gradient * rows.view(-1, *[1] * (gradient.ndim - 1))
