"""lm-evaluation-harness on an engine, so that its tasks run under any plan:

    lm_eval.simple_evaluate(LM(engine, tokenizer), tasks=["arc_easy"])

Every rank makes the call. Requests are divided over the data ranks, each of which is one rank of the harness:
those of tp, pp and cp have the same requests. It returns results on the ranks of the first copy of the model,
elsewhere None. Tokens, prefixes and limits are those of its own class for Hugging Face models.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from plait.comm import all_gather, gather_texts
from plait.compat.values import decode, encode
from plait.engine.engine import Engine
from plait.engine.scoring import Row, rolling_rows, score_rows
from plait.errors import CompatError
from plait.plan.sampling import Sampling

_DEFAULT_LENGTH, _DEFAULT_NEW_TOKENS = 2048, 256  # of the harness
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LM(TemplateLM):
    """A language model for `lm_eval.simple_evaluate` and `lm_eval.evaluate`.

    max_length  tokens that the model reads at most; None: the model's positions, or 2048
    batch_size  rows in one call of the engine; scores do not depend on it
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int | None = None,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.engine, self.tokenizer, self.batch_size = engine, tokenizer, batch_size
        self._device = engine.device
        self._rank, self._world_size = engine.data_rank, engine.data_ranks
        config = getattr(engine.model, "config", None)
        self.max_length = max_length or getattr(config, "max_position_embeddings", None) or _DEFAULT_LENGTH

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode; by default as the tokenizer begins a text, unless the text has its beginning already."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(str(self.tokenizer.decode(self.prefix_token_id)))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation; without `add_generation_prompt` its last message is to be continued."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        rows = []
        for _names, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise CompatError(
                    "a continuation cannot be predicted",
                    given=f"{len(continuation)} tokens",
                    expected=f"1 to {self.max_length}",
                    hint="max_length=, for a model without positions; no empty continuations",
                )
            ids = (*(context or [self.prefix_token_id]), *continuation)[-self.max_length - 1 :]
            rows.append(Row(ids, len(ids) - len(continuation)))
        found = [(log_prob, is_greedy) for log_prob, is_greedy in self._scores(rows)]
        for (names, *_tokens), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", names, answer)
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
        """The log-probability of each text, in rolling windows: see engine/scoring.py."""
        texts = [request.args[0] for request in requests]
        of_texts = []
        for text in texts:
            ids = [self.prefix_token_id, *self.tok_encode(text)]
            of_texts.append([*rolling_rows(ids, range(0), self.max_length)])
        scores = iter(self._scores([row for rows in of_texts for row in rows]))
        sums = [sum(next(scores)[0] for _ in rows) for rows in of_texts]
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def _scores(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """`score_rows` of the rows of all data ranks; return those of this one's."""
        own = [(row.ids, row.first) for row in rows]
        everyone = [row for of_rank in self._gathered(own) for row in of_rank]
        scores = score_rows(self.engine, [Row(*row) for row in everyone], batch=self.batch_size)
        found = dict(zip(everyone, scores, strict=True))
        return [found[row] for row in own]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
        """Continue each context up to a text of `until`, an end token, or `max_gen_toks` tokens. If options
        say to sample, equal requests are drawn independently."""
        given = [(request.args[0], json.dumps(request.args[1], sort_keys=True)) for request in requests]
        texts, num_drawn = [""] * len(given), 0
        for options in sorted(
            {options for of_rank in self._gathered([o for _, o in given]) for options in of_rank}
        ):
            places = [place for place, (_, own) in enumerate(given) if own == options]
            found = self._generate([given[place][0] for place in places], options, num_drawn)
            for place, text in zip(places, found, strict=True):
                texts[place] = text
            num_drawn += sum(self._gathered(len(places)))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _generate(self, contexts: Sequence[str], options: str, num_drawn: int) -> list[str]:
        """The texts of contexts with the same options. Data ranks make as many calls of the engine.
        `num_drawn`: requests of all data ranks before."""
        sampling, until = self._sampling(json.loads(options))
        longest = self.max_length - sampling.max_new_tokens
        prompts = [(self.tok_encode(context) or [self.prefix_token_id])[-longest:] for context in contexts]
        texts, most = [], max(self._gathered(len(prompts)))
        for start in range(0, most, self.batch_size):
            own = prompts[start : start + self.batch_size]
            generated = self.engine.generate(own, sampling, tokenizer=self.tokenizer, start=num_drawn)
            num_drawn += sum(self._gathered(len(own)))
            for found in generated:
                text = str(self.tokenizer.decode(found.ids, skip_special_tokens=True))
                for stop in until:
                    text = text.partition(stop)[0]
                texts.append(text)
        return texts

    def _sampling(self, options: dict[str, Any]) -> tuple[Sampling, list[str]]:
        until = options.get("until") or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
        new = next((options[name] for name in names if options.get(name) is not None), _DEFAULT_NEW_TOKENS)
        if not 0 < new < self.max_length:
            raise CompatError(
                "no context fits before so many new tokens",
                given=f"max_gen_toks={new}",
                expected=f"1 to {self.max_length - 1}",
                hint=f"--gen_kwargs max_gen_toks={self.max_length // 2}",
            )
        given = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
        if not options.get("do_sample", bool(given.get("temperature"))):
            given["temperature"] = 0.0
        return Sampling(new, stop_strings=tuple(until), **({"temperature": 1.0} | given)), until

    def _gathered(self, value: Any) -> list[Any]:
        """The values of all data ranks, in order."""
        text = json.dumps(encode(value, []))
        texts = gather_texts(text, self.engine.data_group, self.device)
        return [decode(json.loads(each), ()) for each in texts]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Numbers of all ranks."""
        every = tensor.new_empty(self.world_size * tensor.numel())
        all_gather(every, tensor.reshape(-1).contiguous(), self.engine.data_group)
        return every

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all ranks, on rank `dst`: plain values."""
        every = self._gathered(obj)
        return every if self.rank == dst else None

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(torch.zeros(1, device=self.device))
