"""DDP's step taken apart on ranks: all of them find the same, buckets are as asked, wrong sums are found."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.bench.ddp import BenchModel, Breakdown, measure_ddp, wrap_ddp
from plait.bench.request import DdpRequest, parse_caps
from plait.comm import connect
from plait.errors import CommError
from support.pool import Pool, RankError

SHORT = DdpRequest(parse_caps("one,each,64K"), model="tiny", sequences=1, length=8, rounds=2)


def _measured(request: DdpRequest) -> Breakdown:
    return measure_ddp(connect(transport="host"), request)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_variant_is_measured_with_its_buckets_and_all_ranks_find_the_same(
    pool: Pool, precision: str
) -> None:
    request = DdpRequest(SHORT.caps, "both", "tiny", precision, 1, 8, 2)
    found, other = pool.run(_measured, 2, request)
    assert other.bars == found.bars
    assert [(bar.transport, bar.cap) for bar in found.bars] == [*request.variants]
    for one, each, some in (found.bars[:3], found.bars[3:]):
        assert (one.num_buckets, each.num_buckets) == (1, 21)  # the model has 21 parameters
        assert 1 < some.num_buckets < 21
        assert one.ratio_to_no_overlap == 1.0
    for bar in found.bars:
        parts = bar.phases
        assert all(0 < part < 30 for part in (parts.forward_s, parts.backward_s, parts.optimizer_s))
        assert bar.step_s > 0


def _unreduced(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _checked(reduced: bool) -> None:
    world = connect(transport="host")
    trainee = BenchModel(world, SHORT)
    module = wrap_ddp(trainee.view_model(), None, "group")
    if not reduced:
        module.register_comm_hook(None, _unreduced)
    trainee.check(module, "one bucket")


def test_a_variant_that_does_not_average_gradients_is_found_before_it_is_timed(pool: Pool) -> None:
    pool.run(_checked, 2, True)
    with pytest.raises(RankError) as caught:
        pool.run(_checked, 2, False)
    assert "gradients are not averaged" in str(caught.value)
    assert isinstance(caught.value.failures[0].exception, CommError)


def _trained() -> tuple[Tensor, Tensor, bool]:
    world = connect(transport="host")
    trainee = BenchModel(world, SHORT)
    twins = [wrap_ddp(trainee.view_model(), cap, "group") for cap in (None, 1)]
    before = next(trainee.model.parameters()).detach().clone()
    trainee.visit(twins[0], compute_first=True)
    after = [next(module.parameters()).detach() for module in (trainee.model, *twins)]
    is_shared = all(torch.equal(after[0], other) for other in after)
    return before, after[0].clone(), is_shared


def test_a_visit_trains_the_weights_that_all_variants_share(pool: Pool) -> None:
    (before, after, is_shared), (_, other, _) = pool.run(_trained, 2)
    assert is_shared
    assert not torch.equal(before, after)
    assert torch.equal(after, other)
