"""Hugging Face causal language models: read and check configurations, build models on meta, load saved ones.

[Note: code named by configurations]
transformers downloads and runs code that a configuration names: implementations of attention and experts
from a repository (`org/name`, also with a prefix `paged|`, or to replace a package that is not installed),
and, with trust_remote_code, classes in `auto_map`. A configuration comes with a checkpoint or a folder of
weights, which must not run code. So only transformers' own implementations and installed packages are
accepted, wherever in a configuration they are named.

[Note: errors of configurations]
Models raise errors of all kinds: KeyError for an unknown activation, ZeroDivisionError for a size of zero.
The key at fault is found by trial: without it, the model can be built. A forward finds more mistakes. It runs
on meta, where it costs little. Not every valid model runs there, so one that fails is run on the CPU, and
only a failure there is an error.
"""

import functools
import importlib.util
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from plait.errors import ModelError, shown, unknown_key_hint
from plait.fileio import missing_hint, read_json
from plait.models.init_weights import RecordedConstruction, with_parameters_on_meta
from plait.models.task import pretrained_base
from plait.models.trace.prepare import running_on_meta

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# See [Note: code named by configurations].
_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "grouped_mm", "batched_mm"),
}
_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
_MAX_MODULES = 2**15  # a model of a thousand layers has about 20,000
# The largest integer of a key, by the first word that is in it. Configurations create a list or a dict with
# an entry per layer, label, group or expert, before any module; none per token or position.
_MAX_INTEGERS = dict.fromkeys(("vocab", "position", "length", "token", "chunk", "theta", "seed"), 2**40)
_MAX_INTEGERS |= {"layer": 2**12, "": 2**20}

_TRIAL_S = 5.0  # for finding the key at fault
_TRIAL_TOKENS = 8
_MAX_TRIAL_PARAMETERS = 2 * 10**9  # of a trial on the CPU; a token takes two FLOPs for each


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object of a `config.json`, or of the one in a directory. Raises ModelError."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(
            "the model's configuration cannot be read",
            given=f"{file}: {error}",
            expected="a config.json that this user can read",
            hint=missing_hint(path),
        ) from error
    if not isinstance(values, dict):
        raise ModelError(
            "the model's configuration is not a JSON object",
            given=file,
            expected="an object of keys and values",
            hint='{"model_type": "llama"}',
        )
    return values


