"""Facts and forms of a model: its blocks, initial weights, sharding, stages, activations and file names."""

from plait.models.blocks import Blocks, Chain, FlopFacts, active_parameters, default_groups, unit_facts
from plait.models.huggingface import (
    causal_lm_on_meta,
    check_config_values,
    check_forward,
    check_integers,
    check_predicts_tokens,
    config_of_model,
    pretrained_causal_lm,
    read_config,
    reward_config,
    without_warnings,
)
from plait.models.huggingface_names import (
    FileKeys,
    SavedGroup,
    SaveFormat,
    StateNames,
    buffers_like_weights,
    map_file_keys,
)
from plait.models.init_weights import initialize_weights, parameter_only_modules, seeded_rng
from plait.models.mask_decisions import PackedRows, decided_on_cpu, documents_of, remember_sources
from plait.models.sharding.layout import with_layout
from plait.models.sharding.plan import build_tp_plan
from plait.models.stages.assign import DataflowCheck, plan_stages
from plait.models.stages.dataflow import blocks_of
from plait.models.stages.shell import copy_to_meta
from plait.models.stages.split import StageModule, foreign_modules, receiving, split_stage
from plait.models.task import (
    IGNORED_LABEL,
    LOSS_WEIGHTS,
    OF_TOKENS,
    RecordedBatch,
    Task,
    cast_entries,
    check_attends_backwards,
    forward_inputs,
    forward_names,
    label_keys,
    pretrained_base,
    takes_keyword,
    task_of,
    without_cache,
)
from plait.models.tokens import Numbering, check_documents_apart, check_tokens_apart, numbering_of
from plait.models.trace.modes import device_kernels
from plait.models.trace.prepare import running_on_meta, token_batch
from plait.models.trace.saved import BlockOutputs, activation_bytes, watch_activations
from plait.models.transformers_types import (
    has_pretrained_model,
    input_embedding,
    is_model_output_class,
    is_pretrained_model,
    linear_forwards,
    vocabulary_size,
)

__all__ = [
    "IGNORED_LABEL",
    "LOSS_WEIGHTS",
    "OF_TOKENS",
    "BlockOutputs",
    "Blocks",
    "Chain",
    "DataflowCheck",
    "FileKeys",
    "FlopFacts",
    "Numbering",
    "PackedRows",
    "RecordedBatch",
    "SaveFormat",
    "SavedGroup",
    "StageModule",
    "StateNames",
    "Task",
    "activation_bytes",
    "active_parameters",
    "blocks_of",
    "buffers_like_weights",
    "build_tp_plan",
    "cast_entries",
    "causal_lm_on_meta",
    "check_attends_backwards",
    "check_config_values",
    "check_documents_apart",
    "check_forward",
    "check_integers",
    "check_predicts_tokens",
    "check_tokens_apart",
    "config_of_model",
    "copy_to_meta",
    "decided_on_cpu",
    "default_groups",
    "device_kernels",
    "documents_of",
    "foreign_modules",
    "forward_inputs",
    "forward_names",
    "has_pretrained_model",
    "initialize_weights",
    "input_embedding",
    "is_model_output_class",
    "is_pretrained_model",
    "label_keys",
    "linear_forwards",
    "map_file_keys",
    "numbering_of",
    "parameter_only_modules",
    "plan_stages",
    "pretrained_base",
    "pretrained_causal_lm",
    "read_config",
    "receiving",
    "remember_sources",
    "reward_config",
    "running_on_meta",
    "seeded_rng",
    "split_stage",
    "takes_keyword",
    "task_of",
    "token_batch",
    "unit_facts",
    "vocabulary_size",
    "watch_activations",
    "with_layout",
    "without_cache",
    "without_warnings",
]
