"""Be a rank of TRL's SFTTrainer, as its users run it, to compare ours with: `sft.py` starts it by torchrun,
with the Python in which TRL is installed.

    torchrun --nproc-per-node 2 benchmarks/trl_peer.py FOLDER OUT --batch 8 --length 256 --steps 20 [--packed]

FOLDER has a Hugging Face model with a chat template, and chats.jsonl. OUT gets JSON: the ends of steps,
their targets, the mean loss, and whether the documents of a packed row are separate.

Defaults are TRL's, among them bfloat16 autocast and its fused head, but for: activations are not recomputed,
samples come in the order of the file, and nothing is logged until the end.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import load_dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

MASKS = ("input_ids", "position_ids", "attention_mask")  # of which a forward pass depends on a CPU


class Clock(TrainerCallback):
    """Wall and processor seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))


class Counting(SFTTrainer):
    """Counts the targets of this rank's micro-batches."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.targets = [*getattr(self, "targets", []), int((inputs["labels"] != -100).sum())]
        return super().compute_loss(model, inputs, *args, **kwargs)


def separates(trainer: SFTTrainer) -> bool:
    """True if another first document of a batch leaves the logits of the others as they are."""
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten()
    inputs = {name: batch[name] for name in MASKS if name in batch}
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    with torch.no_grad():
        before = model(**inputs).logits
        inputs["input_ids"][0, : starts[1]] = 7
        after = model(**inputs).logits
    model.train()
    return bool(torch.equal(before[0, starts[1] :], after[0, starts[1] :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--packed", action="store_true")
    words = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    trainer = Counting(
        model=str(words.folder),
        processing_class=AutoTokenizer.from_pretrained(words.folder),
        train_dataset=load_dataset("json", data_files=str(words.folder / "chats.jsonl"), split="train"),
        callbacks=[clock],
        args=SFTConfig(
            output_dir=str(words.folder / "out"),
            per_device_train_batch_size=words.batch,
            max_length=words.length,
            max_steps=words.steps,
            packing=words.packed,
            assistant_only_loss=True,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            learning_rate=1e-4,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    is_separate = separates(trainer) if words.packed else None
    loss = torch.tensor(trainer.train().training_loss)  # of this rank's share
    targets = torch.tensor(trainer.targets)
    ends = torch.tensor(clock.ends, dtype=torch.float64)
    for value in (loss, targets, ends):
        dist.all_reduce(value)
    if dist.get_rank() == 0:
        mean = loss.item() / dist.get_world_size()
        found = {"ends": ends.tolist(), "targets": targets.tolist(), "loss": mean, "separate": is_separate}
        words.out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # a rank that destroys its group after the other one has left may hang


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
