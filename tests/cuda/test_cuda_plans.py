"""Plans on CUDA ranks: the CPU ranks' numbers, ordered streams, few host syncs, no memory kept back."""

from dataclasses import replace
from pathlib import Path

import pytest

from support import cuda_steps
from support.cuda_checks import Case, check
from support.pool import Pool

DEEP = {"build": cuda_steps.deep_llama}  # four blocks
MIXTURE = {"build": cuda_steps.small_mixture}
IDLE = {"build": cuda_steps.idle_mixture}

CASES = [
    # ZeRO
    Case(2, "dp=2 zero=0 micro=2 precision=bf16", syncs=1),
    Case(2, "dp=2 zero=1 micro=2 recompute=selective precision=bf16", syncs=1),
    Case(2, "dp=2 zero=2 micro=2 recompute=full precision=bf16", syncs=1),
    Case(2, "dp=2 zero=3 micro=2 precision=bf16", syncs=1),
    # Two micro-batches: outputs of recomputed blocks are compared, on the host, in their first four passes.
    Case(2, "dp=2 zero=3 micro=2 recompute=full prefetch=2 precision=fp64", syncs=1),
    Case(4, "dp=4 shard=2 zero=3 micro=3 precision=bf16", syncs=1),
    Case(4, "dp=4 shard=2 zero=1 precision=bf16", syncs=1),
    # offload, precision, narrow gradients
    Case(2, "dp=2 zero=3 micro=2 offload=cpu precision=bf16", syncs=2),
    Case(1, "dp=1 zero=1 offload=cpu precision=bf16", syncs=6),
    Case(2, "dp=2 zero=3 precision=fp16", syncs=1),
    Case(2, "dp=2 zero=2 reduce=bf16 precision=bf16", syncs=1),
    Case(2, "dp=2 zero=1 reduce=int8 precision=bf16", syncs=1),
    Case(2, "dp=2 reduce=powersgd precision=bf16", syncs=1),
    # tensor parallelism
    Case(2, "tp=2 sp=true micro=2 precision=bf16", syncs=1),
    Case(4, "dp=2 tp=2 zero=3 precision=bf16", syncs=1),
    # context parallelism
    Case(2, "cp=2 zero=2 micro=2 precision=bf16", syncs=1),
    Case(4, "dp=2 cp=2 cp_method=ulysses zero=3 micro=2 recompute=full precision=bf16", syncs=1),
    # A ring's keys must come under one product: as many CTAs as NCCL takes.
    Case(4, "cp=4 cp_method=2x2 zero=1 precision=bf16", syncs=1, message_ctas=64),
    Case(2, "cp=2 cp_method=ring micro=2 recompute=full precision=bf16", syncs=1, message_ctas=64),
    # expert parallelism: a wait for counts in each forward of two layers, and of recompute;
    # rows in as many CTAs as NCCL takes
    Case(2, "dp=2 ep=2 zero=1 micro=2 precision=bf16", syncs=5, message_ctas=64, options=MIXTURE),
    Case(4, "dp=4 ep=2 zero=3 micro=3 recompute=full precision=bf16", 13, message_ctas=64, options=MIXTURE),
    Case(4, "dp=4 ep=2 zero=1 precision=fp32", syncs=3, message_ctas=64, options=IDLE),
    Case(4, "dp=2 ep=2 tp=2 sp=true zero=1 precision=bf16", syncs=3, message_ctas=64, options=MIXTURE),
    Case(4, "dp=2 ep=2 pp=2 micro=2 precision=fp32", syncs=3, message_ctas=64, options=MIXTURE),
    # With a capacity, one wait for shapes in a step, and none in forwards
    Case(2, "dp=2 ep=2 capacity=1 zero=1 micro=2 precision=bf16", 2, message_ctas=64, options=MIXTURE),
    Case(
        4, "dp=4 ep=2 capacity=1.5 micro=3 recompute=full precision=fp32", 2, message_ctas=64, options=MIXTURE
    ),
    Case(4, "dp=2 ep=2 tp=2 capacity=1.5 precision=fp32", 2, message_ctas=64, options=MIXTURE),
    # pipelines
    Case(2, "pp=2 micro=4 schedule=1f1b precision=bf16", syncs=1),
    Case(2, "pp=2 micro=4 schedule=zb-h1 precision=bf16", syncs=1, options=DEEP),
    Case(2, "pp=2 micro=4 chunks=2 schedule=zbv precision=bf16", syncs=1, options=DEEP),
    Case(2, "pp=2 micro=4 chunks=2 schedule=interleaved precision=bf16", syncs=1, options=DEEP),
    Case(4, "pp=2 dp=2 micro=2 zero=1 precision=bf16", syncs=1, options=DEEP),
    Case(3, "pp=3 micro=3 precision=bf16", syncs=1, options=DEEP),
    Case(4, "pp=4 micro=4 schedule=zb-h1 precision=bf16", syncs=1, options=DEEP),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_are_ordered_and_results_are_those_of_the_cpu(pool: Pool, case: Case) -> None:
    check(pool, case)


# Weights that are not in host memory are copied to the device in blocks of the files, which blocks the host.
ON_DISK = [
    Case(1, "dp=1 zero=3 offload=disk precision=bf16", syncs=2),
    Case(2, "dp=2 zero=3 micro=2 offload=disk optim_dtype=bf16 precision=bf16", syncs=2),
    Case(2, "dp=2 zero=2 micro=2 offload=disk precision=bf16", syncs=20),
    Case(2, "dp=2 zero=1 offload=disk precision=fp32", syncs=8),
]


@pytest.mark.parametrize("case", ON_DISK, ids=str)
def test_states_on_disk_train_gpus_as_they_train_cpus(pool: Pool, case: Case, tmp_path: Path) -> None:
    check(pool, replace(case, options={"offload_dir": tmp_path}))
