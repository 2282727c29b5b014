"""The instance checks against classes of transformers, which look classes up where a release has them."""

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.falcon import modeling_falcon
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

from plait.models.transformers_types import (
    is_conv1d,
    is_model_output_class,
    is_pretrained_config,
    is_pretrained_model,
    linear_forwards,
)


def test_every_class_is_found_where_it_is_looked_up() -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert is_pretrained_config(config)
    assert is_pretrained_model(LlamaForCausalLM(config))
    assert is_conv1d(Conv1D(2, 2))
    assert is_model_output_class(ModelOutput)
    assert linear_forwards()[Conv1D.forward] is True
    assert linear_forwards()[modeling_falcon.FalconLinear.forward] is False
    assert len(linear_forwards()) == 3