def check_config_values(values: Any) -> None:
    """Raise ModelError for a configuration that must not be given to transformers: without a valid type, with
    code to download (see [Note: code named by configurations]), or with too large an integer."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(values, Mapping):
        raise ModelError(
            "the model's configuration is not an object of keys and values",
            given=f"a {type(values).__name__}",
            expected="a dict",
            hint='{"model_type": "llama"}',
        )
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        has = "has no model_type" if model_type is None else "has an invalid model_type"
        given = f"the keys {', '.join(map(str, values))}" if model_type is None else repr(model_type)
        raise ModelError(
            f"the model's configuration {has}",
            given=given,
            expected="a type of transformers, as text",
            hint='model_type = "llama"',
        )
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            "transformers has no such model type",
            given=f"model_type={model_type}",
            expected=f"one of the {len(CONFIG_MAPPING)} types of transformers",
            hint=unknown_key_hint(model_type, CONFIG_MAPPING),
        )
    for key, value in _entries(values):
        _check_implementation(key, value)
    check_integers(values)


def check_integers(values: Mapping[str, Any]) -> None:
    """Raise ModelError for a configuration with too large an integer."""
    for key, value in _entries(values):
        limit = next(limit for word, limit in _MAX_INTEGERS.items() if word in key)
        if isinstance(value, int) and abs(value) > limit:
            raise ModelError(
                "the model is too large",
                given=f"{key} = {value}",
                expected=f"at most {limit}",
                hint=f"{key} = {limit}",
            )


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a configuration, at any depth, with their innermost key, or with the key of an
    implementation that contains them."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _entries(each, key if _kind(key) else str(inner))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _entries(each, key)
    else:
        yield key, value


def _kind(key: str) -> str | None:
    """The kind of implementation that a key names: transformers accepts several spellings of each."""
    return next((kind for kind in _IMPLEMENTATIONS if kind in key), None)


def _check_implementation(key: str, value: Any) -> None:
    kind = _kind(key)
    if kind is None or value is None or value in _IMPLEMENTATIONS[kind]:
        return
    package = _PACKAGES.get(value) if kind == "attn_implementation" and isinstance(value, str) else None
    if package is None:
        raise ModelError(
            f"{kind} is not one of transformers' own",
            given=f"{key} = {value!r}, which may be code to download",
            expected=" or ".join(_IMPLEMENTATIONS[kind]),
            hint=f"{kind} = {_IMPLEMENTATIONS[kind][0]!r}, or the configuration without this key",
        )
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ModelError(
            f"the package of {value} is not installed",
            given=f"{key} = {value!r}",
            expected=f"the package {package}; transformers would download its code instead",
            hint=f"{kind} = 'sdpa', or the configuration without this key",
        )


def causal_lm_on_meta(
    config: Mapping[str, Any] | Path, *, of_architecture: bool = False
) -> "PreTrainedModel":
    """Build the unmodified Hugging Face model of a configuration on the meta device.

    `config`: keys as in a `config.json`, including `model_type`, or the path of such a file or its directory.
    `of_architecture`: a model of the class that it names, if that is one of transformers, instead of the
    causal language model. Raises ModelError, which names the key at fault where it can be found.
    """
    values = read_config(config) if isinstance(config, Path) else config
    check_config_values(values)
    build = functools.partial(_build, of_architecture=of_architecture)
    try:
        model = build(values)
    except ModelError:
        raise
    except Exception as error:  # see [Note: errors of configurations]
        raise _invalid(values, error, build) from error
    layers = getattr(model.config, "num_hidden_layers", 1)
    if not isinstance(layers, int) or layers < 1:
        raise ModelError(
            "the model has no layers",
            given=f"num_hidden_layers = {layers!r}",
            expected="1 or more",
            hint="num_hidden_layers = 1",
        )
    return model


def reward_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a reward model, a sequence classification with one label, of the type in
    these values. `causal_lm_on_meta` builds it with `of_architecture`. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    check_config_values(values)
    kind = type(AutoConfig.for_model(values["model_type"]))
    if kind not in AutoModelForSequenceClassification._model_mapping:
        raise ModelError(
            "transformers has no reward model of this type",
            given=f"model_type={values['model_type']}",
            expected="a type of AutoModelForSequenceClassification",
            hint="model_type = 'llama'",
        )
    found: Any = AutoModelForSequenceClassification._model_mapping[kind]
    one_label = {"id2label": {"0": "reward"}, "label2id": {"reward": 0}, "num_labels": 1}
    return {**values, **one_label, "architectures": [found.__name__]}


def pretrained_causal_lm(path: str, reward: Mapping[str, Any] | None = None) -> "PreTrainedModel":
    """Load a model with its weights in float32 from a Hugging Face directory. `reward`: the configuration of
    a reward model; its score, if it is not in the files, has the same initial values in every process.

    No code that comes with the weights is run, nor any that they name. Raises ModelError.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedModel,
    )

    values = read_config(Path(path))
    check_config_values(values)
    if values.get("quantization_config") is not None:  # which also names kernels to download
        raise ModelError(
            "weights quantized in this format are not read",
            given=f"{path}: quantization_config",
            expected="weights in float32, bfloat16 or float16, or in a format of docs/compress.md",
            hint="the model's weights before quantization",
        )
    auto: Any = AutoModelForCausalLM if reward is None else AutoModelForSequenceClassification
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "trust_remote_code": False,
        "output_loading_info": True,
    }
    if reward is not None:
        given = {key: _decode_floats(value) for key, value in reward.items()}
        options["config"] = AutoConfig.for_model(given.pop("model_type"), **given)
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if reward is None else without_warnings():
            torch.default_generator.manual_seed(0)
            model, report = auto.from_pretrained(path, **options)
    except Exception as error:  # of the model's code, too
        raise ModelError(
            "the weights to start from cannot be loaded",
            given=f"{path}: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}",
            expected="a directory with config.json and safetensors files",
            hint=f"ls {path}",
        ) from error
    assert isinstance(model, PreTrainedModel)
    missing = sorted(report["missing_keys"])
    if missing and reward is None:  # which would have random values
        raise ModelError(
            "weights of the model are not in its files",
            given=f"{path}: no {', '.join(missing[:3])}{', ...' if missing[3:] else ''}",
            expected=f"every weight of {type(model).__name__}",
            hint="the folder of a causal language model",
        )
    return model


def check_predicts_tokens(config: Mapping[str, Any] | Path) -> None:
    """Raise ModelError for the configuration of a sequence classification, such as a reward model's: its
    files have no weights to predict tokens with, or those of tied embeddings, which were not trained to."""
    values = read_config(config) if isinstance(config, Path) else config
    named = values.get("architectures")
    for name in named if isinstance(named, list) else ():
        if str(name).endswith("ForSequenceClassification"):
            raise ModelError(
                "a model of rewards or classes predicts no tokens",
                given=name,
                expected="a causal language model",
                hint="transformers' AutoModelForSequenceClassification reads its folder: docs/preferences.md",
            )


def config_of_model(model: nn.Module) -> dict[str, Any] | None:
    """The configuration of a Hugging Face model, which may be in PEFT's wrapper, with its class, as JSON;
    None for other modules."""
    if (base := pretrained_base(model)) is None:
        return None
    values: dict[str, Any] = json.loads(base.config.to_json_string(use_diff=False))
    return values | {"architectures": [type(base).__name__]}


