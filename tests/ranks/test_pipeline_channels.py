"""Channels between two ranks: senders do not wait, tensors come in order, outputs arrive unchanged."""

import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers.modeling_outputs import BaseModelOutput

from plait.comm import Group, World, barrier, connect, shares_memory, start_receive, start_send
from plait.errors import CommError, ModelError
from plait.parallel.pipeline.executor import StageInput
from plait.parallel.pipeline.p2p import Inbox, Outbox
from plait.parallel.pipeline.serialize import TensorSpec, pack, unpack
from support.pool import Pool, RankError, Ranks

CPU = torch.device("cpu")
MB = 1 << 18  # float32


@pytest.fixture(scope="module", params=["host", "gloo"])
def ranks(pool: Pool, request: pytest.FixtureRequest) -> Ranks:
    return pool.over(request.param)


def _lane(world: World, name: str = "activations") -> Group:
    return world.new_group((0, 1), name)


def _in_flight_bytes(outbox: Outbox) -> int:
    """Bytes of sends that had not completed at the last poll."""
    return sum(tensor.nbytes for _, tensor in outbox._in_flight)


def _until(is_true: Callable[[], bool], most_s: float = 10.0) -> None:
    end_s = time.monotonic() + most_s
    while not is_true():
        assert time.monotonic() < end_s, "it does not come true"
        time.sleep(0.001)


# --- what a pending communication says of itself


def _questions() -> tuple[bool, bool]:
    """The answers before the receiver posts, and at the end."""
    world = connect()
    lane = _lane(world)
    if world.rank == 0:
        pending = start_send(torch.arange(float(MB)), lane, 1)
        for _ in range(20):
            early = pending.is_done()
            time.sleep(0.01)
        barrier(world.group)
        _until(pending.is_done)
        pending.wait()
        return early, pending.is_over
    found = torch.zeros(MB)
    barrier(world.group)
    pending = start_receive(found, lane, 0)
    _until(pending.is_done)
    assert torch.equal(found, torch.arange(float(MB)))  # no rank has waited
    pending.wait()
    return False, pending.is_over


def test_completion_of_a_message_can_be_polled(ranks: Ranks) -> None:
    assert ranks.run(_questions, 2) == [(False, True)] * 2


# --- senders do not wait


def _burst() -> tuple[float, int]:
    """50 MB go to a receiver that posts nothing until the sender has computed on."""
    world = connect()
    lane = _lane(world)
    if world.rank == 0:
        outbox = Outbox(lane, device=CPU)
        messages = [torch.full((MB,), float(number)) for number in range(50)]
        begin_s = time.monotonic()
        for message in messages:
            outbox.send_tensors([message])
        took_s = time.monotonic() - begin_s
        assert bool((messages[0] @ messages[1] == 0).item())
        allocated_bytes = _in_flight_bytes(outbox)
        barrier(world.group)
        _until(outbox._in_flight[-1][0].is_done)
        outbox.release_sent()  # once, and all is let go
        assert _in_flight_bytes(outbox) == 0
        return took_s, allocated_bytes
    inbox = Inbox(lane, device=CPU)
    barrier(world.group)
    posted = [inbox.post([TensorSpec((MB,), torch.float32)]) for _ in range(50)]
    for number, message in enumerate(posted):
        assert bool((message.wait()[0] == number).all()), f"message {number}"
    return 0.0, 0


def test_a_sender_computes_on_while_its_receiver_has_posted_nothing(ranks: Ranks) -> None:
    took_s, allocated_bytes = ranks.run(_burst, 2)[0]
    assert took_s < 5
    assert allocated_bytes >= 49 << 20  # a transport that buffers took at most one


def _both_send_first() -> None:
    """Two ranks send to each other before either posts: they would hang if a send waited for its receiver."""
    world = connect()
    other = 1 - world.rank
    out, back = _lane(world, "0 to 1"), _lane(world, "1 to 0")
    outbox = Outbox(out if world.rank == 0 else back, device=CPU)
    inbox = Inbox(back if world.rank == 0 else out, device=CPU)
    for turn in range(10):
        for number in range(3):
            outbox.send_tensors([torch.full((MB,), 10.0 * turn + number + 100 * world.rank)])
        for number in range(3):
            [found] = inbox.post([TensorSpec((MB,), torch.float32)]).wait()
            assert bool((found == 10 * turn + number + 100 * other).all())
    outbox.drain()


