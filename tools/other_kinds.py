"""Small models of other kinds than causal language models, with batches, for `plait verify`.

    plait verify --model other_kinds:t5 --plan "pp=2"      (in this folder)

`verify_architectures.py` verifies all of them. Each is what a user would write: a configuration of
transformers or a torch module, its training batch, and a loss where the model has none that is a sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from plait.verify import ModelSpec

VOCABULARY, WIDTH, LAYERS, TOKENS, TARGETS, CLASSES = 64, 32, 2, 12, 9, 5
IMAGE_TOKEN, IMAGE_TOKENS = 63, 4

# (generator, samples) -> an entry of a batch
Entry = Callable[[torch.Generator, int], Tensor]


@dataclass(frozen=True)
class Kind:
    """A model of some kind. `options`: what plans of it need."""

    group: str
    label: str
    model: Callable[[], nn.Module]
    entries: Mapping[str, Entry]
    loss: Any = None
    options: str = ""

    def __call__(self) -> ModelSpec:
        """Return what `plait verify` builds."""
        return ModelSpec(self._seeded, self._batch, self.loss)

    def _seeded(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model()

    def _batch(self, step: int, samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return {key: entry(generator, samples) for key, entry in self.entries.items()}


# --- entries of batches


def integers(low: int, high: int, *shape: int) -> Entry:
    return lambda generator, n: torch.randint(low, high, (n, *shape), generator=generator)


def numbers(*shape: int) -> Entry:
    return lambda generator, n: torch.randn(n, *shape, generator=generator)


def constant(value: Any) -> Entry:
    return lambda _, n: torch.tensor(value).expand(n, *torch.tensor(value).shape).clone()


def targets(length: int) -> Entry:
    """Labels, half of which are no targets."""

    def entry(generator: torch.Generator, n: int) -> Tensor:
        labels = integers(3, VOCABULARY, length)(generator, n)
        return labels.masked_fill(torch.rand(n, length, generator=generator) < 0.5, -100)

    return entry


def padding_mask(generator: torch.Generator, n: int) -> Tensor:
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (n, 1), generator=generator)
    return (torch.arange(TOKENS) < lengths).long()


def is_padding(generator: torch.Generator, n: int) -> Tensor:
    return padding_mask(generator, n) == 0


def with_image(generator: torch.Generator, n: int) -> Tensor:
    ids = integers(3, IMAGE_TOKEN - 3, TOKENS)(generator, n)
    ids[:, 1 : 1 + IMAGE_TOKENS] = IMAGE_TOKEN
    return ids


def with_end(generator: torch.Generator, n: int) -> Tensor:
    return F.pad(integers(3, VOCABULARY, TOKENS - 1)(generator, n), (0, 1), value=2)


def patches(generator: torch.Generator, n: int) -> Tensor:
    """4 x 4 patches of 4 x 4 pixels for each sample, for Qwen2-VL, without a dim of samples."""
    return torch.randn(16 * n, 3 * 16, generator=generator)


_IDS, _CLASS = integers(3, VOCABULARY, TOKENS), integers(0, CLASSES)
_IS_IMAGE = constant([int(1 <= position <= IMAGE_TOKENS) for position in range(TOKENS)])
_TEXT: dict[str, Entry] = {"input_ids": _IDS, "attention_mask": padding_mask}
_MASKED_LM = {**_TEXT, "labels": targets(TOKENS)}
_TO_TEXT = {**_TEXT, "labels": targets(TARGETS)}
_IMAGES: dict[str, Entry] = {"pixel_values": numbers(3, 16, 16)}
_IMAGE_CLASS = {**_IMAGES, "labels": _CLASS}

# --- losses


def cross_entropy(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum"), (labels != -100).sum()


def square_error(outputs: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch["pixel_values"]).square().sum(), outputs.numel()


def distance_of_pairs(outputs: Any, _: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return (outputs.text_embeds - outputs.image_embeds).square().sum(), len(outputs.text_embeds)


def ctc(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    log_probs, labels = outputs.logits.log_softmax(-1).transpose(0, 1), batch["labels"]
    frames, samples, _ = log_probs.shape
    lengths = torch.full((samples,), frames), torch.full((samples,), labels.shape[1])
    return F.ctc_loss(log_probs, labels, *lengths, reduction="sum"), samples


# --- modules of torch


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=LAYERS, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(input_ids))[0])


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, LAYERS, LAYERS, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, padding: Tensor) -> Tensor:
        x, y = self.source(source), self.target(target)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=y.dtype)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return self.head(self.transformer(x, y, tgt_mask=causal.to(y.device), **masks))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, LAYERS)

    def forward(self, input_ids: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=padding))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.first, self.second = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.layer1 = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 8))
        self.layer2 = nn.Sequential(ResidualBlock(8, 16), ResidualBlock(16, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(pixel_values))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        strides, widths = (1, 2, 2), (3, 8, 8)
        self.down = nn.ModuleList(
            nn.Conv2d(width, 8, 3, stride, 1) for width, stride in zip(widths, strides, strict=True)
        )
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, 1, 1) for _ in range(2))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x, skipped = pixel_values, []
        for block in self.down:
            x = F.silu(block(x))
            skipped.append(x)
        for block, other in zip(self.up, skipped[1::-1], strict=True):
            x = F.silu(block(torch.cat([F.interpolate(x, scale_factor=2), other], 1)))
        return self.head(x)


# --- models of transformers

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HALVES = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
_T5 = {
    **dict.fromkeys(("num_layers", "num_decoder_layers"), LAYERS),
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_DISTILBERT = {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 48, "n_layers": LAYERS, "n_heads": 4}
# A vision tower has another width than the layers after it.
_VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_WAV2VEC2 = {
    **_SIZES,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (4, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_OF_CLASSES = {"num_labels": CLASSES}


def _llava() -> Any:
    text, vision = transformers.LlamaConfig(**_SIZES), transformers.CLIPVisionConfig(**_VISION)
    return transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE_TOKEN, image_seq_length=IMAGE_TOKENS
    )


def _gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**_SIZES, head_dim=8, num_key_value_heads=2, sliding_window=8)
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
    )


def _qwen2_vl() -> Any:
    vision = {"depth": LAYERS, "embed_dim": 24, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1}
    text = {**_SIZES, "num_key_value_heads": 2, "rope_parameters": _ROPE}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": 62, "vision_start_token_id": 61}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)


def _clip() -> Any:
    return transformers.CLIPConfig(text_config=_SIZES, vision_config=_VISION, projection_dim=16)


KINDS: dict[str, Kind] = {}


def _add(
    name: str, group: str, model: str, sizes: Any, entries: Mapping[str, Entry], loss: Any = None, **more: str
) -> None:
    """Add a model of transformers. `sizes`: of its configuration, or a function that returns one; `note`: of
    its label."""
    cls: Any = getattr(transformers, model)

    def build() -> nn.Module:
        built: nn.Module = cls(sizes() if callable(sizes) else cls.config_class(**sizes))
        return built

    note = more.pop("note", "")
    KINDS[name] = Kind(group, f"{model}{f', {note}' if note else ''}", build, entries, loss, **more)


_MASKED, _SEQ2SEQ, _VISUAL = "masked LM", "encoder-decoder", "vision"
_SPEECH, _MULTI, _HEADS, _TORCH = "speech", "multimodal", "heads", "torch"

_add("bert", _MASKED, "BertForMaskedLM", _SIZES, _MASKED_LM)
_add("roberta", _MASKED, "RobertaForMaskedLM", _SIZES, _MASKED_LM)
_LOCAL = {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
_add("modernbert", _MASKED, "ModernBertForMaskedLM", {**_SIZES, **_LOCAL}, _MASKED_LM)
_RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
_add("deberta", _MASKED, "DebertaForMaskedLM", {**_SIZES, **_RELATIVE}, _MASKED_LM)
_RELATIVE |= {"position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
_RELATIVE |= {"conv_kernel_size": 3, "conv_act": "gelu"}
_add("deberta_v2", _MASKED, "DebertaV2ForMaskedLM", {**_SIZES, **_RELATIVE}, _MASKED_LM)
_add("distilbert", _MASKED, "DistilBertForMaskedLM", _DISTILBERT, _MASKED_LM)
_add("albert", _MASKED, "AlbertForMaskedLM", {**_SIZES, "embedding_size": 16}, _MASKED_LM)

_add("t5", _SEQ2SEQ, "T5ForConditionalGeneration", _T5, _TO_TEXT)
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_add("t5_gated", _SEQ2SEQ, "T5ForConditionalGeneration", {**_T5, **_GATED}, _TO_TEXT, note="v1.1")
_add("bart", _SEQ2SEQ, "BartForConditionalGeneration", _HALVES, _TO_TEXT)
_add("mbart", _SEQ2SEQ, "MBartForConditionalGeneration", _HALVES, _TO_TEXT)
_add("marian", _SEQ2SEQ, "MarianMTModel", _HALVES, _TO_TEXT)
_add("pegasus", _SEQ2SEQ, "PegasusForConditionalGeneration", _HALVES, _TO_TEXT)
_add("m2m_100", _SEQ2SEQ, "M2M100ForConditionalGeneration", _HALVES, _TO_TEXT)

_add("vit", _VISUAL, "ViTForImageClassification", {**_VISION, **_OF_CLASSES}, _IMAGE_CLASS)
_add("dinov2", _VISUAL, "Dinov2ForImageClassification", {**_VISION, **_OF_CLASSES}, _IMAGE_CLASS)
_STAGES = {"hidden_sizes": [8, 16], "depths": [2, 2], **_OF_CLASSES}
_CONVNEXT = {**_STAGES, "num_stages": 2, "patch_size": 2}
_add("convnext", _VISUAL, "ConvNextForImageClassification", _CONVNEXT, _IMAGE_CLASS)
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
_SWIN |= {"window_size": 4, **_OF_CLASSES}
_add("swin", _VISUAL, "SwinForImageClassification", _SWIN, _IMAGE_CLASS)
_RESNET = {**_STAGES, "embedding_size": 8, "layer_type": "basic"}
_add("resnet", _VISUAL, "ResNetForImageClassification", _RESNET, _IMAGE_CLASS, options="sync_batchnorm=true")

_WHISPER = {**_HALVES, "max_source_positions": 8, "max_target_positions": 64, "num_mel_bins": 8}
_FEATURES: dict[str, Entry] = {"input_features": numbers(8, 16), "labels": targets(TARGETS)}
_add("whisper", _SPEECH, "WhisperForConditionalGeneration", _WHISPER, _FEATURES)
_WAVES: dict[str, Entry] = {"input_values": numbers(96)}
_add("wav2vec2_ctc", _SPEECH, "Wav2Vec2ForCTC", _WAV2VEC2, {**_WAVES, "labels": integers(1, 60, 4)}, ctc)
_WAVE_CLASS = {**_WAVES, "labels": _CLASS}
_add("wav2vec2", _SPEECH, "Wav2Vec2ForSequenceClassification", {**_WAV2VEC2, **_OF_CLASSES}, _WAVE_CLASS)
_AST = {**_VISION, "frequency_stride": 8, "time_stride": 8, "max_length": 16, "num_mel_bins": 16}
_SPECTRUM: dict[str, Entry] = {"input_values": numbers(16, 16), "labels": _CLASS}
_add("ast", _SPEECH, "ASTForAudioClassification", {**_AST, **_OF_CLASSES}, _SPECTRUM)

_WITH_IMAGE: dict[str, Entry] = {"input_ids": with_image, "labels": targets(TOKENS)}
_add("llava", _MULTI, "LlavaForConditionalGeneration", _llava, {**_WITH_IMAGE, **_IMAGES})
_GEMMA3 = {**_WITH_IMAGE, **_IMAGES, "token_type_ids": _IS_IMAGE}
_add("gemma3", _MULTI, "Gemma3ForConditionalGeneration", _gemma3, _GEMMA3)
_QWEN2 = {**_WITH_IMAGE, "pixel_values": patches, "image_grid_thw": constant([1, 4, 4])}
_QWEN2 |= {"mm_token_type_ids": _IS_IMAGE}
_add("qwen2_vl", _MULTI, "Qwen2VLForConditionalGeneration", _qwen2_vl, _QWEN2)
_add("clip", _MULTI, "CLIPModel", _clip, {**_TEXT, **_IMAGES}, distance_of_pairs, note="distance of pairs")

_add(
    "bert_class",
    _HEADS,
    "BertForSequenceClassification",
    {**_SIZES, **_OF_CLASSES},
    {**_TEXT, "labels": _CLASS},
)
_TAGS = {**_TEXT, "labels": integers(0, CLASSES, TOKENS)}
_add("roberta_tags", _HEADS, "RobertaForTokenClassification", {**_SIZES, **_OF_CLASSES}, _TAGS)
_ANSWERS = {**_TEXT, **dict.fromkeys(("start_positions", "end_positions"), integers(0, TOKENS))}
_add("distilbert_answers", _HEADS, "DistilBertForQuestionAnswering", _DISTILBERT, _ANSWERS)
_add(
    "llama_class",
    _HEADS,
    "LlamaForSequenceClassification",
    {**_SIZES, **_OF_CLASSES},
    {**_TEXT, "labels": _CLASS},
)
_ENDED: dict[str, Entry] = {"input_ids": with_end, "labels": _CLASS}
_add("bart_class", _HEADS, "BartForSequenceClassification", {**_HALVES, **_OF_CLASSES}, _ENDED)

_PADDED: dict[str, Entry] = {"input_ids": _IDS, "padding": is_padding, "labels": targets(TOKENS)}
_PAIR = {"source": _IDS, "target": integers(3, VOCABULARY, TARGETS), "padding": is_padding}
KINDS |= {
    "transformer": Kind(
        _TORCH, "nn.Transformer", Translator, {**_PAIR, "labels": targets(TARGETS)}, cross_entropy
    ),
    "encoder": Kind(_TORCH, "nn.TransformerEncoder", Tagger, _PADDED, cross_entropy),
    "lstm": Kind(_TORCH, "nn.LSTM", Lstm, {"input_ids": _IDS, "labels": targets(TOKENS)}, cross_entropy),
    "plain_resnet": Kind(
        _TORCH, "ResNet, BatchNorm", ResNet, _IMAGE_CLASS, cross_entropy, "sync_batchnorm=true"
    ),
    "unet": Kind(_TORCH, "U-Net", UNet, _IMAGES, square_error),
}


def __getattr__(name: str) -> Kind:
    """Return the function `other_kinds:NAME`."""
    if name in KINDS:
        return KINDS[name]
    raise AttributeError(name)