def check_forward(values: Mapping[str, Any]) -> None:
    """Raise ModelError if a forward of the model fails. See [Note: errors of configurations]."""
    if not _fails(_run_on_meta, values):
        return
    model = _build(values)
    if sum(parameter.numel() for parameter in model.parameters()) > _MAX_TRIAL_PARAMETERS:
        return
    try:
        with without_warnings():
            _run(model.to_empty(device="cpu"), "cpu")
    except Exception as error:
        raise _invalid(values, error, _run_on_meta) from error


def _build(values: Mapping[str, Any], *, of_architecture: bool = False) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {key: _decode_floats(value) for key, value in values.items()}
    # Of the files: the plan decides the compute dtype, and readers dequantize.
    for name in ("dtype", "torch_dtype", "quantization_config"):
        given.pop(name, None)
    config: PretrainedConfig = AutoConfig.for_model(given.pop("model_type"), **given)
    architecture = _architecture(values) if of_architecture else None
    if architecture is not None and isinstance(config, architecture.config_class or ()):
        _check_flash(config, architecture)
        return _on_meta(lambda: architecture._from_config(config))  # as the class below calls it
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            "the configuration is not of a causal language model",
            given=f"model_type={config.model_type}",
            expected="a type of AutoModelForCausalLM",
            hint="model_type = 'llama'",
        )
    _check_flash(config, AutoModelForCausalLM._model_mapping[type(config)])
    return _on_meta(lambda: AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def _on_meta(build: Callable[[], "PreTrainedModel"]) -> "PreTrainedModel":
    """Build a model on meta, with constants that are the same in every process."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _limited_modules():
        torch.default_generator.manual_seed(0)
        with RecordedConstruction() as recorded:
            model = build()
        recorded.attach(model)
        return with_parameters_on_meta(model)


def _check_flash(config: "PretrainedConfig", model_class: Any) -> None:
    """Raise ModelError for attention that transformers would replace by what it downloads for the class."""
    flash = getattr(model_class, "_compatible_flash_implementations", None)
    if flash and config._attn_implementation in _PACKAGES and config._attn_implementation not in flash:
        raise ModelError(
            f"the model does not support {config._attn_implementation}",
            given=f"model_type={config.model_type}, attn_implementation = {config._attn_implementation!r}",
            expected="an attention of this class, which needs no download",
            hint="attn_implementation = 'sdpa', or the configuration without this key",
        )


def _architecture(values: Mapping[str, Any]) -> "type[PreTrainedModel] | None":
    """The class of transformers that a saved configuration names, if any."""
    import transformers

    names = values.get("architectures")
    kind = getattr(transformers, str(names[0]), None) if isinstance(names, list) and names else None
    return kind if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) else None


@contextmanager
def _limited_modules() -> Iterator[None]:
    """Limit the number of modules that are created in the context, whichever keys determine it."""
    count = 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1
        if count > _MAX_MODULES:
            raise ModelError(
                "the model is too large",
                given=f"more than {_MAX_MODULES:,} modules",
                expected=f"at most {_MAX_MODULES:,}",
                hint="fewer layers or experts",
            )

    handle = register_module_module_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _run_on_meta(values: Mapping[str, Any]) -> object:
    with running_on_meta(torch.device("cpu")):
        return _run(_build(values), "meta")


def _run(model: nn.Module, device: str) -> object:
    ids = torch.zeros(1, _TRIAL_TOKENS, dtype=torch.long, device=device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return model.train()(input_ids=ids, use_cache=False)


def _fails(run: Callable[[Mapping[str, Any]], object], values: Mapping[str, Any]) -> bool:
    try:
        with without_warnings():
            run(values)
    except Exception:
        return True
    return False


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the warnings and log messages of a trial."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _invalid(
    values: Mapping[str, Any], error: Exception, run: Callable[[Mapping[str, Any]], object]
) -> ModelError:
    """The error for a configuration with which `run` fails. It names the keys without which it succeeds."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    deadline_s, at_fault = time.monotonic() + _TRIAL_S, []
    for key in values:
        others = {other: value for other, value in values.items() if other != key}
        if key != "model_type" and time.monotonic() < deadline_s and not _fails(run, others):
            at_fault.append(key)
    given = ", ".join(f"{key} = {shown(values[key])}" for key in at_fault)
    return ModelError(
        f"the model's configuration has an invalid {' or '.join(at_fault) or 'key'}",
        given=f"{given or 'model_type=' + values['model_type']}: {reason}",
        expected=f"keys and values that are valid together for model_type={values['model_type']}",
        hint=f"leave out {' or '.join(at_fault)}, whose default is valid" if at_fault else "fewer keys",
    )


def _decode_floats(value: Any) -> Any:
    """Decode infinities and NaN, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        text = value.get("__float__") if len(value) == 1 else None
        if text in ("NaN", "Infinity", "-Infinity"):
            return float(text)
        return {key: _decode_floats(inner) for key, inner in value.items()}
    return [_decode_floats(inner) for inner in value] if isinstance(value, list) else value
