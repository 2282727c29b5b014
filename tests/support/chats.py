"""Conversations, and a byte-level tokenizer with the special tokens of chat templates."""

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

_SPECIAL = """<s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|>
<start_of_turn> <end_of_turn> <|turn> <turn|> <|start|> <|end|> <|return|> <|call|> <|channel|> <|message|>
<|eot|> <|eom|>
<|user|> <|assistant|> <|system|> <|observation|> [gMASK] <sop> <think> </think> <tool_call> </tool_call>
<｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
<|END_OF_TURN_TOKEN|> <|END_RESPONSE|> <end_of_utterance>"""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "x"}}},
    },
}


def tokenizer(template: str | None = CHATML, merges: list[tuple[str, str]] | None = None) -> Any:
    """A token for each byte, special tokens, and one for each merge. It adds `<s>` to texts."""
    merges = merges or []
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    bare = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=merges))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in _SPECIAL.split()])
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bare.token_to_id("<s>"))])
    bare.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), begin])
    made = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.chat_template = template
    return made


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "id": "call00001", "function": function}],
    }


def chats(template: str = "tools") -> dict[str, dict[str, Any]]:
    """Rows of five shapes, with a list of tools if the template has it."""
    result = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "3"}
    thought = [user("two?"), answer("four", reasoning_content="hmm")]
    listed = {"tools": [TOOL]} if re.search(r"\btools\b", template) else {}
    return {
        "single": {"messages": [user("two?"), answer("four")]},
        "multi": {"messages": [user("two?"), answer("four"), user("six?"), answer("eight")]},
        "system": {"messages": [{"role": "system", "content": "brief"}, user("two?"), answer("four")]},
        "thinking": {"messages": [*thought, user("six?"), answer("eight", reasoning_content="aha")]},
        "tools": {"messages": [user("1+2?"), call({"a": 1}), result, answer("three")]} | listed,
    }


def trained(sample: Any, made: Any) -> list[str]:
    """The texts of a sample's runs of trained tokens."""
    runs: list[list[int]] = [[]]
    for label in sample["labels"]:
        if label != -100:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [made.decode(run) for run in runs if run]
