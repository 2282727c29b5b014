"""Training data: sources, tokenizer, token files, sample order, loader.

config.py     the recipe's [data] and [tokenizer]
sources.py    a recipe's `sources`: files, and the shards they are split into
readers.py    documents of a shard, streamed in chunks of about a megabyte
tokenizer.py  train, import, save and load a tokenizer
index.py      index.json: contents, writing and reading
shards.py     one shard -> one pair of token files and a record
workers.py    many shards, in this process or in several
build.py      all shards -> a directory of tokens; restartable
dataset.py    a checked directory of tokens, as two streams
sampler.py    sample order: a pure function of (seed, epoch, sample number)
loader.py     samples and their order as a torch DataLoader
documents.py  samples that know where documents begin: one each, padded, or several packed into a row
packing.py    distribution of documents over rows and micro-batches
samples.py    the samples of a recipe's [data], and their order
"""
