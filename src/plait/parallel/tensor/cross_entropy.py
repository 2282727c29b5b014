"""Cross entropy of logits sharded over the vocabulary (Shoeybi et al. 1909.08053, section 3).

# T tokens  V vocabulary  v this rank's columns of it;  t tokens of a chunk

[Note: vocabulary-parallel cross entropy]
A rank's columns of a token have a largest logit m and, relative to it, a sum of exponentials s. Over all
ranks these are M = max m and S = sum of s exp(m - M). With z the target's logit and a the mean of all V
logits:

  loss      log S - (1 - eps) (z - M) - eps (a - M) + z_loss (log S + M)^2
  gradient  local softmax x share x (1 + 2 z_loss (log S + M)) - (1 - eps) onehot - eps / V

where share = s exp(m - M) / S is the probability of the rank's columns. So there are two all-reduces of a few
numbers per token in forward, none in backward; saved for backward are the logits as they are and two numbers
per token: its target and the factor of the softmax. Everything is relative to M: logits far from zero lose no
digits.

[Note: soft targets]
Targets may be a distribution p over K tokens and the rest, all other tokens as one class. With r the sum of
the rest's exponentials relative to M, over all ranks, which is a third number per token to be reduced:

  loss      log S - sum over K of p (z - M) - p_rest log r
  gradient  softmax - p of one of the K tokens;  softmax (1 - p_rest S / r) of the rest

The rest is summed over its own columns. 1 - (the K probabilities) would lose all digits where these are
nearly 1, as they are after some training.

torch's softmax is one pass over memory with a fast exponential; the largest probability in it is 1 / s.
Tokens are processed in chunks, on CPUs small enough to stay in the cache; only chunks are held in float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plait.comm import Group, all_gather, all_reduce
from plait.errors import ModelError
from plait.plan.memory import wide_chunk

SINGLE_RANK = Group((0,), 0, None)  # holds all columns

_CPU_CHUNK = 1 << 17  # logits, per thread: one float32 copy fills half a core's cache


class SoftTargets(NamedTuple):
    """Probabilities of K different tokens in place of each token's one target, and of all other tokens
    together: see [Note: soft targets]. They add up to 1."""

    ids_TK: Tensor
    probs_TK: Tensor
    rest_T: Tensor

    def of(self, rows: slice | Tensor) -> "SoftTargets":
        """Return those of some tokens."""
        return SoftTargets(*(each[rows] for each in self))


@dataclass
class LossBuffers:
    """Peak bytes that a loss holds besides full logits and what backward needs: copies in float32, and what
    the head's operator holds of a chunk.

    device_type   of the device for which logits on meta are estimated
    held_bytes    by the operator at this time
    """

    device_type: str
    peak_bytes: int = 0
    held_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + num_bytes)


def cross_entropy(
    logits_Tv: Tensor,
    targets_T: Tensor,
    group: Group,
    columns: Sequence[tuple[int, int]],
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    weights_T: Tensor | None = None,
    soft: SoftTargets | None = None,
    buffers: LossBuffers | None = None,
) -> Tensor:
    """Return the loss summed over tokens, bitwise equal on every rank of `group`; in float32 at least. The
    tokens' losses are multiplied by `weights_T`. Of logits that need not exist: see head.py.

    `columns`: (start, stop) of each rank's columns of the vocabulary, in rank order; any number of them, or
    none. `targets_T` are indices into the full vocabulary, the same on every rank; tokens whose target is
    `ignore_index` contribute nothing. `soft` replaces the other targets. `label_smoothing` is the fraction of
    a target that is distributed over the full vocabulary, `z_loss` the weight of the squared log of the
    partition function; `softcap` c first replaces every logit z by c tanh(z / c). `buffers` counts the memory
    of this call.

    Gradients have the logits' dtype. Raises ModelError for a target outside of the vocabulary (on a GPU a
    device-side assert fails instead), and for a second derivative.
    """
    start, stop = columns[group.rank]
    assert logits_Tv.shape == (len(targets_T), stop - start), (
        f"logits {tuple(logits_Tv.shape)} for {len(targets_T)} targets, columns {start} to {stop}"
    )
    options = TokenLoss(
        group, start, max(e for _, e in columns), ignore_index, label_smoothing, z_loss, softcap, 1.0, buffers
    )
    options.check_targets(targets_T)
    if soft is not None:
        options.check_targets(soft.ids_TK)
    loss_sum: Tensor = _CrossEntropy.apply(logits_Tv, targets_T, weights_T, options, soft)
    return loss_sum


@dataclass(frozen=True)
class TokenLoss:
    """The options of `cross_entropy`. Logits are multiplied by `scale` before anything else."""

    group: Group
    start: int  # of this rank's columns
    vocab_size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    buffers: LossBuffers | None = None

    def local_targets(self, logits_Tv: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask of targets that are this rank's columns, and their local indices (0 elsewhere)."""
        local_T = targets_T - self.start
        is_local_T = (local_T >= 0) & (local_T < logits_Tv.shape[1]) & (targets_T != self.ignore_index)
        return is_local_T, local_T.masked_fill_(~is_local_T, 0)

    def capped_(self, logits: Tensor) -> Tensor:
        """Apply scale and softcap, in place."""
        scaled = logits if self.scale == 1.0 else logits.mul_(self.scale)
        if self.softcap is None:
            return scaled
        return scaled.div_(self.softcap).tanh_().mul_(self.softcap)

    def check_targets(self, targets_T: Tensor) -> None:
        """Raise for invalid targets; a GPU is not synchronized, but asserts as in torch's cross entropy."""
        if targets_T.is_meta or not len(targets_T):
            return
        is_valid_T = ((targets_T >= 0) & (targets_T < self.vocab_size)) | (targets_T == self.ignore_index)
        if targets_T.device.type != "cpu":
            torch._assert_async(is_valid_T.all())
        elif not is_valid_T.all():
            raise ModelError(
                "a target is not in the vocabulary",
                given=int(targets_T[~is_valid_T][0]),
                expected=f"0 to {self.vocab_size - 1}",
                hint=f"{self.ignore_index}, for a token without a target",
            )


