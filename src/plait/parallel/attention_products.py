"""Attention over few keys by matrix products, in the graphs that torch.compile makes for CPUs.

# B batch  h heads  S tokens of a row  D features of a head;  N = B h  r queries of a range  k keys they see

[Note: attention over few keys]
torch's kernel of attention on CPUs multiplies small blocks, in bf16 at a quarter of the speed of other
products. In a compiled graph the same five products are products of all heads, and what is between them is
fused. Queries are taken in ranges, each with the keys that it sees, so that scores stay in a cache and most
of those above the diagonal are not computed. As in torch's kernel, scores are in float32, probabilities are
rounded for the next product, and backward computes them again from the log-sum-exps.

It replaces calls in bf16 without mask and dropout, over at most `_MAX_TOKENS`: a graph has the code of each
range. Processors that multiply tiles (AMX) have another kernel in torch.
"""

import hashlib
import operator
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

_MAX_TOKENS = 512
_RANGE = 128  # queries


class AttentionProducts:
    """A `CustomGraphPass` of Inductor, which replaces torch's calls. See [Note: attention over few keys]."""

    def __call__(self, graph: Graph) -> None:
        name = "_scaled_dot_product_flash_attention_for_cpu"
        for suffix, function in (("", outputs), ("_backward", gradients)):
            target = getattr(torch.ops.aten, f"{name}{suffix}").default
            names = [argument.name for argument in target._schema.arguments]
            for node in graph.find_nodes(op="call_function", target=target):
                arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
                if _is_faster(arguments):
                    tensors = [value for value in node.args if isinstance(value, Node)]
                    options = {key: arguments[key] for key in ("is_causal", "scale") if key in arguments}
                    _replace(graph, node, partial(function, **options), tensors)

    def uuid(self) -> str:
        """Return what compiled graphs on disk are found by, besides torch's own key."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _is_faster(arguments: dict[str, Any]) -> bool:
    query, key = (arguments[name].meta["val"] for name in ("query", "key"))
    tokens = query.shape[2], key.shape[2]
    return (
        query.dtype is torch.bfloat16
        and query.shape[:2] == key.shape[:2]
        and all(isinstance(length, int) and 0 < length <= _MAX_TOKENS for length in tokens)
        and not arguments.get("dropout_p")
        and arguments.get("attn_mask") is None
        and not torch.cpu._is_amx_tile_supported()
    )


def _replace(graph: Graph, node: Node, function: Any, tensors: list[Node]) -> None:
    """Replace a call that returns several tensors by the operators of a function."""
    values = [tensor.meta["val"] for tensor in tensors]
    with values[0].fake_mode:
        traced = make_fx(function, torch._inductor.decomposition.select_decomp_table())(*values).graph
    inputs = traced.find_nodes(op="placeholder")
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(traced, dict(zip(inputs, tensors, strict=True)))
    for user in list(node.users):
        assert user.target is operator.getitem, "torch's kernel returns a tuple"
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def outputs(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Any:
    """Return (output, log-sum-exps) of queries, keys and values (B, h, S, D)."""
    q_NSD, k_NSD, v_NSD = (each.flatten(0, 1) for each in (q, k, v))
    parts, lses = [], []
    for start, stop, num_keys in _ranges(q, k, is_causal):
        scores_Nrk = _scores(q_NSD[:, start:stop], k_NSD[:, :num_keys], start, is_causal, scale)
        max_Nr1 = scores_Nrk.amax(-1, keepdim=True)
        exp_Nrk = (scores_Nrk - max_Nr1).exp()
        sum_Nr1 = exp_Nrk.sum(-1, keepdim=True)
        parts.append(torch.bmm((exp_Nrk / sum_Nr1).to(v.dtype), v_NSD[:, :num_keys]))
        lses.append(max_Nr1 + sum_Nr1.log())
    return torch.cat(parts, 1).view(*q.shape[:3], v.shape[3]), torch.cat(lses, 1).view(q.shape[:3])


def gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> Any:
    """Return the gradients of queries, keys and values, from that of the output."""
    g_NSD, q_NSD, k_NSD, v_NSD = (each.flatten(0, 1) for each in (grad, q, k, v))
    lse_NS1 = lse.flatten(0, 1).unsqueeze(-1)
    mean_NS1 = (_wide(grad) * _wide(output)).sum(-1, keepdim=True).flatten(0, 1)
    dqs, (dk_NSD, dv_NSD) = [], (torch.zeros_like(_wide(each)) for each in (k_NSD, v_NSD))
    for start, stop, num_keys in _ranges(q, k, is_causal):
        q_NrD, g_NrD, k_NkD = q_NSD[:, start:stop], g_NSD[:, start:stop], k_NSD[:, :num_keys]
        probs_Nrk = (_scores(q_NrD, k_NkD, start, is_causal, scale) - lse_NS1[:, start:stop]).exp()
        dprobs_Nrk = _wide(torch.bmm(g_NrD, v_NSD[:, :num_keys].mT))
        dscores_Nrk = (probs_Nrk * (dprobs_Nrk - mean_NS1[:, start:stop]) * _scale(q, scale)).to(q.dtype)
        dqs.append(torch.bmm(dscores_Nrk, k_NkD))
        unseen = (0, 0, 0, k.shape[2] - num_keys)
        dk_NSD = dk_NSD + F.pad(torch.bmm(dscores_Nrk.mT, q_NrD), unseen)
        dv_NSD = dv_NSD + F.pad(torch.bmm(probs_Nrk.to(v.dtype).mT, g_NrD), unseen)
    dq, dk, dv = torch.cat(dqs, 1), dk_NSD.to(k.dtype), dv_NSD.to(v.dtype)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _ranges(q: Tensor, k: Tensor, is_causal: bool) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop) of queries, and how many keys one of these sees at most."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    for start in range(0, num_queries, _RANGE):
        stop = min(start + _RANGE, num_queries)
        yield start, stop, min(stop, num_keys) if is_causal else num_keys


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _scores(q_NrD: Tensor, k_NkD: Tensor, start: int, is_causal: bool, scale: float | None) -> Tensor:
    """Return scaled scores, in float32 at least; -inf of keys that a query does not see. `start`: of the
    queries."""
    scores_Nrk = torch.bmm(_wide(q_NrD), _wide(k_NkD).mT) * _scale(q_NrD, scale)
    if not is_causal:
        return scores_Nrk
    is_seen_rk = scores_Nrk.new_ones(scores_Nrk.shape[1:], dtype=torch.bool).tril(start)
    return scores_Nrk.masked_fill(~is_seen_rk, -torch.inf)
