"""Point-to-point channels: tensors from one rank to another, in order, in one direction and of one kind
(activations or gradients).

    outbox.send(key, packed, tensors)           # returns at once
    posted = inbox.post(inbox.describe(key))    # allocates buffers and starts the receives
    tensors = posted.wait()

[Note: sends never block]
A rank that blocks until its message has been received may wait for a receiver that waits for it: valid
schedules would deadlock. So a send returns at once, whatever the transport, and the outbox keeps the tensors
alive. Every later call polls, without blocking, which sends have completed (`Work.is_done`), and releases
their tensors. It polls on CUDA too: a wait would block the stream, which is no better than blocking the rank.
For the same reason a pass on CUDA ends with sends in flight, so that the optimizer is launched: it does not
write these tensors, which the next pass releases.

[Note: cached descriptions]
Outputs of a stage have the same structure for all micro-batches with the same key (names, shapes and dtypes
of the entries, and whether gradients are recorded). Both ranks have the key. The first time that a channel is
used with a key, the sender sends a description of the output first, and both ranks cache it.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.comm import Group, Work, decode_text, empty, encode_text, shares_memory, start_receive, start_send
from plait.errors import ModelError
from plait.parallel.pipeline.serialize import PackedOutput, TensorSpec

_LENGTH = torch.int64  # of the message before a description: its bytes


class Outbox:
    """The sender's end of a channel. See [Note: sends never block]."""

    def __init__(
        self, group: Group, *, device: torch.device, label: str = "", peer: int | None = None
    ) -> None:
        """`group`: both ranks create their ends at the same point of the program. `label`: the channel's
        name in errors. `peer`: group rank of the receiver; by default the other one of a group of two."""
        self._channel = _Channel(group, device, label, peer)
        self._in_flight: deque[tuple[Work, Tensor]] = deque()  # the transport reads these tensors
        self._descriptions: dict[Hashable, PackedOutput] = {}
        if device.type == "cuda":
            self._send(_handshake(device))

    def send(self, key: Hashable, packed: PackedOutput, tensors: Sequence[Tensor]) -> None:
        """Send a stage's output, after its description if the key is new.

        Tensors must not be modified afterwards. Raises ModelError if earlier outputs of that key had another
        description (see [Note: cached descriptions]). All methods raise CommError if the receiver has failed.
        """
        known = self._descriptions.get(key)
        if known is None:
            self._descriptions[key] = packed
            encoded = encode_text(packed.to_json())
            self.send_tensors([torch.tensor([encoded.numel()], dtype=_LENGTH), encoded])
        elif known != packed:
            structures = f", as {packed.structure} and not {known.structure}"
            raise ModelError(
                "a stage's output depends on more than the shapes of its micro-batch",
                given=f"{packed}{structures if packed.specs == known.specs else ''}",
                expected=f"{known}, as for earlier micro-batches of the same shapes",
                hint="blocks whose output shapes follow from those of their inputs; blocks=Class for others",
            )
        self.send_tensors(tensors)

    def send_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors whose specs the receiver knows: gradients have those of the outputs."""
        self.release_sent()
        for tensor in tensors:
            self._send(tensor.detach().to(self._channel.device))

    def release_sent(self) -> None:
        """Release the tensors of completed sends. Never blocks."""
        while self._in_flight and self._in_flight[0][0].is_done():
            self._release_first()

    def drain(self) -> None:
        """End a pass: on CPUs, block until all sends have completed."""
        self.release_sent()
        while self._in_flight and self._channel.device.type != "cuda":
            self._release_first()

    def _send(self, tensor: Tensor) -> None:
        if tensor.numel():
            channel = self._channel
            buffer = _as_bytes(tensor.contiguous())
            if shares_memory(channel.group):  # the receiver reads the copy directly; the tensor can be freed
                buffer = empty(buffer.numel(), buffer.dtype, channel.device, channel.group).copy_(buffer)
            work = start_send(buffer, channel.group, channel.peer, label=channel.label)
            work.is_done()  # with Gloo the first poll starts a thread that waits; later ones read its result
            self._in_flight.append((work, buffer))

    def _release_first(self) -> None:
        self._in_flight[0][0].wait()
        self._in_flight.popleft()


class Inbox:
    """The receiver's end of a channel."""

    def __init__(
        self, group: Group, *, device: torch.device, label: str = "", peer: int | None = None
    ) -> None:
        """Arguments as of `Outbox`. `device`: where received tensors are allocated."""
        self._channel = _Channel(group, device, label, peer)
        self._descriptions: dict[Hashable, PackedOutput] = {}
        self._handshake = self._post(_handshake(device)) if device.type == "cuda" else None

    def has_description(self, key: Hashable) -> bool:
        """Return whether `describe` returns without communication."""
        return key in self._descriptions

    def describe(self, key: Hashable) -> PackedOutput:
        """Return the description of outputs of that key. If it is not cached, receive it: everything sent
        earlier must have been posted. Raises CommError if the sender has failed."""
        if key not in self._descriptions:
            length = int(self.post([TensorSpec((1,), _LENGTH)]).wait()[0])
            [encoded] = self.post([TensorSpec((length,), torch.uint8)]).wait()
            self._descriptions[key] = PackedOutput.from_json(decode_text(encoded))
        return self._descriptions[key]

    def post(self, specs: Sequence[TensorSpec]) -> "PostedReceive":
        """Allocate buffers for the next tensors on the channel, of these specs, and start to receive them."""
        tensors = [torch.empty(spec.shape, dtype=spec.dtype, device=self._channel.device) for spec in specs]
        return PostedReceive(tensors, [self._post(tensor) for tensor in tensors if tensor.numel()])

    def _post(self, tensor: Tensor) -> Work:
        channel = self._channel
        return start_receive(_as_bytes(tensor), channel.group, channel.peer, label=channel.label)


class PostedReceive:
    """Tensors being received."""

    def __init__(self, tensors: list[Tensor], works: list[Work]) -> None:
        self._tensors: list[Tensor] | None = tensors
        self._works = works

    def wait(self) -> list[Tensor]:
        """Return the tensors when they have arrived (on CUDA: the current stream waits). May be called once.
        Raises CommError if the sender has failed."""
        assert self._tensors is not None, "wait() was called twice"
        while self._works:
            self._works[0].wait()
            del self._works[:1]
        tensors, self._tensors = self._tensors, None
        return tensors


@dataclass(frozen=True)
class _Channel:
    group: Group
    device: torch.device
    label: str
    given_peer: int | None

    @property
    def peer(self) -> int:
        """Group rank of the other end."""
        if self.given_peer is not None:
            return self.given_peer
        assert self.group.size == 2, f"a channel between {self.group.size} ranks"
        return 1 - self.group.rank


def _handshake(device: torch.device) -> Tensor:
    """Return a first message: NCCL connects two ranks at their first one, which blocks until both join."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a view as bytes; NCCL does not support all dtypes."""
    return tensor.view(-1).view(torch.uint8)
