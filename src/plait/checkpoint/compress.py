"""Compressed weights in Hugging Face files: in integers or float8, and with zeros.

# O, I outputs and inputs of a linear layer  G groups of a row

[Note: quantized files]
The layout is that of the library compressed-tensors, which transformers and vLLM read. config.json has the
key `quantization_config`, and x.weight (O, I) of a linear layer is stored as

  int4, int8   x.weight_packed  int32 (O, I bits / 32, rounded up): codes + 2^(bits - 1), low bits first
               x.weight_shape   int64 (2): O and I
  fp8          x.weight         float8_e4m3fn (O, I): codes
  each         x.weight_scale   (O, G), in the dtype of the other weights

A weight is its code times the scale of its group: the group's largest magnitude / 7.5 for int4, 127.5 for
int8, 448 for fp8. So an integer code is at most half a step from its weight, also at both ends: the largest
codes are 7 and -8. int8 and fp8 have a group for each row; int4 has groups of GROUP inputs, or of the largest
smaller number that divides the inputs of all layers.

A file is dequantized where it is read, a rank's rows at a time: see `QuantizedReader`.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plait.checkpoint.reader import Reader
from plait.checkpoint.safetensors_format import DTYPES, TensorEntry
from plait.comm import Group
from plait.errors import CheckpointError, ConfigError, ModelError
from plait.models import SavedGroup, SaveFormat
from plait.models.linear_weights import block_linears, expert_weights
from plait.parallel.zero.state_io import boxes_of, view_of
from plait.plan import Box, Boxes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Weights = Literal["int8", "int4", "fp8"]
GROUP = 128
_MIN_GROUP = 16  # a scale for fewer inputs costs more than it saves
_METHOD, _KEY = "compressed-tensors", "quantization_config"
_IN_ORDER = (None, False, "weight", "static")  # groups are of neighbouring inputs
_PACKED, _SCALE, _SHAPE = "_packed", "_scale", "_shape"  # after the name of a weight


@dataclass(frozen=True)
class Quantization:
    """A format of weights: see [Note: quantized files]. `group`: inputs with one scale; None: all."""

    bits: int
    is_float: bool
    group: int | None

    @classmethod
    def of_inputs(cls, weights: Weights, inputs: Set[int]) -> "Quantization":
        """The format for layers with so many inputs. Raises ModelError if int4 has no groups."""
        if weights != "int4":
            return cls(8, weights == "fp8", None)
        common = math.gcd(*inputs)
        group = next(size for size in range(GROUP, 0, -1) if common % size == 0)
        if group < _MIN_GROUP:
            raise ModelError(
                "int4 needs groups that divide the inputs of all linear layers",
                given=f"inputs: {', '.join(map(str, sorted(inputs)))}",
                expected=f"a common divisor from {_MIN_GROUP} to {GROUP}",
                hint="--weights int8, with one scale for each row",
            )
        return cls(4, False, group)

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "Quantization | str | None":
        """The format that a model's config.json names: None if it names none, its name if it is not read."""
        values = config.get(_KEY)
        if values is None:
            return None
        try:
            (scheme,) = values["config_groups"].values()
            weights = scheme["weights"]
            found = cls(weights["num_bits"], weights["type"] == "float", weights.get("group_size"))
            (of_known,) = found.config([])["config_groups"].values()
            same = values["quant_method"] == _METHOD and bool(weights["symmetric"])
            same = same and weights["strategy"] == of_known["weights"]["strategy"]
            same = same and weights.get("actorder") in _IN_ORDER
            same = same and (found.group is None or (type(found.group) is int and found.group > 0))
            if not same or (found.bits, found.is_float) not in ((4, False), (8, False), (8, True)):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            method = values.get("quant_method") if isinstance(values, Mapping) else None
            return f"{method or 'an unknown method'}, in a format that is not read"
        return found

    def config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The quantization_config. `ignored`: linear layers that are not quantized."""
        weights: dict[str, Any] = {"num_bits": self.bits, "type": "float" if self.is_float else "int"}
        weights |= {"symmetric": True, "dynamic": False, "group_size": self.group}
        weights["strategy"] = "channel" if self.group is None else "group"
        layout = "float-quantized" if self.is_float else "pack-quantized"
        group = {"targets": ["Linear"], "weights": weights, "format": layout}
        named = {"quant_method": _METHOD, "quantization_status": "compressed", "format": layout}
        return {**named, "config_groups": {"group_0": group}, "ignore": list(ignored)}

    @property
    def _largest(self) -> float:
        return torch.finfo(torch.float8_e4m3fn).max if self.is_float else 2 ** (self.bits - 1) - 0.5

    def _grouped(self, weight_OI: Tensor) -> Tensor:
        return weight_OI.unflatten(-1, (-1, self.group or weight_OI.shape[-1]))

    def scales(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """Return (O, G), in this dtype; 1 for a group of zeros."""
        scale_OG = (self._grouped(weight_OI).abs().amax(-1) / self._largest).to(dtype)
        return torch.where(scale_OG > 0, scale_OG, 1)

    def codes(self, weight_OI: Tensor, scale_OG: Tensor) -> Tensor:
        """Return (O, I), in float8 or int8."""
        values = (self._grouped(weight_OI) / scale_OG.to(weight_OI.dtype)[..., None]).flatten(-2)
        if self.is_float:
            return values.clamp(-self._largest, self._largest).to(torch.float8_e4m3fn)
        half = 2 ** (self.bits - 1)
        return values.round().clamp(-half, half - 1).to(torch.int8)

    def weight(self, codes_OI: Tensor, scale_OG: Tensor) -> Tensor:
        """Return (O, I), in the dtype of the scales."""
        values = codes_OI.to(scale_OG.dtype).unflatten(-1, (scale_OG.shape[-1], -1))
        return (values * scale_OG[..., None]).flatten(-2)

    def stored(self, name: str, codes_OI: Tensor, scale_OG: Tensor) -> dict[str, Tensor]:
        """The tensors of a weight in the files, by name."""
        if self.is_float:
            return {name: codes_OI, name + _SCALE: scale_OG}
        shape = torch.tensor(codes_OI.shape, device=codes_OI.device)
        return {name + _PACKED: self._packed(codes_OI), name + _SCALE: scale_OG, name + _SHAPE: shape}

    def packed_width(self, inputs: int) -> int:
        """The number of columns in the files of a weight with so many inputs."""
        return inputs if self.is_float else -(-inputs * self.bits // 32)

    def problem(self, shape: tuple[int, ...], codes: TensorEntry, scale: TensorEntry) -> str | None:
        """Why these are not the tensors of a weight of this shape; None if they are."""
        if len(shape) != 2 or codes.shape != (shape[0], self.packed_width(shape[1])):
            return f"codes of shape {codes.shape} for a weight of {shape}"
        if codes.dtype != ("F8_E4M3" if self.is_float else "I32"):
            return f"codes of dtype {codes.dtype}"
        groups = 1 if self.group is None else shape[1] / self.group
        if scale.shape != (shape[0], groups) or not DTYPES[scale.dtype].is_floating_point:
            return f"scales of shape {scale.shape} and dtype {scale.dtype}"
        return None

    def _packed(self, codes_OI: Tensor) -> Tensor:
        padding = self.packed_width(codes_OI.shape[-1]) * 32 // self.bits - codes_OI.shape[-1]
        unsigned = F.pad(codes_OI.to(torch.int16) + 2 ** (self.bits - 1), (0, padding)).to(torch.uint8)
        if self.bits == 4:
            unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
        return unsigned.contiguous().view(torch.int32)

    def unpacked(self, stored: Tensor, inputs: int) -> Tensor:
        """Return the codes (O, I) of a tensor in the files."""
        if self.is_float:
            return stored
        unsigned = stored.view(torch.uint8)
        if self.bits == 4:
            unsigned = torch.stack((unsigned & 15, unsigned >> 4), -1).flatten(-2)
        return (unsigned[:, :inputs].to(torch.int16) - 2 ** (self.bits - 1)).to(torch.int8)


@dataclass(frozen=True)
class Sparsity:
    """Zeros in place of the smallest weights: a fraction of each layer's, or all but `kept` in each `of`
    consecutive inputs."""

    fraction: float = 0.0
    kept: int = 0
    of: int = 0

    @classmethod
    def parse(cls, text: str) -> "Sparsity":
        """Parse "0.5" or "2:4". Raises ConfigError."""
        pattern = re.fullmatch(r"(\d{1,3}):(\d{1,3})", text)
        if pattern is not None and 0 < int(pattern[1]) < int(pattern[2]):
            return cls(kept=int(pattern[1]), of=int(pattern[2]))
        if re.fullmatch(r"0?\.\d+", text) is not None and float(text) > 0:
            return cls(fraction=float(text))
        raise ConfigError(
            "not a sparsity",
            given=f"--sparsity {text}",
            expected="a fraction of zeros between 0 and 1, or a pattern such as 2:4, two of four weights",
            hint="--sparsity 2:4",
        )

    def pruned(self, weight_OI: Tensor) -> Tensor:
        """Return the weight with zeros in place of its smallest elements. Of equal ones, the last ones."""
        rows = weight_OI.abs().unflatten(-1, (-1, self.of)) if self.of else weight_OI.abs().flatten()
        kept = self.kept if self.of else rows.numel() - int(self.fraction * rows.numel())
        largest = rows.sort(dim=-1, descending=True, stable=True).indices[..., :kept]
        mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(-1, largest, True)
        return weight_OI * mask.view_as(weight_OI)


@dataclass(frozen=True)
class Compression:
    """The compression of the weights of linear layers in blocks, and of experts. None: as they are."""

    weights: Weights | None = None
    sparsity: Sparsity | None = None

    @classmethod
    def parse(cls, weights: Weights | None, sparsity: str | None) -> "Compression | None":
        """The compression of options of a command. Raises ConfigError."""
        given = None if sparsity is None else Sparsity.parse(sparsity)
        return None if weights is None and given is None else cls(weights, given)


class CompressedFormat:
    """`SaveFormat`, with compressed weights of linear layers and experts."""

    def __init__(self, model: "PreTrainedModel", dtype: torch.dtype, compression: Compression) -> None:
        """Set the model's quantization_config. Raises ModelError for layers that cannot be compressed so."""
        self._dtype, self._sparsity = dtype, compression.sparsity
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._plain, self._wide = SaveFormat(model, dtype), SaveFormat(model, wide)
        self._state, self._quantization = model.state_dict(), None
        self._compressed: set[str] = set()  # by state dict name
        if compression.weights is None and compression.sparsity is None:
            return
        linears = {name for name in block_linears(model) if not self._plain.is_converted(name)}
        candidates = linears | {*expert_weights(model)}
        stored = {
            name: {key: tensor.shape[-1] for key, tensor in group.tensors.items()}
            for group in self._plain.groups()
            for name in group.names
            if candidates.issuperset(group.names) and all(each.dim() == 2 for each in group.tensors.values())
        }
        self._compressed = {*stored}
        inputs = {key: size for of in stored.values() for key, size in of.items()}
        _check_inputs(inputs, model, compression.sparsity)
        if compression.weights is not None:
            self._quantization = Quantization.of_inputs(compression.weights, {*inputs.values()})
            layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            ignored = [name for name in layers if f"{name}.weight" not in linears]
            model.config.quantization_config = self._quantization.config(ignored)

    def groups(self) -> list[SavedGroup]:
        """See `SaveFormat.groups`."""
        return [
            SavedGroup(group.names, self.convert({name: self._state[name] for name in group.names}))
            for group in self._plain.groups()
        ]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `SaveFormat.convert`. Weights are compressed from the values that they have in `tensors`."""
        if not self._compressed.issuperset(tensors):
            return self._plain.convert(tensors)
        found: dict[str, Tensor] = {}
        for key, weight in self._wide.convert(tensors).items():
            if not weight.is_meta and not weight.isfinite().all():  # its codes would be any
                raise ModelError(
                    "a weight that is to be compressed is not finite",
                    given=key,
                    expected="finite numbers",
                    hint="an earlier checkpoint: plait checkpoint convert RUN/checkpoints/STEP OUT",
                )
            kept = weight if self._sparsity is None else self._sparsity.pruned(weight)
            if self._quantization is None:
                found[key] = kept.to(self._dtype)
                continue
            scale = self._quantization.scales(kept, self._dtype)
            found |= self._quantization.stored(key, self._quantization.codes(kept, scale), scale)
        return found


def _check_inputs(inputs: Mapping[str, int], model: nn.Module, sparsity: Sparsity | None) -> None:
    """Raise ModelError for weights, by name, with a number of inputs that cannot be compressed."""
    if not inputs:
        raise ModelError(
            "the model has no weights that are compressed",
            given=type(model).__name__,
            expected="nn.Linear in the model's blocks",
            hint="an export without --weights and --sparsity",
        )
    of = 1 if sparsity is None or not sparsity.of else sparsity.of
    for name, size in inputs.items():
        if size % of:
            raise ModelError(
                f"the inputs of a layer are not a multiple of {of}",
                given=f"{name}: {size} inputs",
                expected=f"{of} consecutive inputs in each group",
                hint="--sparsity with a fraction",
            )


@dataclass(frozen=True)
class QuantizedPart:
    """A quantized weight (O, I) of the files: the box that it is of one of the model's tensors, and the keys
    of its codes and scales."""

    box: Box
    codes: str
    scales: str

    @classmethod
    def at(cls, box: Box, name: str) -> "QuantizedPart":
        return cls(box, f"codes/{name}", f"scales/{name}")


class QuantizedReader:
    """A StateReader, and a context like `Reader`, of files with quantized weights."""

    def __init__(
        self, of_files: Reader, form: Quantization, parts: Mapping[str, Sequence[QuantizedPart]]
    ) -> None:
        """`of_files`: with the codes and scales. `parts`: of each quantized tensor of the model, by key."""
        self._of_files, self._form, self._parts = of_files, form, parts
        stored = {key for each in parts.values() for part in each for key in (part.codes, part.scales)}
        self._plain = of_files.shapes.keys() - stored

    def __enter__(self) -> "QuantizedReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._of_files.__exit__(*error)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {key: max(part.box.stop for part in parts) for key, parts in self._parts.items()}
        return shapes | {key: self._of_files.shapes[key] for key in self._plain}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._of_files.dtypes
        of_parts = {key: dtypes[parts[0].scales] for key, parts in self._parts.items()}
        return of_parts | {key: dtypes[key] for key in self._plain}

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        if key not in self._parts:
            self._of_files.read(key, boxes, start, into, counted=counted)
            return
        for box, view in boxes_of(into, boxes, start):
            for part in self._parts[key]:
                shared = part.box & box
                if shared.numel:
                    target = view_of(view, shared.within(box))
                    target.copy_(self._values(part, shared.within(part.box)).view(target.shape))

    def read_full(self, key: str) -> Tensor:
        if key not in self._parts:
            return self._of_files.read_full(key)
        full = torch.empty(self.shapes[key], dtype=self.dtypes[key])
        self.read(key, Boxes.full(full.shape), 0, full.view(-1))
        return full

    def finish(
        self, copy: Group, everyone: Group, device: torch.device, error: CheckpointError | None
    ) -> None:
        self._of_files.finish(copy, everyone, device, error)

    def _values(self, part: QuantizedPart, box: Box) -> Tensor:
        """The values of a box of a part: its rows are dequantized."""
        (low, high), (first, last) = box.edges[-2:]
        stored, scale_OG = (self._rows(key, low, high) for key in (part.codes, part.scales))
        codes_OI = self._form.unpacked(stored, part.box.shape[-1])
        return self._form.weight(codes_OI, scale_OG)[:, first:last]

    def _rows(self, key: str, low: int, high: int) -> Tensor:
        width = self._of_files.shapes[key][1]
        rows = torch.empty(high - low, width, dtype=self._of_files.dtypes[key])
        self._of_files.read(key, Boxes((((low, high),), ((0, width),))), 0, rows.view(-1), counted=False)
        return rows


def quantized_weights(keys: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The tensors of each quantized weight among those of files, by its name: codes, scales, and others."""
    found: dict[str, tuple[str, ...]] = {}
    for scale in (key for key in keys if key.endswith(f"weight{_SCALE}")):
        name = scale.removesuffix(_SCALE)
        is_packed = name + _PACKED in keys
        found[name] = (name + _PACKED, scale, name + _SHAPE) if is_packed else (name, scale)
    return found
