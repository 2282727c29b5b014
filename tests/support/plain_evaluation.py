"""The reference of `plait evaluate`: plain transformers, one document at a time, without padding."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer


def plain_scores(
    folder: Path, texts: list[str], context: int, stride: int, dtype: torch.dtype = torch.float32
) -> dict[str, float]:
    """Loss and perplexities in strided windows, and LAMBADA's accuracy by greedy generation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    start = [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
    loss_sum, tokens, correct = 0.0, 0, 0
    for text in texts:
        ids = torch.tensor([start + tokenizer.encode(text, add_special_tokens=False)])
        done, stop = 1, min(context, ids.shape[1])
        while done < ids.shape[1]:
            window = ids[:, max(0, stop - context) : stop]
            new = stop - done
            with torch.no_grad():
                logits = model(window).logits[0, -new - 1 : -1]
            loss_sum += F.cross_entropy(logits, window[0, -new:], reduction="sum").item()
            done, stop = stop, min(stop + stride, ids.shape[1])
        tokens += ids.shape[1] - 1

        words = text.split()
        before = text.rstrip().removesuffix(words[-1]).rstrip()
        prompt = start + tokenizer.encode(before, add_special_tokens=False)
        target = tokenizer.encode(text.rstrip(), add_special_tokens=False)[len(prompt) - 1 :]
        prompt_ids = torch.tensor([prompt[-(context - len(target)) :]])
        generated = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=len(target),
            do_sample=False,
            pad_token_id=start[0],
        )
        correct += generated[0, prompt_ids.shape[1] :].tolist() == target
    words = sum(len(text.split()) for text in texts)
    return {
        "documents": len(texts),
        "tokens": tokens,
        "words": words,
        "loss": loss_sum / tokens,
        "perplexity": math.exp(loss_sum / tokens),
        "word_perplexity": math.exp(loss_sum / words),
        "bits_per_byte": loss_sum / math.log(2) / sum(len(text.encode()) for text in texts),
        "last_words": len(texts),
        "correct": correct,
        "last_word_accuracy": correct / len(texts),
    }


def assert_same_scores(ours: dict[str, float], plain: dict[str, float]) -> None:
    """Counts are equal, the other scores to 1e-6 relative."""
    for name, value in plain.items():
        allowed = 0.0 if isinstance(value, int) else 1e-6 * abs(value)
        assert abs(ours[name] - value) <= allowed, f"{name}: {ours[name]} and {value}"
