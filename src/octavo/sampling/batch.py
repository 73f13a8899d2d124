"""What sampling remembers of each sequence, and how a step's rows are grouped by what they need."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from octavo.request import SamplerParams
from octavo.sampling.layout import RowLayout
from octavo.sampling.packed import pack
from octavo.sampling.penalties import TokenCounts
from octavo.sampling.random import stream_key

GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing by it would overflow."""


class SeqSampling:
    """One sequence's parameters and the part of its past that they look at."""

    __slots__ = ("counts", "greedy", "key", "num_output", "packed", "params", "plain",
                 "single_bans", "tail", "word_bans")  # fmt: skip

    def __init__(
        self, params: SamplerParams, prompt_token_ids: Iterable[int], sample_index: int
    ) -> None:
        self.params = params
        self.num_output = 0
        self.key = stream_key(params.seed, sample_index)
        self.greedy = params.temperature < GREEDY_BELOW or params.top_k == 1
        self.counts = TokenCounts.for_params(params, prompt_token_ids)
        self.single_bans = tuple(word[0] for word in params.bad_words if len(word) == 1)
        # Longer words by their last token but one: most steps need one look into this.
        self.word_bans: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in params.bad_words:
            if len(word) > 1:
                self.word_bans.setdefault(word[-2], []).append((word[:-1], word[-1]))
        longest = max((len(word) for word in params.bad_words), default=0)
        self.tail: deque[int] | None = deque(maxlen=longest - 1) if longest > 1 else None
        self.plain = self.greedy and not (
            self.counts is not None
            or params.bad_words
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.min_tokens_masked_ids
            or params.num_logprobs is not None
        )
        self.packed = pack(
            params,
            self.key,
            greedy=self.greedy,
            plain=self.plain,
            counted=self.counts is not None,
        )

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that a sequence it forks from has generated."""
        if self.counts is None and self.tail is None:
            self.num_output += len(token_ids)
            return
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take in a sampled token."""
        self.advance()
        self.learn(token_id)

    def advance(self) -> None:
        """A token was drawn, whichever: the next draw is for the next position."""
        self.num_output += 1

    def learn(self, token_id: int) -> None:
        """Which token was drawn: what penalties and bad words of several tokens look at."""
        if self.counts is not None:
            self.counts.count(token_id)
        if self.tail is not None:
            self.tail.append(token_id)

    def banned_ids(self) -> list[int]:
        """Tokens that bad words and `min_tokens` forbid at this position (may repeat)."""
        banned = list(self.single_bans)
        if self.tail:
            past = tuple(self.tail)
            for prefix, last in self.word_bans.get(past[-1], ()):
                if past[-len(prefix) :] == prefix:
                    banned.append(last)
        if self.num_output < self.params.min_tokens:
            banned += self.params.min_tokens_masked_ids
        return banned


class SamplingState:
    """Per-sequence sampling state of a runner.

    A preempted sequence keeps its state: the tokens that were sampled stay sampled.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._seqs: dict[int, SeqSampling] = {}
        self._num_special = 0
        """Of them, those that are not plain."""
        self._layout: RowLayout | None = None

    def __len__(self) -> int:
        return len(self._seqs)

    def add(
        self,
        seq_id: int,
        params: SamplerParams,
        prompt_token_ids: Iterable[int],
        sample_index: int = 0,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """Start a sequence; `seq_id` was never used before. It has output only as a fork."""
        assert seq_id not in self._seqs, f"sequence {seq_id} is already known to the sampler"
        seq = self._seqs[seq_id] = SeqSampling(params, prompt_token_ids, sample_index)
        self._num_special += not seq.plain
        if len(output_token_ids):
            seq.extend(output_token_ids)

    @property
    def all_plain(self) -> bool:
        """Whether all known sequences are greedy and nothing else: nobody counts what they draw."""
        return not self._num_special

    def params(self, seq_id: int) -> SamplerParams:
        """How a known sequence is sampled."""
        return self._seqs[seq_id].params

    def append(self, seq_id: int, token_id: int) -> None:
        """Record a sampled token: `advance` and `learn`."""
        self._seqs[seq_id].append(token_id)

    def advance(self, seq_id: int) -> None:
        """A token of the sequence was drawn, whichever: the next draw is for the next position.

        All that sampling needs of a sequence whose parameters do not need its past.
        """
        self._seqs[seq_id].advance()

    def learn(self, seq_id: int, token_id: int) -> None:
        """Tell which token an earlier `advance` stands for; a forgotten sequence is fine."""
        seq = self._seqs.get(seq_id)
        if seq is not None:
            seq.learn(token_id)

    def sequences(self, seq_ids: Sequence[int]) -> list[SeqSampling]:
        """Parameters and past of known sequences."""
        return [self._seqs[seq_id] for seq_id in seq_ids]

    def forget(self, seq_id: int) -> None:
        """Drop a sequence; one that never came here is fine."""
        seq = self._seqs.pop(seq_id, None)
        self._num_special -= seq is not None and not seq.plain

    def layout(self, rows: Sequence[int], device: torch.device) -> RowLayout:
        """The rows grouped by what they need; kept while the same sequences run on."""
        seq_ids = list(rows)
        layout = self._layout
        if layout is None or layout.seq_ids != seq_ids or layout.device != device:
            seqs = [self._seqs[seq_id] for seq_id in seq_ids]
            layout = RowLayout(seq_ids, seqs, self.vocab_size, device)
            self._layout = layout
        return layout
