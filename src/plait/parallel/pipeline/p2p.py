"""Channels: tensors from one rank to another, in order, one direction and one kind (activations, gradients).

    outbox.send(key, parcel, tensors)           # returns at once
    posted = inbox.post(inbox.parcel(key))      # buffers are here, the message is on its way
    tensors = posted.wait()

[Note: nobody waits to send]
A rank that waits until what it has sent is gone waits for a receiver who may be waiting for it: schedules
that are right would hang. So a send returns at once, whatever the transport, and the outbox holds the
tensors. At every later call it asks, without waiting, which of them are gone (`Work.is_done`) and lets go
of them. On CUDA it asks likewise: a stream would wait for the receiver just as a rank would.

[Note: descriptions travel once]
What a stage returns looks the same for all micro-batches that look the same. Both sides know a micro-batch's
key (the names, shapes and dtypes of its entries, and whether gradients are recorded); the first time that a
key comes to a channel, the sender says what the output is like before it sends it, and both remember.
"""

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, Work, empty, shares_memory, start_receive, start_send
from plait.errors import ModelError
from plait.parallel.pipeline.serialize import PackedOutput, TensorSpec

_LENGTH = torch.int64  # of the message before a description: its bytes
_POLL_INTERVAL_S = 50e-6


class Outbox:
    """The sender's end. See [Note: nobody waits to send]."""

    def __init__(self, group: Group, *, device: torch.device, label: str = "") -> None:
        """`group`: of two ranks, which nobody else talks on; both make their ends at the same point of the
        program. `label`: what travels here, for errors."""
        self._line = _Channel(group, device, label)
        self._held: deque[tuple[Work, Tensor]] = deque()  # the transport reads them
        self._known: dict[Hashable, PackedOutput] = {}
        if device.type == "cuda":
            self._send(_handshake(device))

    def send(self, key: Hashable, parcel: PackedOutput, tensors: Sequence[Tensor]) -> None:
        """Sends a stage's output, and what it is like if the receiver does not know yet.

        Tensors must not be changed afterwards. Raises ModelError if outputs of that key were different ones
        (see [Note: descriptions travel once]), CommError, as all of this class, if the receiver is lost.
        """
        known = self._known.get(key)
        if known is None:
            self._known[key] = parcel
            text = torch.frombuffer(bytearray(parcel.to_json().encode()), dtype=torch.uint8)
            self.send_tensors([torch.tensor([text.numel()], dtype=_LENGTH), text])
        elif known != parcel:
            raise ModelError(
                "a stage's output depends on more than the shapes of its micro-batch",
                given=f"{parcel}{_structures(parcel, known)}",
                expected=f"{known}, as for the micro-batches of the same shapes before it",
                hint="blocks whose outputs have shapes that follow from their inputs' shapes",
            )
        self.send_tensors(tensors)

    def send_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Sends tensors that the receiver knows how to post: gradients, whose specs are the outputs'."""
        self.sweep()
        for tensor in tensors:
            self._send(tensor.detach().to(self._line.device))

    def sweep(self) -> None:
        """Lets go of what is gone. Never waits."""
        while self._held and self._held[0][0].is_done():
            self._let_go()

    def drain(self) -> None:
        """Returns when all is gone: the receiver has it."""
        while self._held:
            if self._line.device.type == "cuda" and not self._held[0][0].is_done():
                time.sleep(_POLL_INTERVAL_S)  # a wait would be the stream's
            else:
                self._let_go()

    @property
    def allocated_bytes(self) -> int:
        """Of what was not gone yet when it was last asked."""
        return sum(tensor.nbytes for _, tensor in self._held)

    def _send(self, tensor: Tensor) -> None:
        if tensor.numel():
            line = self._line
            wire = _bytes_of(tensor.contiguous())
            if shares_memory(line.group):  # the receiver takes it from there at once, and the tensor is free
                wire = empty(wire.numel(), wire.dtype, line.device, line.group).copy_(wire)
            pending = start_send(wire, line.group, line.peer, label=line.label)
            pending.is_done()  # who is asked early (Gloo: a thread that waits) knows when `sweep` asks
            self._held.append((pending, wire))

    def _let_go(self) -> None:
        self._held[0][0].wait()
        self._held.popleft()


class Inbox:
    """The receiver's end."""

    def __init__(self, group: Group, *, device: torch.device, label: str = "") -> None:
        """As of `Outbox`. `device`: where what arrives is."""
        self._line = _Channel(group, device, label)
        self._known: dict[Hashable, PackedOutput] = {}
        self._greeted = self._post(_handshake(device)) if device.type == "cuda" else None

    def knows(self, key: Hashable) -> bool:
        """Whether `parcel` answers at once."""
        return key in self._known

    def parcel(self, key: Hashable) -> PackedOutput:
        """What outputs of that key are like. Waits for the sender's word if it is the first: all that was
        sent before it must have been posted. Raises CommError if the sender is lost."""
        if key not in self._known:
            length = int(self.post([TensorSpec((1,), _LENGTH)]).wait()[0])
            [text] = self.post([TensorSpec((length,), torch.uint8)]).wait()
            self._known[key] = PackedOutput.from_json(text.cpu().numpy().tobytes().decode())
        return self._known[key]

    def post(self, specs: Sequence[TensorSpec]) -> "PostedReceive":
        """Takes memory for the next tensors that are sent, which are those, and lets them come."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._line.device) for spec in specs]
        return PostedReceive(tensors, [self._post(tensor) for tensor in tensors if tensor.numel()])

    def _post(self, tensor: Tensor) -> Work:
        line = self._line
        return start_receive(_bytes_of(tensor), line.group, line.peer, label=line.label)


class PostedReceive:
    """Tensors that are on their way."""

    def __init__(self, tensors: list[Tensor], pendings: list[Work]) -> None:
        self._tensors: list[Tensor] | None = tensors
        self._pendings = pendings

    def wait(self) -> list[Tensor]:
        """Hands over the tensors, once, when they have arrived (on CUDA: the current stream waits). Raises
        CommError if the sender is lost."""
        assert self._tensors is not None, "what has arrived is handed over once"
        while self._pendings:
            self._pendings[0].wait()
            del self._pendings[:1]
        tensors, self._tensors = self._tensors, None
        return tensors


@dataclass(frozen=True)
class _Channel:
    group: Group
    device: torch.device
    label: str

    def __post_init__(self) -> None:
        assert self.group.size == 2, f"a channel between {self.group.size} ranks"

    @property
    def peer(self) -> int:
        return 1 - self.group.rank


def _handshake(device: torch.device) -> Tensor:
    """NCCL connects two ranks at their first message, and waits for both."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory; NCCL has no name for some dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _structures(parcel: PackedOutput, known: PackedOutput) -> str:
    return "" if parcel.specs != known.specs else f", as {parcel.structure} and not {known.structure}"
