"""What a model tells about itself: its units, its initial weights, its loss, what it saves for backward."""

from plait.models.build import causal_lm_on_meta, pretrained_causal_lm, read_config
from plait.models.cross_entropy import ALONE
from plait.models.facts import Blocks, FlopFacts, blocks_of, unit_facts
from plait.models.loss import Loss, choose_loss, forward_inputs
from plait.models.materialise import initialise, seeded
from plait.models.saved import meta_twin, saved_bytes, watch_saved
from plait.models.tensor import tensor_plan
from plait.models.tensor_families import LINEAR_FORWARDS

__all__ = [
    "ALONE",
    "LINEAR_FORWARDS",
    "Blocks",
    "FlopFacts",
    "Loss",
    "blocks_of",
    "causal_lm_on_meta",
    "choose_loss",
    "forward_inputs",
    "initialise",
    "meta_twin",
    "pretrained_causal_lm",
    "read_config",
    "saved_bytes",
    "seeded",
    "tensor_plan",
    "unit_facts",
    "watch_saved",
]
