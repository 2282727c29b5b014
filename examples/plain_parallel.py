"""A residual network learns what another one says: plain PyTorch on one device in `plain_one_device.py`,
the same numbers under any plan in `plain_parallel.py`."""

import argparse

import plait
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--plan", default="dp=1")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width, depth, classes):
        super().__init__()
        self.inner = nn.Linear(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.outer = nn.Linear(width, classes)

    def forward(self, x):
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.outer(x)


def summed_loss(outputs, batch):
    """Over the batch's targets, and how many they are."""
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(batch["labels"])


torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)).requires_grad_(False)
model = Net(width=64, depth=6, classes=8)

adamw = {"lr": 1e-3, "weight_decay": 0.1}
engine = plait.parallelize(model, args.plan, loss=summed_loss, optimizer_args=adamw, clip_norm=1.0)

for step in range(1, args.steps + 1):
    x = torch.randn(64, 16)
    batch = {"x": x, "labels": teacher(x).argmax(-1)}
    share = {key: value[engine.data_rank :: engine.data_ranks] for key, value in batch.items()}
    loss = engine.step(share).loss
    if step % 5 == 0 and engine.world.rank == 0:
        print(f"step {step:3}  loss {loss:.6f}", flush=True)