def test_two_ranks_that_both_send_first_do_not_hang(ranks: Ranks) -> None:
    ranks.run(_both_send_first, 2)


def _memory() -> None:
    world = connect()
    lane = _lane(world)
    if world.rank == 0:
        outbox = Outbox(lane, device=CPU)
        array = np.ones((2 * MB,), dtype=np.float32)
        memory = weakref.ref(array)
        outbox.send_tensors([torch.from_numpy(array)])
        del array
        outbox.release_sent()
        # What the transport reads: a copy in memory that ranks share, else the tensor itself.
        assert (memory() is None) == shares_memory(lane)
        assert _in_flight_bytes(outbox) == 8 * MB
        barrier(world.group)

        def is_gone() -> bool:
            outbox.release_sent()
            return _in_flight_bytes(outbox) == 0

        _until(is_gone)
        _until(lambda: memory() is None)
        barrier(world.group)
        return
    inbox = Inbox(lane, device=CPU)
    barrier(world.group)
    [found] = inbox.post([TensorSpec((2 * MB,), torch.float32)]).wait()
    held = weakref.ref(found)
    del found
    assert held() is None  # no reference is left after the hand-over
    barrier(world.group)


def test_memory_is_freed_once_sent_without_waiting(ranks: Ranks) -> None:
    ranks.run(_memory, 2)


# --- outputs


def _outputs() -> dict[str, Any]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 3, 4)
    needs = torch.randn(2, 3, requires_grad=True)
    shared = torch.randn(5, dtype=torch.float64)
    return {
        "tensor": hidden,
        "strided": hidden.transpose(0, 2),
        "with gradient": needs * 2,
        "tuple": (hidden, None, needs.exp(), 3, "eager", 0.1, True),
        "nested": [{"hidden": (hidden, [needs * 3]), 7: None, "": []}, (), (hidden,)],
        "twice": (shared, {"again": shared}, shared.clone()),
        "empty": (torch.zeros(0, 4), hidden, torch.zeros(3, 0, dtype=torch.bfloat16)),
        "dtypes": [
            torch.arange(6).view(2, 3),
            torch.tensor(True),
            torch.randn(3).to(torch.bfloat16),
            torch.randn(3, dtype=torch.complex64),
            torch.arange(4, dtype=torch.int16),
            torch.tensor(2.5, dtype=torch.float64),
        ],
        "model output": BaseModelOutput(last_hidden_state=needs.sin(), hidden_states=(hidden, shared)),
        "no tensors": (None, 1, "x"),
    }


def _same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    (flat, structure), (theirs, their_structure) = tree_flatten(found), tree_flatten(expected)
    assert structure == their_structure
    for one, other in zip(flat, theirs, strict=True):
        if isinstance(other, Tensor):
            assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
            assert torch.equal(one, other)
            assert one.is_contiguous()
        else:
            assert type(one) is type(other)
            assert one == other


def _round_trip() -> list[tuple[int, int]]:
    """Every output three times, under a key of its own. Of each: descriptions waited for, gradients sent."""
    world = connect()
    lane, back = _lane(world), _lane(world, "gradients")
    inbox = Inbox(back if world.rank == 0 else lane, device=CPU)
    outbox = Outbox(lane if world.rank == 0 else back, device=CPU)
    notified = []
    for name, output in _outputs().items():
        parcel, tensors = pack(output)
        if world.rank == 0:
            for turn in range(3):
                outbox.send(name, parcel, tensors)
                gradients = inbox.post(parcel.grad_specs).wait()
                for gradient, tensor in zip(gradients, parcel.tensors_with_grad(tensors), strict=True):
                    assert torch.equal(gradient, tensor.detach() * (turn + 1))
            continue
        num_new = 0
        for turn in range(3):
            num_new += not inbox.has_description(name)
            found = inbox.describe(name)
            assert found == parcel
            arrival = StageInput(found, inbox.post(found.specs).wait())
            _same(unpack(found, arrival.tensors), output)
            for tensor in found.tensors_with_grad(arrival.tensors):
                torch.autograd.backward(tensor, tensor.detach() * (turn + 1))
            gradients = arrival.take_gradients()
            outbox.send_tensors(gradients)
        notified.append((num_new, len(gradients)))
    outbox.drain()
    return notified


