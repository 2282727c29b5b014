"""The head's operator against full logits: peak memory and processor time of a step, by vocabulary.

    python benchmarks/head.py [--vocabularies 8192 131072] [--json FILE]

One rank, one thread, a Llama of two layers. With full logits, the same loss is a function of the user's, by
torch. Half of the targets are ignored in the cases "masked". The two take turns. Memory: all that the step's
operations allocate, and the largest sum of it that is alive at once.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import common
import plait
from plait.bench.report import machine
from plait.comm import World

FULL, OURS = "full logits", "plait's head"
LENGTH = 256


class PeakBytes(TorchDispatchMode):
    """Largest sum of bytes of the storages that operations have allocated and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {held.cdata for held in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        for leaf in tree_leaves(result):
            for held in _storages(leaf):
                if held.cdata not in given:
                    self.alive[held.cdata] = held, leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def _storages(tree: Any) -> list[StorageWeakRef]:
    """Those of dense tensors: the values of a sparse one, a gradient, are another tensor's."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    counted = [tensor for tensor in tensors if not (tensor.is_meta or tensor.is_sparse)]
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in counted]


def full_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["labels"][:, 1:].flatten()
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[8192, 131072])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    smallest: dict[str, Any] = {"vocabularies": [256], "hidden": 32, "sequences": 1, "rounds": 1}
    arguments = common.parse(parser, **smallest)
    torch.set_num_threads(1)
    rows: list[common.Row] = []
    for vocabulary in arguments.vocabularies:
        for precision in arguments.precisions:
            rows += case(vocabulary, precision, arguments)
    common.report("a head's step, one rank, one thread, processor time", rows, machine(), arguments.json)


def case(vocabulary: int, precision: str, arguments: Any) -> list[common.Row]:
    sizes = {"hidden_size": arguments.hidden, "intermediate_size": 2 * arguments.hidden}
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=2, num_attention_heads=4, **sizes)
    engines = {}
    for name, loss in ((FULL, full_loss), (OURS, None)):
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        options: dict[str, Any] = {"optimizer": torch.optim.SGD, "loss": loss}
        world = World.alone(torch.device("cpu"))
        engines[name] = plait.parallelize(model, f"dp=1 precision={precision}", world=world, **options)
    ids = torch.randint(0, vocabulary, (arguments.sequences, LENGTH))
    masked = ids.masked_fill(torch.arange(LENGTH) < LENGTH // 2, -100)
    rows = []
    for labels, words in ((ids, ""), (masked, ", masked")):
        batch, times, peaks = {"input_ids": ids, "labels": labels}, dict[str, list[float]](), dict[str, int]()
        for name in [*engines, *reversed(engines)] * (arguments.rounds + 1):
            begin = time.process_time()
            engines[name].step(batch)
            times.setdefault(name, []).append(time.process_time() - begin)
        for name, engine in engines.items():
            with PeakBytes() as bytes_:
                engine.step(batch)
            peaks[name], times[name] = bytes_.peak, times[name][2:]  # without the first round
        title = f"{vocabulary:,}, {precision}{words}"
        for row, name in zip(common.rows(title, times, yardstick=FULL, peers=[FULL]), times, strict=True):
            rows.append({**row, "peak MiB": round(peaks[name] / 2**20, 1)})
    return rows


if __name__ == "__main__":
    main()
