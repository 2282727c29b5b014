"""A parameter server by torch's RPC, as in PyTorch's tutorial on batch processing, to compare ours with.

Rank 0 keeps the weights and their optimizer. A worker sends its gradients by one call, and gets the weights
of the next step as the answer when those of all workers have come (`functions.async_execution`; "Implementing
Batch RPC Processing Using Asynchronous Executions", PyTorch tutorials). As written there, the answer is the
module, which RPC pickles in every step, and the optimizer is torch's default. Otherwise the program is at its
fastest: lists of tensors travel, and the optimizer is the fused one.
"""

import os
import threading
import time
import warnings

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.futures import Future

from llama import Llama
from peers import ADAMW, groups

SERVER = "server"
Answer = list[Tensor] | nn.Module


class Server:
    """Sums gradients, steps when all workers have sent theirs, and answers with the weights."""

    def __init__(self, model: Llama, num_workers: int, as_written: bool) -> None:
        self._module = model.with_weights()
        self._weights = list(self._module.parameters())
        self._as_written = as_written
        self._optimizer = torch.optim.AdamW(groups(self._module), fused=not as_written, **ADAMW)
        self._lock = threading.Lock()
        self._num_workers = num_workers
        self._num_pushes = 0
        self._answer: Future[Answer] = Future()

    @staticmethod
    @rpc.functions.async_execution
    def step(server: "rpc.RRef[Server]", grads: list[Tensor]) -> Future[Answer]:
        return server.local_value().add(grads)

    def add(self, grads: list[Tensor]) -> Future[Answer]:
        with self._lock:
            answer = self._answer
            for weight, grad in zip(self._weights, grads, strict=True):
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
            self._num_pushes += 1
            if self._num_pushes == self._num_workers:
                for weight in self._weights:
                    weight.grad /= self._num_workers
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                self._num_pushes, self._answer = 0, Future()
                weights = [weight.detach() for weight in self._weights]
                answer.set_result(self._module if self._as_written else weights)
        return answer


def work(server: "rpc.RRef[Server]", model: Llama, steps: int) -> list[float]:
    """Train on a worker; return the seconds of each step."""
    torch.manual_seed(int(os.environ["RANK"]))
    module, batch = model.with_weights(), model.batch(1)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        parameters = list(module.parameters())
        module(**batch).loss.backward()
        grads = [parameter.grad for parameter in parameters]
        answer = rpc.rpc_sync(SERVER, Server.step, args=(server, grads))
        if isinstance(answer, nn.Module):
            module = answer
        else:
            with torch.no_grad():
                for parameter, weight in zip(parameters, answer, strict=True):
                    parameter.copy_(weight)
                    parameter.grad = None
        seconds.append(time.perf_counter() - start)
    return seconds


def train(model: Llama, num_workers: int, steps: int, as_written: bool, store: str) -> list[float]:
    """Be a rank, for `plait.launch` on `num_workers` + 1; rank 0 returns the slowest worker's seconds."""
    warnings.filterwarnings("ignore")  # of torch about its own pickling
    rank = int(os.environ["RANK"])
    name = f"worker{rank}" if rank else SERVER
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}", rpc_timeout=0)
    rpc.init_rpc(name, rank=rank, world_size=num_workers + 1, rpc_backend_options=options)
    seconds: list[list[float]] = []
    if rank == 0:
        server = rpc.RRef(Server(model, num_workers, as_written))
        workers = [f"worker{number + 1}" for number in range(num_workers)]
        arguments = (server, model, steps)
        calls = [rpc.rpc_async(worker, work, args=arguments) for worker in workers]
        seconds = [call.wait() for call in calls]
        del server, calls
    rpc.shutdown()
    return [max(times) for times in zip(*seconds, strict=True)]
