"""Checkpoints: boxes of whole tensors in safetensors beside a JSON manifest; complete, verified, or ignored.

manifest.py   what a checkpoint holds and where, and what of that is believed
write.py      a rank's files
read.py       under any plan, each byte once     crc.py   checksums that are sums of readers' parts
saver.py      all ranks together, at once or behind the next steps
folder.py     how one becomes complete; which are kept     opened.py   one that is there
comparison.py what is in one, and what two differ in
header.py     of a safetensors file, ours or not           hugging_face.py   their directories, in and out
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
