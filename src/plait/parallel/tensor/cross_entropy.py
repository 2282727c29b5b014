"""Cross entropy of logits that are cut over the vocabulary (Shoeybi et al. 1909.08053, section 3).

# T tokens  V vocabulary  v this rank's columns of it

[Note: what a rank knows by itself]
A rank's columns of a token have a largest logit m and, relative to it, a sum of exponentials s. Over all
ranks these are M = max m and S = sum of s exp(m - M). With t the target's logit and a the mean of all V
logits:

  loss      log S - (1 - eps) (t - M) - eps (a - M) + z_loss (log S + M)^2
  gradient  softmax here x share x (1 + 2 z_loss (log S + M)) - (1 - eps) onehot - eps / V

where share = s exp(m - M) / S is the part of a token's probability that lies in the rank's columns. So two
messages of a few numbers per token are exchanged in forward, none in backward, and what is kept is the logits
as they are and two numbers per token: its target and the factor of the softmax. Everything is relative to M:
logits far from zero lose no digits.

torch's softmax is one pass over memory with a fast exponential; the largest probability in it is 1 / s.
Chunks of tokens are small enough that what is done to them stays in the cache, and no others are ever held in
float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.comm import Group, all_reduce
from plait.errors import ModelError

SINGLE_RANK = Group((0,), 0, None)  # has all columns

_CPU_CHUNK = 1 << 17  # logits, for each thread: one float32 copy fills half a core's cache
_GPU_CHUNK = 1 << 23  # logits: 32 MB in float32


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
) -> Tensor:
    """The loss summed over tokens, the same bits on every rank of `group`; in float32 at least.

    `columns` says which of the vocabulary's columns (start and stop) each of the ranks has, in their order:
    of any number, or none. `targets_T` are places in the whole vocabulary, the same on every rank; tokens
    whose target is `ignore_index` count nothing. `label_smoothing` spreads that part of a target over the
    whole vocabulary, `z_loss` weighs the square of the log of the summed exponentials, `softcap` c makes c
    tanh(z / c) of every logit first.

    Gradients have the logits' dtype. Raises ModelError for a target outside of the vocabulary (on a GPU the
    device does, when it gets there), and for a second derivative.
    """
    start, stop = columns[group.rank]
    assert logits_Tv.shape == (len(targets_T), stop - start), (
        f"logits {tuple(logits_Tv.shape)} for {len(targets_T)} targets, columns {start} to {stop}"
    )
    how = _Options(group, start, max(e for _, e in columns), ignore_index, label_smoothing, z_loss, softcap)
    _check_targets(targets_T, how)
    total: Tensor = _CrossEntropy.apply(logits_Tv, targets_T, how)
    return total


@dataclass(frozen=True)
class _Options:
    group: Group
    start: int  # of this rank's columns
    vocabulary: int
    ignored: int
    smoothing: float
    z_loss: float
    softcap: float | None

    def owned(self, logits_Tv: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Whether a token's target is one of these columns, and which (0 where it is not)."""
        local_T = targets_T - self.start
        owned_T = (local_T >= 0) & (local_T < logits_Tv.shape[1]) & (targets_T != self.ignored)
        return owned_T, local_T.masked_fill_(~owned_T, 0)


class _CrossEntropy(torch.autograd.Function):
    """See [Note: what a rank knows by itself]."""

    @staticmethod
    def forward(ctx: Any, logits_Tv: Tensor, targets_T: Tensor, how: _Options) -> Tensor:
        ctx.how = how
        if logits_Tv.is_meta:
            for message in _empty_messages(logits_Tv, how):
                all_reduce(message, how.group)
            ctx.save_for_backward(logits_Tv, targets_T, _new(logits_Tv, len(logits_Tv)))
            return _new(logits_Tv)
        total, factor_T = _loss_sum(logits_Tv, targets_T, how)
        ctx.save_for_backward(logits_Tv, targets_T, factor_T)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ModelError(
                "the loss over the vocabulary has no second derivative",
                given="backward with create_graph=True",
                hint="loss= with torch's own cross entropy, without tensor parallelism",
            )
        logits_Tv, targets_T, factor_T = ctx.saved_tensors
        if logits_Tv.is_meta:
            return torch.empty_like(logits_Tv), None, None
        return _logit_gradient(logits_Tv, targets_T, factor_T, gradients[0], ctx.how), None, None


def _loss_sum(logits_Tv: Tensor, targets_T: Tensor, how: _Options) -> tuple[Tensor, Tensor]:
    """The summed loss, and each token's factor of the softmax in the gradient."""
    most_T, message = _local_terms(logits_Tv, how)
    top_T = most_T.clone()
    all_reduce(top_T, how.group, "max", label="loss: largest logits")
    sums_T = message[0].mul_((most_T - top_T).exp_())
    own_T = sums_T.clone()
    message[1] = _target_logits(logits_Tv, targets_T, top_T, how)
    if how.smoothing and logits_Tv.shape[1]:
        message[2] += (most_T - top_T) * logits_Tv.shape[1]
    all_reduce(message, how.group, label="loss: sums over the vocabulary")
    log_T = sums_T.log()
    losses_T = log_T - message[1] * (1 - how.smoothing)
    if how.smoothing:
        losses_T -= message[2] * (how.smoothing / how.vocabulary)
    factor_T = own_T.div_(sums_T)
    if how.z_loss:
        z_T = log_T + top_T
        losses_T += how.z_loss * z_T.square()
        factor_T *= 1 + 2 * how.z_loss * z_T
    ignored_T = targets_T == how.ignored
    return losses_T.masked_fill_(ignored_T, 0).sum(), factor_T.masked_fill_(ignored_T, 0)


