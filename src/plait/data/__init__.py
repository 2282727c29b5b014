"""Text in, batches out: sources, tokenizer, token files, sample order, loader.

sources.py    what a recipe's `sources` mean: files, and the shards they are cut into
reading.py    a shard as documents, streamed in pieces of about a megabyte
tokenizer.py  train, take over, save and load a tokenizer
index.py      what stands in index.json, and how it is written and read
parts.py      one shard -> one pair of token files and a record
processes.py  many shards, in this process or in several
build.py      all shards -> a directory of tokens; restartable
store.py      a directory of tokens, checked, as two streams
order.py      which sample comes when: a pure function of (seed, epoch, sample number)
loader.py     a stream and an order as a torch DataLoader
"""

from plait.data.build import build
from plait.data.config import DataConfig, TokenizerConfig
from plait.data.dataset import TokenStore, TokenStream, check_sequence, open_store
from plait.data.loader import Windows, check_samples, loader
from plait.data.sampler import Permutation, SampleOrder
from plait.data.tokenizer import load_tokenizer

__all__ = [
    "DataConfig",
    "Permutation",
    "SampleOrder",
    "TokenStore",
    "TokenStream",
    "TokenizerConfig",
    "Windows",
    "build",
    "check_samples",
    "check_sequence",
    "load_tokenizer",
    "loader",
    "open_store",
]
