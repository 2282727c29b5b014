"""Trained text under the chat templates of models, as read from their renderings by hand. `make test` runs
this with the package trl, whose files of templates are read, in PYTHONPATH; else it is skipped."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import plait.data
from plait.errors import DataError
from support.chats import chats, tokenizer, trained

_TRL = importlib.util.find_spec("trl")
FOLDER = Path(_TRL.origin).parent / "chat_templates" if _TRL and _TRL.origin else None
pytestmark = pytest.mark.skipif(FOLDER is None, reason="trl is not installed")

Expected = dict[str, list[str] | str]  # an error, as a text
NO_CALLS = "does not render its tool calls"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
GLM_CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
LFM_CALL = "<|tool_call_start|>[add(a=1)]<|tool_call_end|>"
GEMMA_CALL = "<|tool_call>call:add{a:1}<tool_call|>"
MUSE_CALL = (
    '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
GPT_CALL = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
EMPTY = "<think>\n\n</think>\n\n"
FINAL_AGAIN = f"<|end|><|start|>assistant{FINAL}"
SELF, OTHER = " to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"


def turns(
    end: str, before: str = "", tools: list[str] | str = NO_CALLS, **others: list[str] | str
) -> Expected:
    """Trained texts of a template whose turns are the answers between `before` and `end`."""
    four, eight = f"{before}four{end}", f"{before}eight{end}"
    multi: list[str] | str = [four, eight]
    return {"single": [four], "multi": multi, "system": [four], "thinking": multi, "tools": tools} | others


def calls(call: str, end: str, before: str = "") -> list[str]:
    return [f"{before}{call}{end}", f"{before}three{end}"]


IM, LINE = "<|im_end|>", "<|im_end|>\n"
EOS = "<｜end▁of▁sentence｜>"
RAISES = "the chat template refuses"
QWEN3 = turns(IM, tools=calls(JSON_CALL, IM), thinking=["four" + IM, f"<think>\naha\n</think>\n\neight{IM}"])
QWEN3_5 = turns(IM, tools=calls(XML_CALL, IM), thinking=["four" + IM, f"aha\n</think>\n\neight{IM}"])
KEPT = [
    f"<think>\n{thought}\n</think>\n\n{text}{LINE}" for thought, text in (("hmm", "four"), ("aha", "eight"))
]
GEMMA4 = turns("<turn|>", tools=[f"{GEMMA_CALL}<|tool_response>", "three<turn|>"])
NEMOTRON = turns(IM, tools=[f"\n{XML_CALL}\n{IM}", f"three{IM}"])
NEMOTRON_LINES = NEMOTRON | {"thinking": ["four" + IM, f"aha\n</think>\neight{IM}"]}
NEMOTRON_FLAT = NEMOTRON | {"thinking": ["four" + IM, f"aha</think>eight{IM}"]}
TABLE: dict[str, Expected] = {
    "cohere": turns("<|END_OF_TURN_TOKEN|>", tools=RAISES),
    "cohere_training": turns("<|END_OF_TURN_TOKEN|>", tools=RAISES),
    "cohere2": turns("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", tools=RAISES),
    "cohere2_training": turns("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", tools=RAISES),
    "deepseek_r1_distill": turns(EOS),
    "deepseek_r1_distill_training": turns(EOS, "<｜Assistant｜>"),
    "deepseekv3": turns(EOS, tools=calls(DEEPSEEK_CALL, EOS)),
    "gemma": turns("<end_of_turn>", tools=RAISES, system=RAISES),
    "gemma_training": turns("<end_of_turn>\n", tools=RAISES, system=RAISES),
    "gemma3": turns("<end_of_turn>", tools=RAISES),
    "gemma3_training": turns("<end_of_turn>\n", tools=RAISES),
    "gemma4": GEMMA4,
    "gemma4_v2": GEMMA4 | {"tools": [f"{GEMMA_CALL}<turn|>", "three<turn|>"]},
    "gemma4_v4": GEMMA4,
    "gemma4_v5": GEMMA4 | {"thinking": ["four<turn|>", "<|channel>thought\naha\n<channel|>eight<turn|>"]},
    # turns end with the next one's header, which the template writes for the next message; the training
    # template writes it at the end, too
    "glm4moe": turns("", tools=calls(GLM_CALL, ""), thinking=["four", "\n<think>aha</think>\neight"]),
    "glm4moe_training": turns(
        "<|user|>",
        "\n<think></think>\n",
        tools=[f"\n<think></think>\n{GLM_CALL}<|observation|>", "\n<think></think>\nthree<|user|>"],
        thinking=["\n<think></think>\nfour<|user|>", "\n<think>aha</think>\neight<|user|>"],
    ),
    # a turn in the middle ends with another token than the last one, which ends generation
    "gptoss": turns(
        "<|return|>",
        FINAL,
        tools=[GPT_CALL, f"{FINAL}three<|return|>"],
        multi=[f"{FINAL}four", f"{FINAL}eight<|return|>"],
        thinking=[f"{FINAL}four", f"{ANALYSIS}aha{FINAL_AGAIN}eight<|return|>"],
    ),
    "gptoss_training": turns(
        "<|return|>",
        f"<|start|>assistant{FINAL}",
        tools=[f"<|start|>assistant{GPT_CALL}", f"<|start|>assistant{FINAL}three<|return|>"],
        multi=[f"<|start|>assistant{FINAL}four<|end|>", f"<|start|>assistant{FINAL}eight<|return|>"],
        thinking=[
            f"<|start|>assistant{FINAL}four<|end|>",
            f"<|start|>assistant{ANALYSIS}aha{FINAL_AGAIN}eight<|return|>",
        ],
    ),
    "idefics3": turns("<end_of_utterance>", " "),
    "smolvlm": turns("<end_of_utterance>", " "),
    "smolvlm_training": turns("<end_of_utterance>\n", " "),
    "lfm2": turns(IM),
    "lfm2_training": turns(LINE),
    "lfm2_v2": turns(IM, tools=calls(LFM_CALL, IM)),
    "lfm2_2_5": turns(
        LINE, tools=calls(LFM_CALL, LINE), thinking=["four" + LINE, f"<think>aha</think>eight{LINE}"]
    ),
    "llama3": turns("<|eot_id|>"),
    "llama3_training": turns("<|eot_id|>"),
    "llama3_1": turns("<|eot_id|>", tools=calls(LLAMA_CALL, "<|eot_id|>")),
    "llama3_2": turns("<|eot_id|>", tools=calls(LLAMA_CALL, "<|eot_id|>")),
    "llava_next": turns("</s>", " ", tools=RAISES),
    "muse_glimmer": turns(
        "<|eot|>",
        " to=user<|message|>",
        tools=[f" to=add<|message|>{MUSE_CALL}<|eot|>", " to=user<|message|>three<|eot|>"],
        thinking=[f"{SELF}hmm{OTHER}four<|eot|>", f"{SELF}aha{OTHER}eight<|eot|>"],
    ),
    "nemotron_3_nano": NEMOTRON_LINES,
    "nemotron_3_super": NEMOTRON_LINES,
    "nemotron_3_ultra": NEMOTRON_FLAT,
    "nemotron_3_5_lightning": NEMOTRON_FLAT,
    "phi3": turns("<|end|>\n</s>", multi=["four<|end|>", "eight<|end|>\n</s>"])
    | {"thinking": ["four<|end|>", "eight<|end|>\n</s>"]},
    "phi3_training": turns("<|end|>\n</s>", multi=["four<|end|>\n", "eight<|end|>\n</s>"])
    | {"thinking": ["four<|end|>\n", "eight<|end|>\n</s>"]},
    "qwen2_5": turns(IM, tools=calls(JSON_CALL, IM)),
    "qwen2_5_training": turns(LINE, "\n", tools=calls(JSON_CALL, LINE, "\n")),
    "qwen2_5_vl": turns(IM),
    "qwen3": QWEN3,
    "qwen3_training": turns(LINE, EMPTY, tools=calls(JSON_CALL, LINE, EMPTY), thinking=KEPT),
    "qwen3_instruct_2507": turns(IM, tools=calls(JSON_CALL, IM)),
    "qwen3_vl": turns(IM, tools=calls(JSON_CALL, IM)),
    "qwen3_5_think": QWEN3_5,
    "qwen3_5_think_training": turns(LINE, EMPTY, tools=calls(XML_CALL, LINE, EMPTY), thinking=KEPT),
    "qwen3_5_nothink": QWEN3_5,
    "qwen3_6": QWEN3_5,
    "qwen3_8": QWEN3_5 | {"thinking": [f"hmm\n</think>\n\nfour{IM}", f"aha\n</think>\n\neight{IM}"]},
}


@pytest.mark.parametrize("name", TABLE)
def test_the_trained_text_of_a_template_is_what_a_model_writes(name: str) -> None:
    assert FOLDER is not None
    made = tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    for shape, row in chats(made.chat_template).items():
        found: Any
        try:
            found = trained(plait.data.chat([row], made)[0], made)
        except DataError as error:
            found = str(error)
        expected = TABLE[name][shape]
        assert expected in found if isinstance(expected, str) else found == expected, f"{shape}: {found}"


EMPTY_BLOCKS = {"qwen3": EMPTY, "qwen3_5_think": "\n</think>\n\n", "nemotron_3_nano": "</think>"}


@pytest.mark.parametrize("name", EMPTY_BLOCKS)
def test_an_empty_think_block_is_trained_if_asked(name: str) -> None:
    assert FOLDER is not None
    made = tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    (sample,) = plait.data.chat([chats()["single"]], made, train_empty_thinking=True)
    assert trained(sample, made) == [f"{EMPTY_BLOCKS[name]}four{IM}"]