class _CrossEntropy(torch.autograd.Function):
    """See [Note: vocabulary-parallel cross entropy]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        targets_T: Tensor,
        weights_T: Tensor | None,
        options: TokenLoss,
        soft: SoftTargets | None,
    ) -> Tensor:
        ctx.options, ctx.soft = options, soft
        loss_sum, factor_T = summed_loss(logits_Tv, targets_T, weights_T, options, soft)
        ctx.save_for_backward(logits_Tv, targets_T, weights_T, factor_T)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative()
        logits_Tv, targets_T, weights_T, factor_T = ctx.saved_tensors
        grad_Tv = torch.empty_like(logits_Tv, memory_format=torch.contiguous_format)
        own = targets_T, weights_T, factor_T, grads[0], ctx.options, grad_Tv, ctx.soft
        write_gradient(logits_Tv, *own)
        return grad_Tv, None, None, None, None


def refuse_second_derivative() -> None:
    """Raise ModelError in a backward with create_graph."""
    if torch.is_grad_enabled():
        raise ModelError(
            "the vocabulary-parallel loss has no second derivative",
            given="backward with create_graph=True",
            expected="backward without create_graph",
            hint="loss= with torch's cross entropy, without tensor parallelism",
        )


def summed_loss(
    logits_Tv: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None,
    options: TokenLoss,
    soft: SoftTargets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, and each token's factor of the softmax in the gradient; with `soft`, (2, T),
    also that of the rest. On meta only communicate."""
    if logits_Tv.is_meta:
        for message in _empty_messages(logits_Tv, options):
            all_reduce(message, options.group)
        if options.buffers is not None:
            chunk_size, num_copies = _chunk_facts(logits_Tv, options, options.buffers.device_type)
            row_bytes = new_wide(logits_Tv, logits_Tv.shape[1]).nbytes
            options.buffers.add(num_copies * chunk_size * row_bytes)
        return new_wide(logits_Tv), new_wide(logits_Tv, len(logits_Tv))
    local_max_T, message = _local_terms(logits_Tv, options, soft)
    max_T = local_max_T.clone()
    all_reduce(max_T, options.group, "max", label="loss: largest logits")
    sum_exp_T = message[0].mul_((local_max_T - max_T).exp_())
    local_sum_exp_T = sum_exp_T.clone()
    message[1] = _target_logits(logits_Tv, targets_T, max_T, options, soft)
    if soft is not None:
        message[2] *= (local_max_T - max_T).exp_()
    elif options.label_smoothing and logits_Tv.shape[1]:
        message[2] += (local_max_T - max_T) * logits_Tv.shape[1]
    all_reduce(message, options.group, label="loss: sums over the vocabulary")
    log_sum_exp_T = sum_exp_T.log()
    losses_T = log_sum_exp_T - message[1] * (1 - options.label_smoothing)
    if options.label_smoothing:
        losses_T -= message[2] * (options.label_smoothing / options.vocab_size)
    factor_T = local_sum_exp_T.div_(sum_exp_T)
    if options.z_loss:
        log_z_T = log_sum_exp_T + max_T
        losses_T += options.z_loss * log_z_T.square()
        factor_T *= 1 + 2 * options.z_loss * log_z_T
    ignored_T = targets_T == options.ignore_index
    if soft is not None:
        rest_exp_T = message[2].clamp_(min=torch.finfo(message.dtype).tiny)
        losses_T -= soft.rest_T * rest_exp_T.log()
        of_rest_T = 1 - soft.rest_T * sum_exp_T / rest_exp_T
        factor_T = torch.stack([factor_T, (factor_T * of_rest_T).masked_fill_(ignored_T, 0)])
    losses_T.masked_fill_(ignored_T, 0)
    if weights_T is not None:
        losses_T *= weights_T
    return losses_T.sum(), factor_T.masked_fill_(ignored_T, 0)


