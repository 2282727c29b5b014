"""The loss of a step, a sum over targets and their count, so that it is divided once, by the count of all
ranks; and checks of what a loss reads.

# B batch  S sequence  V vocabulary  C classes  T targets;  lower case = this rank's shard

[Note: outputs that every rank has]
Logits are gathered, and hidden states between layers are full unless `row` shards them. But attention scores
are those of a rank's heads, and with rows the hidden states are a rank's features: a loss of these would
differ between ranks, and no loss curve would show it. So what a loss reads is compared between ranks of `tp`.

[Note: outputs that are read later]
A loss may read an entry from some step on only: a term that begins later, or an entry that later batches
have. So reads are recorded until all entries have been read, and entries are compared after the call that
reads them first. Ranks of `tp` agree on that call without communication: they run one loss on one
micro-batch, on outputs of one structure, so they take the same branches until one depends on a value that
differs between them. Such a value is an entry that was not compared before, and was read on all ranks by
then. Afterwards ranks may read different entries; so all entries are gathered, which have the same names
everywhere, and marks of those that are read. A loss that reads by rank, for a log, breaks this: the other
ranks then receive another collective.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from plait.comm import Group, all_gather
from plait.engine.distillation import distilled_loss
from plait.engine.inputs import prepared
from plait.engine.preferences import PairLoss
from plait.errors import ModelError
from plait.models import IGNORED_LABEL, LOSS_WEIGHTS, OF_TOKENS, Task, pretrained_base, task_of
from plait.models.mask_decisions import known_values
from plait.models.routers import router_loss
from plait.models.tensors import storage_key, summary
from plait.models.tokens import TokenTrace
from plait.models.trace.modes import watching_reads
from plait.parallel.tensor.cross_entropy import (
    SINGLE_RANK,
    LossBuffers,
    SoftTargets,
    TokenLoss,
    cross_entropy,
    token_statistics,
    top_tokens,
)
from plait.parallel.tensor.head import DeferredLogits, Statistic, Targets, head_loss, head_statistics
from plait.plan.distillation import Distillation

# (outputs of the model, micro-batch) -> (loss summed over its targets, number of targets)
Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, int | Tensor]]


_EXPECTED_LABELS = {
    "labels": "labels as the model itself takes them; for a causal language model the input_ids, "
    "with -100 at positions without a target"
}


def choose_loss(
    model: nn.Module,
    loss: Loss | None,
    *,
    group: Group = SINGLE_RANK,
    columns: Sequence[tuple[int, int]] | None = None,
    buffers: LossBuffers | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    pairs: PairLoss | None = None,
    distillation: Distillation | None = None,
    of_inputs: bool = False,
) -> Loss:
    """The user's loss, or that of a Hugging Face model's task: the loss that the model itself returns, but
    summed over targets instead of averaged. Raises ModelError if neither applies.

    Losses of language models accept logits that are sharded over the vocabulary: `columns` are (start, stop)
    of each rank of `group`. None: full logits. `buffers`, `label_smoothing`, `z_loss`: see `cross_entropy`.
    `pairs`: computes it from pairs of rows. `distillation`: its options. `of_inputs`: the loss is for
    micro-batches of `Inputs`, whose labels are shifted already, and not for batches of the data; without the
    loss of routers, which an engine adds (engine/routers.py).
    """
    if loss is not None:
        return loss
    base, task = pretrained_base(model), task_of(model)
    if base is None or task is None:
        raise ModelError(
            "this model has no default loss",
            given=type(base or model).__name__,
            expected=f"a Hugging Face model for one of: {', '.join(known.value for known in Task)}; or loss=",
            hint="parallelize(..., loss=lambda outputs, batch: (summed_loss, number_of_targets))",
        )
    of_head: dict[str, Any] = {"group": group, "columns": columns, "buffers": buffers}
    summed = partial(_cross_entropy, **of_head, label_smoothing=label_smoothing, z_loss=z_loss)
    losses: dict[Task, Loss] = {
        Task.CAUSAL_LM: partial(token_loss, summed),
        Task.IMAGE_LM: partial(image_token_loss, summed),
        Task.ALIGNED_LM: partial(token_loss, summed),
        Task.NGRAM_LM: partial(ngram_loss, summed, base.config),
        Task.TOKEN_CLASSIFICATION: partial(token_loss, _cross_entropy),
        Task.SEQUENCE_CLASSIFICATION: partial(class_loss, base.config),
        Task.QUESTION_ANSWERING: answer_loss,
    }
    chosen = losses[task]
    if pairs is not None:
        chosen = partial(pairs, summed, partial(label_statistics, model, group=group, columns=columns))
    elif distillation is not None:
        chosen = partial(distilled_loss, distillation, summed)
    if of_inputs:
        return chosen
    routers = router_loss(model)

    def of_batch(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        total, count = chosen(outputs, prepared(batch, model, loss))
        if routers is not None:
            total = total + routers.coefficient * count * outputs.aux_loss
        return total, count

    return of_batch


# (logits, labels) -> (cross entropy summed over targets, number of targets); see `_cross_entropy`
_Summed = Callable[..., tuple[Tensor, Tensor]]


def token_loss(summed: _Summed, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of tokens, or of their classes, summed. `labels` (B, S): of each position, or -100.

    Computed in float32 or wider, for any dtype of logits; see `choose_loss` for sharded ones. Raises
    ModelError for labels that are missing, have another shape than the logits, or are outside the vocabulary.
    """
    return summed(outputs.logits, _labels(batch), weights=batch.get(LOSS_WEIGHTS))


