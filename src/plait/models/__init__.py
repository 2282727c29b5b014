"""What a model tells about itself: its units, its initial weights, its loss, its stages, what it saves."""

from plait.models.build import causal_lm_on_meta, pretrained_causal_lm, read_config
from plait.models.chain import Chain
from plait.models.cross_entropy import ALONE
from plait.models.facts import Blocks, FlopFacts, blocks_of, unit_facts
from plait.models.file_names import Saved, SavedForm, StateNames, read_directly
from plait.models.loss import Loss, choose_loss, forward_inputs
from plait.models.materialise import initialise, seeded, weights_alone
from plait.models.saved import AsOnDevice, BlockOutputs, meta_twin, running_on_meta, saved_bytes, watch_saved
from plait.models.stage_plan import plan_stages
from plait.models.stages import StageModule, cut_stage, foreign_modules, receiving
from plait.models.tensor import tensor_plan
from plait.models.tensor_families import LINEAR_FORWARDS

__all__ = [
    "ALONE",
    "LINEAR_FORWARDS",
    "AsOnDevice",
    "BlockOutputs",
    "Blocks",
    "Chain",
    "FlopFacts",
    "Loss",
    "Saved",
    "SavedForm",
    "StageModule",
    "StateNames",
    "blocks_of",
    "causal_lm_on_meta",
    "choose_loss",
    "cut_stage",
    "foreign_modules",
    "forward_inputs",
    "initialise",
    "meta_twin",
    "plan_stages",
    "pretrained_causal_lm",
    "read_config",
    "read_directly",
    "receiving",
    "running_on_meta",
    "saved_bytes",
    "seeded",
    "tensor_plan",
    "unit_facts",
    "watch_saved",
    "weights_alone",
]
