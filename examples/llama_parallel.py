"""A small Llama learns to write Python, byte by byte: plain PyTorch on one device in `llama_one_device.py`,
the same numbers under any plan in `llama_parallel.py`."""

import argparse
import textwrap
from pathlib import Path

import plait
import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--plan", default="dp=1")
args = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=4)
config.num_attention_heads = config.num_key_value_heads = 4
model = LlamaForCausalLM(config)

matrices = [p for p in model.parameters() if p.ndim > 1]
vectors = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
adamw = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
engine = plait.parallelize(model, args.plan, param_groups=groups, optimizer_args=adamw, clip_norm=1.0)

text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
for step in range(1, args.steps + 1):
    starts = torch.randint(len(text) - 64, (16, 1))
    ids = text[starts + torch.arange(64)]
    batch = {"input_ids": ids, "labels": ids}
    share = {key: value[engine.data_rank :: engine.data_ranks] for key, value in batch.items()}
    loss = engine.step(share).loss
    if step % 5 == 0 and engine.world.rank == 0:
        print(f"step {step:3}  loss {loss:.6f}", flush=True)