def _local_terms(logits_Tv: Tensor, options: TokenLoss, soft: SoftTargets | None) -> tuple[Tensor, Tensor]:
    """Return, for this rank's columns, each token's largest logit, and the message to be all-reduced: sums
    relative to it of exponentials, space for the target's logit and, for label smoothing, sums of logits, or,
    with `soft`, of the rest's exponentials."""
    num_tokens, num_columns = logits_Tv.shape
    local_max_T, message = _empty_messages(logits_Tv, options, soft)
    local_max_T.fill_(-torch.inf)
    message.zero_()
    if not num_columns:
        return local_max_T, message
    peak_T = new_wide(logits_Tv, num_tokens)
    for rows, z_tv, scratch_tv in _chunks(logits_Tv, options):
        max_t = torch.amax(z_tv, 1, out=local_max_T[rows])
        torch.amax(torch.softmax(z_tv, 1, out=scratch_tv), 1, out=peak_T[rows])
        if soft is not None:
            is_local_tK, local_tK = options.local_targets(z_tv, soft.ids_TK[rows])
            taken_tK = torch.where(is_local_tK, scratch_tv.gather(1, local_tK), 0)
            torch.sum(scratch_tv.scatter_add_(1, local_tK, -taken_tK), 1, out=message[2, rows])
        elif options.label_smoothing:
            torch.sum(torch.sub(z_tv, max_t[:, None], out=scratch_tv), 1, out=message[2, rows])
    torch.reciprocal(peak_T, out=message[0])
    if soft is not None:
        message[2] *= message[0]
        message[2].masked_fill_(local_max_T == -torch.inf, 0)
    message[0].masked_fill_(local_max_T == -torch.inf, 0)
    return local_max_T, message


def _empty_messages(
    logits_Tv: Tensor, options: TokenLoss, soft: SoftTargets | None = None
) -> tuple[Tensor, Tensor]:
    """Return the two uninitialized tensors that are all-reduced: each token's largest logit, and its sums."""
    num_tokens, num_sums = len(logits_Tv), 2 if soft is None and not options.label_smoothing else 3
    return new_wide(logits_Tv, num_tokens), new_wide(logits_Tv, num_sums, num_tokens)


def _target_logits(
    logits_Tv: Tensor, targets_T: Tensor, max_T: Tensor, options: TokenLoss, soft: SoftTargets | None = None
) -> Tensor:
    """Return the targets' logits relative to `max_T`, of soft ones the mean; 0 where the target is another
    rank's or ignored."""
    if not logits_Tv.shape[1]:
        return torch.zeros_like(max_T)
    ids_TK = targets_T[:, None] if soft is None else soft.ids_TK
    is_local_TK, local_TK = options.local_targets(logits_Tv, ids_TK)
    target_TK = options.capped_(logits_Tv.gather(1, local_TK).to(max_T.dtype))
    relative_TK = (target_TK - max_T[:, None]).masked_fill_(~is_local_TK, 0)
    if soft is None:
        return relative_TK[:, 0]
    return torch.where(soft.probs_TK > 0, relative_TK * soft.probs_TK, 0).sum(1)


