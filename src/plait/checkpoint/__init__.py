"""Checkpoints: boxes of full tensors in safetensors files with a JSON manifest; complete, or ignored.

manifest.py            the contents of a checkpoint, and their validation
saver.py               saving by all ranks, in the foreground or in the background
writer.py              a rank's files
reader.py              reading under any plan, each byte once
checkpoint.py          opening a checkpoint
directory.py           atomic completion, and which checkpoints are retained
diff.py                the contents of a checkpoint, and the differences between two
safetensors_format.py  the header of a safetensors file
huggingface.py         Hugging Face directories: reading and writing
compress.py            their compressed weights: quantized, pruned
adapter_files.py       PEFT's files of an adapter
base.py                the base model of adapters: its identity, and adapters merged into it
"""

from plait.checkpoint.checkpoint import Checkpoint, is_damaged, newest, open_checkpoint
from plait.checkpoint.diff import compare, find_checkpoints
from plait.checkpoint.directory import Keep, best, remove_after, step_of, step_path, steps
from plait.checkpoint.huggingface import SHARD_BYTES, HuggingFaceFiles, checkpoint_weights, write_hugging_face
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.reader import Reader
from plait.checkpoint.saver import Saver, staged_bytes

__all__ = [
    "MANIFEST",
    "SHARD_BYTES",
    "Checkpoint",
    "HuggingFaceFiles",
    "Keep",
    "Reader",
    "Saver",
    "best",
    "checkpoint_weights",
    "compare",
    "find_checkpoints",
    "is_damaged",
    "newest",
    "open_checkpoint",
    "remove_after",
    "staged_bytes",
    "step_of",
    "step_path",
    "steps",
    "write_hugging_face",
]