def test_outputs_of_all_shapes_arrive_as_they_were_and_gradients_go_back(ranks: Ranks) -> None:
    num_gradients = {"with gradient": 1, "tuple": 1, "nested": 1, "model output": 1}
    assert ranks.run(_round_trip, 2)[1] == [(1, num_gradients.get(name, 0)) for name in _outputs()]


def _varying() -> list[float]:
    """Micro-batches of three lengths, in no order; all are posted before the first is used."""
    world = connect()
    lane = _lane(world)
    lengths = [5, 3, 5, 8, 3, 8, 5]
    if world.rank == 0:
        outbox = Outbox(lane, device=CPU)
        for number, length in enumerate(lengths):
            parcel, tensors = pack((torch.full((2, length), float(number)), torch.ones(length)))
            outbox.send(("ids", length), parcel, tensors)
        outbox.drain()
        return []
    inbox = Inbox(lane, device=CPU)
    posted = [inbox.post(inbox.describe(("ids", length)).specs) for length in lengths]
    received = [message.wait() for message in posted]
    assert [tuple(one.shape) for one, _ in received] == [(2, length) for length in lengths]
    return [one.mean().item() for one, _ in received]


def test_micro_batches_of_several_lengths_share_a_channel(ranks: Ranks) -> None:
    assert ranks.run(_varying, 2)[1] == [0, 1, 2, 3, 4, 5, 6]


def _gradients_of_unused() -> list[float]:
    parcel, tensors = pack((torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)))
    arrival = StageInput(parcel, [tensor.detach() for tensor in tensors])
    first, _ = arrival.tensors
    first += 1  # as a block may with what it is given
    first.square().sum().backward()
    return [gradient.sum().item() for gradient in arrival.take_gradients()]


def test_an_arrival_may_be_changed_in_place_and_unused_ones_have_zero_gradients() -> None:
    assert _gradients_of_unused() == [12.0, 0.0]


def test_an_arrival_without_gradients_records_nothing() -> None:
    parcel, tensors = pack((torch.ones(3), torch.arange(2)))
    assert not any(tensor.requires_grad for tensor in StageInput(parcel, tensors).tensors)


# --- errors


class _Unknown:
    pass


def test_unsendable_outputs_are_named_with_their_place() -> None:
    with pytest.raises(ModelError, match="h3 returns something that cannot be sent") as caught:
        pack((torch.ones(1), {"cache": [_Unknown()]}), source="h3")
    assert "output[1]['cache'][0] is a test_pipeline_channels._Unknown" in str(caught.value)
    with pytest.raises(ModelError, match=r"output\[0\] is a tensor with layout torch.sparse_coo"):
        pack([torch.ones(2).to_sparse()])


def _of_another_shape() -> str:
    world = connect()
    lane = _lane(world)
    outbox = Outbox(lane, device=CPU) if world.rank == 0 else None
    if outbox is None:
        inbox = Inbox(lane, device=CPU)
        inbox.post(inbox.describe("key").specs).wait()
        return ""
    outbox.send("key", *pack(torch.ones(2, 3)))
    outbox.drain()
    with pytest.raises(ModelError) as caught:
        outbox.send("key", *pack(torch.ones(2, 4)))
    with pytest.raises(ModelError, match="and not"):
        outbox.send("key", *pack((torch.ones(2, 3),)))
    return str(caught.value)


def test_an_output_whose_shape_depends_on_values_is_an_error(pool: Pool) -> None:
    message = pool.run(_of_another_shape, 2)[0]
    assert "depends on more than the shapes of its micro-batch" in message
    assert "given   : [2, 4] float32" in message
    assert "expected: [2, 3] float32" in message


# --- peers that die


def _peer_dies(sends: bool) -> None:
    world = connect()
    lane = _lane(world)
    barrier(world.group)
    if world.rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if not sends:
        Inbox(lane, device=CPU).post([TensorSpec((MB,), torch.float32)]).wait()
        return
    outbox = Outbox(lane, device=CPU)
    outbox.send_tensors([torch.ones(MB)])
    while True:  # it computes on
        time.sleep(0.01)
        outbox.release_sent()


@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
def test_calls_to_a_dead_rank_fail_within_seconds(ranks: Ranks, sends: bool) -> None:
    begin_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(_peer_dies, 2, sends)
    assert time.monotonic() - begin_s < 10
    [survivor] = [failure for failure in caught.value.failures if failure.rank == 0]
    assert isinstance(survivor.exception, CommError)
