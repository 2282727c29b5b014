"""Checkpoints: boxes of full tensors in safetensors files with a JSON manifest; complete, or ignored.

manifest.py            the contents of a checkpoint, and their validation
saver.py               saving by all ranks, in the foreground or in the background
writer.py              a rank's files
reader.py              reading under any plan, each byte once
crc32.py               checksums of data of which several ranks each read a part
checkpoint.py          opening a checkpoint
directory.py           atomic completion, and which checkpoints are retained
diff.py                the contents of a checkpoint, and the differences between two
safetensors_format.py  the header of a safetensors file
huggingface.py         Hugging Face directories: reading and writing
"""

from plait.checkpoint.checkpoint import Checkpoint, is_damaged, newest, open_checkpoint, open_on_all_ranks
from plait.checkpoint.diff import (
    Comparison,
    Contents,
    VerifyResult,
    compare,
    find_checkpoints,
    verify_checkpoint,
)
from plait.checkpoint.directory import Keep, best, remove_after, remove_partial, step_of, step_path, steps
from plait.checkpoint.huggingface import SHARD_BYTES, HuggingFaceFiles, write_hugging_face
from plait.checkpoint.manifest import MANIFEST, Chunk, FileFacts, Manifest, RankFiles, TensorFacts
from plait.checkpoint.reader import Reader
from plait.checkpoint.saver import Saver, staged_bytes

__all__ = [
    "MANIFEST",
    "SHARD_BYTES",
    "Checkpoint",
    "Chunk",
    "Comparison",
    "Contents",
    "FileFacts",
    "HuggingFaceFiles",
    "Keep",
    "Manifest",
    "RankFiles",
    "Reader",
    "Saver",
    "TensorFacts",
    "VerifyResult",
    "best",
    "compare",
    "find_checkpoints",
    "is_damaged",
    "newest",
    "open_checkpoint",
    "open_on_all_ranks",
    "remove_after",
    "remove_partial",
    "staged_bytes",
    "step_of",
    "step_path",
    "steps",
    "verify_checkpoint",
    "write_hugging_face",
]
