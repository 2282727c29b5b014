"""The reference of `plait evaluate`: plain transformers, a document or choice at a time, not padded."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from plait.data.tokenizer import save_tokenizer, train_tokenizer


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


def plain_task_scores(
    folder: Path, questions: list[tuple[list[tuple[str, str]], int]], context: int
) -> tuple[dict[str, float], list[tuple[float, bool]]]:
    """The scores of a task, and (log-probability, is greedy) of each choice, from (context, continuation) of
    each question's choices and the index of the right one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    pairs, right, normed = [], 0, 0
    for choices, answer in questions:
        found = []
        for before, continuation in choices:
            spaces = len(before) - len(before.rstrip())
            ids = tokenizer.encode(before + continuation)
            known = len(tokenizer.encode(before[: len(before) - spaces]))
            ids, known = (ids, known) if before else ([tokenizer.eos_token_id, *ids], 1)
            targets = torch.tensor(ids[known:])
            with torch.no_grad():
                logits = model(torch.tensor([ids[:-1][-context:]])).logits[0, -len(targets) :]
            log_prob = -F.cross_entropy(logits, targets, reduction="sum").item()
            found.append((log_prob, logits.argmax(-1).tolist() == targets.tolist()))
        sums = [log_prob for log_prob, _ in found]
        per_character = [value / (len(text) - 1) for value, (_, text) in zip(sums, choices, strict=True)]
        right += found[0][1] if len(found) == 1 else sums.index(max(sums)) == answer
        normed += per_character.index(max(per_character)) == answer
        pairs += found
    n = len(questions)
    values = {"examples": n, "acc": right / n}
    if len(pairs) == n:
        return values | {"perplexity": math.exp(-sum(log_prob for log_prob, _ in pairs) / n)}, pairs
    return values | {"acc_norm": normed / n}, pairs


def trained_folder(folder: Path, known: list[str], texts: list[str], context: int) -> None:
    """Save a small Llama that knows some texts by heart, and a tokenizer of all of them."""
    tokenizer = train_tokenizer(iter(texts), 300, None)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=context,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = [[tokenizer.eos_token_id, *tokenizer.encode(text)][:context] for text in known]
    for _ in range(40):
        for ids in samples:
            batch = torch.tensor([ids])
            model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