def write_gradient(
    logits_Tv: Tensor,
    targets_T: Tensor,
    weights_T: Tensor | None,
    factor_T: Tensor,
    upstream: Tensor | float,
    options: TokenLoss,
    grad_Tv: Tensor,
    soft: SoftTargets | None = None,
) -> None:
    """Write the gradient of the logits, whose memory `grad_Tv` may be."""
    if not grad_Tv.numel() or grad_Tv.is_meta:
        return
    ids_TK = targets_T[:, None] if soft is None else soft.ids_TK
    is_local_TK, local_TK = options.local_targets(logits_Tv, ids_TK)
    token_grad_T = (targets_T != options.ignore_index).to(factor_T.dtype) * upstream
    if weights_T is not None:
        token_grad_T *= weights_T
    token_grad_T *= options.scale
    target_grad_TK = (token_grad_T[:, None] * is_local_TK).mul_(options.label_smoothing - 1)
    more_T = None  # of the softmax of the K tokens, than of the rest
    if soft is not None:
        target_grad_TK *= soft.probs_TK
        of_targets_T, factor_T = factor_T
        more_T = (of_targets_T - factor_T) * token_grad_T
    smoothing_grad_T1 = (token_grad_T * (-options.label_smoothing / options.vocab_size))[:, None]
    scale_T1 = (factor_T * token_grad_T)[:, None]
    unused_T1 = scale_T1 == 0  # the softmax of columns that are all -inf is NaN
    has_unused = grad_Tv.device.type != "cpu" or bool(unused_T1.any())
    for rows, z_tv, scratch_tv in _chunks(logits_Tv, options):
        out_tv = grad_Tv[rows]
        buffer_tv = out_tv if scratch_tv.dtype == out_tv.dtype and grad_Tv is not logits_Tv else scratch_tv
        torch.softmax(z_tv, 1, out=buffer_tv)
        if more_T is not None:
            probs_tK = buffer_tv.gather(1, local_TK[rows]) * more_T[rows, None]
            target_grad_TK[rows] += torch.where(is_local_TK[rows], probs_tK, 0)
        buffer_tv.mul_(scale_T1[rows])
        if has_unused:
            buffer_tv.masked_fill_(unused_T1[rows], 0)
        if options.label_smoothing:
            buffer_tv.add_(smoothing_grad_T1[rows])
        if soft is None:  # One index per row: unlike scatter_add_, deterministic on GPUs.
            at = torch.arange(len(z_tv), device=z_tv.device), local_TK[rows, 0]
            buffer_tv[at] += target_grad_TK[rows, 0]
        else:  # Also here: all but one of equal indices are those of other ranks, and add 0.
            buffer_tv.scatter_add_(1, local_TK[rows], target_grad_TK[rows])
        if options.softcap is not None:  # 1 - tanh^2
            buffer_tv.mul_(z_tv.div_(options.softcap).square_().neg_().add_(1))
        if buffer_tv is not out_tv:
            out_tv.copy_(buffer_tv)


def token_statistics(logits_Tv: Tensor, targets_T: Tensor, options: TokenLoss) -> Tensor:
    """Return (3, T): each target's log-probability, the entropy of the token's probabilities, and 1 if none
    of these is larger than the target's, else 0."""
    max_T = new_wide(logits_Tv, len(logits_Tv)).fill_(-torch.inf)
    message = new_wide(logits_Tv, 3, len(logits_Tv)).zero_()
    is_local_T, local_T = options.local_targets(logits_Tv, targets_T)
    for rows, z_tv, scratch_tv in _chunks(logits_Tv, options) if logits_Tv.shape[1] else ():
        max_t = torch.amax(z_tv, 1, out=max_T[rows])
        relative_tv = torch.sub(z_tv, max_t.clamp(min=torch.finfo(max_t.dtype).min)[:, None], out=scratch_tv)
        message[2, rows] = z_tv.gather(1, local_T[rows, None])[:, 0]
        exp_tv = relative_tv.exp()
        message[0, rows] = exp_tv.sum(1)
        message[1, rows] = exp_tv.mul_(relative_tv).nan_to_num_(0).sum(1)  # 0 of a logit of -inf
    local_max_T = max_T.clone()
    all_reduce(max_T, options.group, "max", label="loss: largest logits")
    shift_T = (local_max_T - max_T).clamp_(min=torch.finfo(max_T.dtype).min)
    message[1] += message[0] * shift_T
    message[:2] *= shift_T.exp()
    message[2].sub_(max_T).masked_fill_(~is_local_T, 0)
    all_reduce(message, options.group, label="loss: sums over the vocabulary")
    log_sum_exp_T = message[0].log()
    entropy_T = log_sum_exp_T - message[1] / message[0]
    return torch.stack([message[2] - log_sum_exp_T, entropy_T, (message[2] == 0).to(entropy_T)])