def image_token_loss(summed: _Summed, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`token_loss` of the last positions, as many as labels: those of an image are before them."""
    labels_BS = _labels(batch)
    before = max(0, outputs.logits.shape[1] - labels_BS.shape[1])
    return summed(outputs.logits, F.pad(labels_BS, (before, 0), value=IGNORED_LABEL))


def ngram_loss(
    summed: _Summed, config: Any, outputs: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Cross entropy of ProphetNet's n-grams, summed: each label is the target of `ngram` positions, of which
    n - 1 are in `logits_ngram` (B, n - 1, S, V); smoothed by `config.eps`."""
    labels_BS, smoothing = _labels(batch), config.eps
    total, count = summed(outputs.logits, labels_BS, label_smoothing=smoothing)
    if config.disable_ngram_loss:
        return total, count
    for n in range(config.ngram - 1):
        total = total + summed(outputs.logits_ngram[:, n], labels_BS, label_smoothing=smoothing)[0]
    return total, count * config.ngram


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    words: str = "one per position of the logits",
    *,
    group: Group = SINGLE_RANK,
    columns: Sequence[tuple[int, int]] | None = None,
    buffers: LossBuffers | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    weights: Tensor | None = None,
    soft: SoftTargets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum over targets, and their number; with `weights`, the weighted sum, and the sum of the
    targets' weights; with `soft`, of all tokens, their cross entropy with these. `labels` has the shape of
    `logits` without the last dim: `words`."""
    _check_shape(labels, logits.shape[:-1], words)
    targets_T, weights_T = labels.reshape(-1), None
    is_target_T = targets_T != IGNORED_LABEL
    if weights is not None:
        _check_shape(weights, labels.shape, "a weight for each label", LOSS_WEIGHTS)
        weights_T = _widened(weights.reshape(-1)) * is_target_T
    columns = columns or [(0, logits.shape[-1])]
    terms: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "buffers": buffers}
    if isinstance(logits, DeferredLogits) and logits.is_deferred:
        loss = token_loss_of(logits, group, columns, **terms)
        total = head_loss(logits, _kept(Targets(targets_T, weights_T, None, soft), labels), loss)
    else:
        full = logits.value() if isinstance(logits, DeferredLogits) else logits
        terms |= {"ignore_index": IGNORED_LABEL, "weights_T": weights_T, "soft": soft}
        total = cross_entropy(full.flatten(0, -2), targets_T, group, columns, **terms)
    return total, is_target_T.sum() if weights_T is None else weights_T.sum(dtype=torch.float64)


def token_loss_of(
    logits: DeferredLogits, group: Group, columns: Sequence[tuple[int, int]], **terms: Any
) -> TokenLoss:
    """The loss of deferred logits, of which each rank has `columns`."""
    start, size = columns[group.rank][0], max(stop for _, stop in columns)
    return TokenLoss(
        group, start, size, ignore_index=IGNORED_LABEL, softcap=logits.softcap, scale=logits.scale, **terms
    )


def label_statistics(
    model: nn.Module,
    outputs: Any,
    batch: Mapping[str, Tensor],
    *,
    group: Group,
    columns: Sequence[tuple[int, int]] | None,
    distillation: Distillation | None = None,
) -> Tensor:
    """Return (B, S, 3): `token_statistics` of the labels of a prepared batch; 0 at positions without a
    target. With `distillation`, (B, S, 2 K + 1): `top_tokens`. Raises ModelError for another task than
    language models."""
    tasks = (Task.CAUSAL_LM, Task.ALIGNED_LM, Task.IMAGE_LM)
    logits = outputs.logits if task_of(model) in tasks else None
    if logits is None:
        raise ModelError(
            "log-probabilities are those of a language model's labels",
            given=type(model).__name__,
            expected="a causal or masked language model of transformers",
            hint="engine.outputs, for all that the model returns",
        )
    labels_BS, columns = _labels(batch), columns or [(0, logits.shape[-1])]
    _check_shape(labels_BS, logits.shape[:-1], "one per position of the logits")
    targets_T, width = labels_BS.reshape(-1), 3
    statistic: Statistic = token_statistics
    if distillation is not None:
        number, logits = (
            min(distillation.top_tokens, max(stop for _, stop in columns)),
            logits / distillation.temperature,
        )
        statistic, width = lambda z, _, loss: top_tokens(z, number, loss), 2 * number + 1
    if isinstance(logits, DeferredLogits) and logits.is_deferred:
        kept = _kept(Targets(targets_T, None, None), labels_BS)
        loss = token_loss_of(logits, group, columns)
        found_nm = head_statistics(logits, kept, loss, statistic, width).t()
    else:
        full, kept = getattr(logits, "value", lambda: logits)(), Targets(targets_T, None, None)
        start, size = columns[group.rank][0], max(stop for _, stop in columns)
        found_nm = statistic(full.flatten(0, -2), targets_T, TokenLoss(group, start, size)).t()
    if kept.rows_n is None:
        found_nm = found_nm.masked_fill((targets_T == IGNORED_LABEL)[:, None], 0)
    else:
        found_nm = found_nm.new_zeros(len(targets_T), width).index_copy_(0, kept.rows_n, found_nm)
    return found_nm.view(*labels_BS.shape, width)


def _kept(all_tokens: Targets, labels: Tensor) -> Targets:
    """The tokens that have a loss. All, if at most one in each row has none, its last, which is not worth a
    copy of the others; or if that is unknown without waiting for a GPU."""
    targets_T, weights_T, *_ = all_tokens
    host = labels if labels.device.type == "cpu" else known_values(labels, waits=False)
    if host is None:
        return all_tokens
    is_kept_T = host.reshape(-1) != IGNORED_LABEL
    if weights_T is not None and weights_T.device.type == "cpu":
        is_kept_T &= weights_T != 0
    if len(is_kept_T) - int(is_kept_T.sum()) <= len(labels):
        return all_tokens
    rows_n = is_kept_T.nonzero().flatten()
    if targets_T.is_cuda:
        rows_n = rows_n.pin_memory()
    rows_n = rows_n.to(targets_T.device, non_blocking=True)
    return all_tokens.of(rows_n)._replace(rows_n=rows_n)


def class_loss(config: Any, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
    """The loss of a sequence's classes by the configuration's `problem_type`, summed over samples and, except
    for a single label, over classes.

    `labels`: (B,) of a single label, (B, C) of several or of a regression. Without a `problem_type`, one
    class means a regression, and integers a single label, as in transformers.
    """
    logits_BC, labels = outputs.logits, _labels(batch)
    problem = config.problem_type
    if problem is None:
        is_single = labels.dtype in (torch.long, torch.int)
        problem = "single_label_classification" if is_single else "multi_label_classification"
        problem = "regression" if config.num_labels == 1 else problem
    if problem == "single_label_classification":
        return _cross_entropy(logits_BC, labels.reshape(-1), "one per sample")
    if config.num_labels == 1:
        labels = labels.reshape(-1, 1)
    _check_shape(labels, logits_BC.shape, "one per sample and class")
    wide = _widened(logits_BC)
    if problem == "regression":
        return F.mse_loss(wide, labels.to(wide.dtype), reduction="sum"), labels.numel()
    return F.binary_cross_entropy_with_logits(wide, labels.to(wide.dtype), reduction="sum"), labels.numel()


def answer_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy of the positions at which answers start and end, summed over both. A position after the
    end of the sequence is not a target.

    If as many starts as ends are targets, the mean is the same as in transformers, the mean of two means.
    """
    total, count = torch.zeros(()), torch.zeros((), dtype=torch.long)
    for key in ("start", "end"):
        logits_BS = getattr(outputs, f"{key}_logits")
        positions = _labels(batch, f"{key}_positions").reshape(-1)
        _check_shape(positions, logits_BS.shape[:1], "one per sample")
        is_inside = positions.clamp(min=0) < logits_BS.shape[1]
        targets = torch.where(is_inside, positions.clamp(min=0), IGNORED_LABEL)
        summed, targets_of_key = _cross_entropy(logits_BS, targets)
        total, count = total.to(summed) + summed, count.to(targets_of_key) + targets_of_key
    return total, count


def _widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _labels(batch: Mapping[str, Tensor], key: str = "labels") -> Tensor:
    if key not in batch:
        raise ModelError(
            f"the batch has no {key} to compute a loss from",
            given=f"a batch with {', '.join(batch)}",
            expected=_EXPECTED_LABELS.get(key, "start_positions and end_positions"),
            hint="loss=, for a loss that needs no labels",
        )
    return batch[key]


def _check_shape(labels: Tensor, expected: Sequence[int], words: str, name: str = "labels") -> None:
    if tuple(labels.shape) != tuple(expected):
        raise ModelError(
            f"the {name} do not fit the model's outputs",
            given=f"{name} {tuple(labels.shape)}",
            expected=f"{tuple(expected)}, {words}",
            hint=f"{name}.reshape{tuple(expected)}"
            if labels.numel() == math.prod(expected)
            else f"{name} that are padded like the inputs, or loss=",
        )


def check_sums_tokens(
    loss: Loss, trace: TokenTrace, parameters: Collection[int], device: torch.device | None = None
) -> None:
    """Raise ModelError unless a user's loss, and its number of targets, are sums over tokens: those of a
    row are what the row's parts add up to. `trace`: of the model, whose outputs get random values here, on
    `device`; `parameters`: their `storage_key`s."""
    read, generator = set[int](), torch.Generator().manual_seed(0)

    def valued(tensor: Tensor) -> Tensor:
        shape, dtype = tensor.shape, tensor.dtype
        if tensor.is_floating_point():
            wide = torch.promote_types(dtype, torch.float32)
            return torch.randn(shape, generator=generator, dtype=wide).to(device)
        return torch.randint(0, 2, shape, generator=generator).to(device, dtype)

    outputs = tree_map_only(Tensor, valued, trace.outputs)
    batch = {
        k: valued(value) if value.is_meta else value.to(device or "cpu") for k, value in trace.batch.items()
    }

    def of(own: slice) -> tuple[float, float]:
        def part(tensor: Tensor) -> Tensor:
            return tensor[:, own] if tensor.ndim > 1 and tensor.shape[1] == trace.num_tokens else tensor

        entries = {key: part(value) if key in OF_TOKENS else value for key, value in batch.items()}
        total, count = loss(tree_map_only(Tensor, part, outputs), entries)
        return float(total), float(count)

    try:
        with watching_reads(read.add), torch.no_grad():
            found = [[of(slice(*own)) for own in parts] for parts in _PARTS]
    except Exception as error:  # any error of the user's code
        text = str(error).splitlines() or [type(error).__name__]
        raise _no_sum(f"{type(error).__name__} for half of a row's tokens: {text[0][:200]}") from error
    if read & {*parameters}:
        raise _no_sum("a loss that reads parameters, which every rank of cp would add")
    for row, *parts in found:
        for name, full, *halves in zip(("loss", "number of targets"), row, *parts, strict=True):
            if not math.isclose(full, sum(halves), rel_tol=1e-6, abs_tol=1e-9):
                raise _no_sum(f"the {name} of a row is {full:.6g}, and {sum(halves):.6g} from two halves")


# A row and two halves of it; and two tokens, to which a small term that is no sum adds more than rounding.
_PARTS: list[list[tuple[int | None, ...]]] = [
    [(None,), (0, None, 2), (1, None, 2)],
    [(0, 2), (0, 1), (1, 2)],
]


def _no_sum(given: str) -> ModelError:
    return ModelError(
        "the loss is no sum over the tokens of a row",
        given=given,
        expected="(sum over tokens, number of targets), from outputs and labels at the same position",
        hint="labels that are shifted in the batch, reduction='sum' in the loss; or a plan without cp",
    )


# Difference of projections relative to the norm: about 1 for different values, rounding for equal ones.
_SAME = 1e-2


class LossReads:
    """Checks what a user's loss reads. See [Note: outputs that are read later]."""

    def __init__(self, group: Group) -> None:
        """`group`: the ranks that hold shards of the model."""
        self._group = group
        self._compared: set[str] = set()

    def call(self, loss: Callable[[Any, Any], Any], outputs: Any, batch: Any) -> Any:
        """Call the loss. Raises ModelError on all ranks of the group if it reads what differs between
        them."""
        named = named_tensors(outputs) if self._group.size > 1 else {}
        if named.keys() <= self._compared:
            return loss(outputs, batch)
        read: set[int] = set()
        with watching_reads(read.add):
            result = loss(outputs, batch)
        marks = {n: n not in self._compared and storage_key(tensor) in read for n, tensor in named.items()}
        if any(marks.values()):
            self._compared |= check_replicated(named, self._group, marks)
        return result


def check_replicated(
    outputs: Mapping[str, Tensor], group: Group, marks: Mapping[str, bool] | None = None
) -> set[str]:
    """Raise ModelError on all ranks of the group if a tensor's values or shapes differ between them; with
    `marks`, only for those that a rank marks. Returns the names of these."""
    if group.size == 1 or not outputs or any(tensor.is_meta for tensor in outputs.values()):
        return set()  # on meta, an estimate: there are no values
    summaries = torch.stack([summary(tensor) for tensor in outputs.values()])
    facts = [[marks is None or marks[name], tensor.numel()] for name, tensor in outputs.items()]
    own = torch.cat([summaries.new_tensor(facts), summaries], 1).flatten()
    all_ranks = own.new_empty(group.size * own.numel())
    all_gather(all_ranks, own, group)
    of_tensors = all_ranks.view(group.size, len(outputs), 4).transpose(0, 1).tolist()
    marked = {name for name, ranks in zip(outputs, of_tensors, strict=True) if any(rank[0] for rank in ranks)}
    for name, of_ranks in zip(outputs, of_tensors, strict=True):
        _, size, projection, norm = of_ranks[0]
        is_same = all(s == size and abs(p - projection) <= _SAME * max(norm, n) for _, s, p, n in of_ranks)
        if not is_same and name in marked:
            raise ModelError(
                "the ranks of tp have only their shards of an output that is read",
                given=f"outputs{name}, which is {tuple(outputs[name].shape)} here",
                expected="outputs that tp gathers, such as the logits, or does not shard",
                hint="a loss of the logits, or tp=1",
            )
    return marked


def named_tensors(outputs: Any) -> dict[str, Tensor]:
    """The floating-point tensors in a model's outputs, by their names."""
    leaves = tree_flatten_with_path(outputs)[0]
    return {keystr(p): v for p, v in leaves if isinstance(v, Tensor) and v.is_floating_point()}
