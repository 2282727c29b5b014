"""A small Llama learns to write Python, byte by byte: plain PyTorch on one device in `llama_one_device.py`,
the same numbers under any plan in `llama_parallel.py`."""

import argparse
import textwrap
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=4)
config.num_attention_heads = config.num_key_value_heads = 4
model = LlamaForCausalLM(config)

matrices = [p for p in model.parameters() if p.ndim > 1]
vectors = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
adamw = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
optimizer = torch.optim.AdamW(groups, **adamw)

text = torch.tensor(list(Path(textwrap.__file__).read_bytes()))
for step in range(1, args.steps + 1):
    starts = torch.randint(len(text) - 64, (16, 1))
    ids = text[starts + torch.arange(64)]
    batch = {"input_ids": ids, "labels": ids}
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:3}  loss {loss:.6f}", flush=True)