def top_tokens(logits_Tv: Tensor, number: int, options: TokenLoss) -> Tensor:
    """Return (2 K + 1, T): the ids of each token's K likeliest next tokens, exact up to 2^24, their
    log-probabilities, and that of all others together. Ranks send K candidates for each token, and not their
    columns."""
    assert number <= options.vocab_size <= 1 << 24, f"{number} of {options.vocab_size} tokens"
    own = min(number, logits_Tv.shape[1])
    ids_TK = new_wide(logits_Tv, len(logits_Tv), number).zero_()
    logits_TK, rest_T1 = torch.full_like(ids_TK, -torch.inf), torch.full_like(ids_TK[:, :1], -torch.inf)
    for rows, z_tv, scratch_tv in _chunks(logits_Tv, options) if own else ():
        logits_TK[rows, :own], columns_tk = z_tv.topk(own)
        ids_TK[rows, :own] = (columns_tk + options.start).to(z_tv.dtype)
        others_tv = scratch_tv.copy_(z_tv).scatter_(1, columns_tk, -torch.inf)
        rest_T1[rows] = others_tv.logsumexp(1, keepdim=True)
    message = torch.cat([ids_TK, logits_TK, rest_T1], 1)
    all_ranks = message.new_empty(options.group.size * message.numel())
    all_gather(all_ranks, message.flatten(), options.group, label="likeliest tokens of ranks")
    of_ranks_T = all_ranks.view(options.group.size, *message.shape).transpose(0, 1)
    found = (each.flatten(1) for each in of_ranks_T.split([number, number, 1], -1))
    ids_TN, candidates_TN, rests_TR = found
    logits_TK, at_TK = candidates_TN.topk(number)
    others = torch.cat([candidates_TN.scatter(1, at_TK, -torch.inf), rests_TR], 1)
    log_sum_T1 = torch.cat([candidates_TN, rests_TR], 1).logsumexp(1, keepdim=True)
    rest_T1 = others.logsumexp(1, keepdim=True)
    return torch.cat([ids_TN.gather(1, at_TK), logits_TK - log_sum_T1, rest_T1 - log_sum_T1], 1).t()


def _chunks(logits_Tv: Tensor, options: TokenLoss) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (slice of tokens, their logits in float32 with the softcap applied, scratch of that shape)."""
    num_tokens, num_columns = logits_Tv.shape
    chunk_size, num_copies = _chunk_facts(logits_Tv, options, logits_Tv.device.type)
    scratch = new_wide(logits_Tv, chunk_size, num_columns)
    needs_no_copy = num_copies == 1
    buffer = scratch[:0] if needs_no_copy else torch.empty_like(scratch)
    if options.buffers is not None:
        options.buffers.add(scratch.nbytes + buffer.nbytes)
    for start in range(0, num_tokens, chunk_size):
        rows = slice(start, min(start + chunk_size, num_tokens))
        z_tv = logits_Tv[rows]
        if not needs_no_copy:
            z_tv = buffer[: len(z_tv)].copy_(z_tv)
            options.capped_(z_tv)
        yield rows, z_tv, scratch[: len(z_tv)]


def _chunk_facts(logits_Tv: Tensor, options: TokenLoss, device_type: str) -> tuple[int, int]:
    """Return the number of tokens in a chunk, and of tensors in float32 of its logits' shape."""
    num_tokens, num_columns = logits_Tv.shape
    is_plain = options.softcap is None and options.scale == 1.0
    needs_no_copy = is_plain and logits_Tv.dtype == new_wide(logits_Tv, 0).dtype
    chunk_size = max(1, min(num_tokens, chunk_tokens(num_columns, device_type)))
    return chunk_size, 1 if needs_no_copy else 2


def chunk_tokens(num_columns: int, device_type: str) -> int:
    """Return the number of tokens whose logits are in float32 at once; 0 if one token is too large."""
    if device_type == "cpu":
        return _CPU_CHUNK * torch.get_num_threads() // num_columns
    return wide_chunk(num_columns)


def new_wide(logits: Tensor, *shape: int) -> Tensor:
    """Return an uninitialized tensor on the logits' device, in float32 at least."""
    return logits.new_empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32))
