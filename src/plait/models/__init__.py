"""What a model tells about itself: its units, its initial weights, its loss, its stages, what it saves."""

from plait.models.activation_memory import (
    AsOnDevice,
    BlockOutputs,
    activation_bytes,
    copy_to_meta,
    running_on_meta,
    watch_activations,
)
from plait.models.blocks import Blocks, Chain, FlopFacts, blocks_of, forward_inputs, unit_facts
from plait.models.huggingface import causal_lm_on_meta, pretrained_causal_lm, read_config
from plait.models.huggingface_names import Saved, SavedForm, StateNames, read_directly
from plait.models.init_weights import initialise, seeded, weights_alone
from plait.models.sharding.families import LINEAR_FORWARDS
from plait.models.sharding.plan import tensor_plan
from plait.models.stages.assign import plan_stages
from plait.models.stages.split import StageModule, foreign_modules, receiving, split_stage

__all__ = [
    "LINEAR_FORWARDS",
    "AsOnDevice",
    "BlockOutputs",
    "Blocks",
    "Chain",
    "FlopFacts",
    "Saved",
    "SavedForm",
    "StageModule",
    "StateNames",
    "activation_bytes",
    "blocks_of",
    "causal_lm_on_meta",
    "copy_to_meta",
    "foreign_modules",
    "forward_inputs",
    "initialise",
    "plan_stages",
    "pretrained_causal_lm",
    "read_config",
    "read_directly",
    "receiving",
    "running_on_meta",
    "seeded",
    "split_stage",
    "tensor_plan",
    "unit_facts",
    "watch_activations",
    "weights_alone",
]