def _local_terms(logits_Tv: Tensor, how: _Options) -> tuple[Tensor, Tensor]:
    """Of this rank's columns: the largest logit, and the message of sums relative to it: of exponentials, a
    place for the target's logit, and for label smoothing that of logits."""
    num_tokens, num_columns = logits_Tv.shape
    most_T, message = _empty_messages(logits_Tv, how)
    most_T.fill_(-torch.inf)
    message.zero_()
    if not num_columns:
        return most_T, message
    peak_T = _new(logits_Tv, num_tokens)
    for rows, z_tv, spare_tv in _chunks(logits_Tv, how):
        most_t = torch.amax(z_tv, 1, out=most_T[rows])
        torch.amax(torch.softmax(z_tv, 1, out=spare_tv), 1, out=peak_T[rows])
        if how.smoothing:
            torch.sum(torch.sub(z_tv, most_t[:, None], out=spare_tv), 1, out=message[2, rows])
    torch.reciprocal(peak_T, out=message[0]).masked_fill_(most_T == -torch.inf, 0)
    return most_T, message


def _empty_messages(logits_Tv: Tensor, how: _Options) -> tuple[Tensor, Tensor]:
    """What ranks tell each other, of undefined values: for each token its largest logit, and its sums."""
    num_tokens = len(logits_Tv)
    return _new(logits_Tv, num_tokens), _new(logits_Tv, 3 if how.smoothing else 2, num_tokens)


def _target_logits(logits_Tv: Tensor, targets_T: Tensor, top_T: Tensor, how: _Options) -> Tensor:
    """Relative to `top_T`; 0 where another rank has the target, or there is none."""
    if not logits_Tv.shape[1]:
        return torch.zeros_like(top_T)
    owned_T, local_T = how.owned(logits_Tv, targets_T)
    found_T = logits_Tv.gather(1, local_T[:, None])[:, 0].to(top_T.dtype)
    if how.softcap is not None:
        found_T = (found_T / how.softcap).tanh_() * how.softcap
    return (found_T - top_T).masked_fill_(~owned_T, 0)


def _logit_gradient(
    logits_Tv: Tensor, targets_T: Tensor, factor_T: Tensor, upstream: Tensor, how: _Options
) -> Tensor:
    gradient_Tv = torch.empty_like(logits_Tv, memory_format=torch.contiguous_format)
    if not gradient_Tv.numel():
        return gradient_Tv
    owned_T, local_T = how.owned(logits_Tv, targets_T)
    weight_T = upstream.to(factor_T.dtype) * (targets_T != how.ignored)
    hot_T1 = (weight_T * owned_T).mul_(how.smoothing - 1)[:, None]
    even_T1 = (weight_T * (-how.smoothing / how.vocabulary))[:, None]
    scale_T1, local_T1 = (factor_T * weight_T)[:, None], local_T[:, None]
    blank_T1 = scale_T1 == 0  # the softmax of columns which are all -inf is none
    has_blank = gradient_Tv.device.type != "cpu" or bool(blank_T1.any())
    for rows, z_tv, spare_tv in _chunks(logits_Tv, how):
        out_tv = gradient_Tv[rows]
        wide_tv = spare_tv if spare_tv.dtype != out_tv.dtype else out_tv
        torch.softmax(z_tv, 1, out=wide_tv).mul_(scale_T1[rows])
        if has_blank:
            wide_tv.masked_fill_(blank_T1[rows], 0)
        if how.smoothing:
            wide_tv.add_(even_T1[rows])
        wide_tv.scatter_add_(1, local_T1[rows], hot_T1[rows])
        if how.softcap is not None:  # 1 - tanh^2
            wide_tv.mul_(z_tv.div_(how.softcap).square_().neg_().add_(1))
        if wide_tv is not out_tv:
            out_tv.copy_(wide_tv)
    return gradient_Tv


def _chunks(logits_Tv: Tensor, how: _Options) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Of some tokens at a time: which, their logits, wide and capped, and as much memory besides."""
    num_tokens, num_columns = logits_Tv.shape
    numel = _CPU_CHUNK * torch.get_num_threads() if logits_Tv.device.type == "cpu" else _GPU_CHUNK
    most = max(1, min(num_tokens, numel // num_columns))
    buffer, spare = _new(logits_Tv, 2, most, num_columns)
    as_is = how.softcap is None and logits_Tv.dtype == buffer.dtype
    for start in range(0, num_tokens, most):
        rows = slice(start, min(start + most, num_tokens))
        z_tv = logits_Tv[rows]
        if not as_is:
            z_tv = buffer[: len(z_tv)].copy_(z_tv)
        if how.softcap is not None:
            z_tv.div_(how.softcap).tanh_().mul_(how.softcap)
        yield rows, z_tv, spare[: len(z_tv)]


def _new(logits: Tensor, *shape: int) -> Tensor:
    """Of undefined values, where the logits are, in float32 at least."""
    return logits.new_empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32))


def _check_targets(targets_T: Tensor, how: _Options) -> None:
    """Costs a GPU no wait: there the device asserts, as it does in torch's cross entropy."""
    if targets_T.is_meta or not len(targets_T):
        return
    good_T = ((targets_T >= 0) & (targets_T < how.vocabulary)) | (targets_T == how.ignored)
    if targets_T.device.type != "cpu":
        torch._assert_async(good_T.all())
    elif not good_T.all():
        raise ModelError(
            "a target is not in the vocabulary",
            given=int(targets_T[~good_T][0]),
            expected=f"0 to {how.vocabulary - 1}, or {how.ignored} for a token that has none",
        )
