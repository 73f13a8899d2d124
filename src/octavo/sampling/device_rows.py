"""What a launch of sampling on a GPU needs from the host, as numpy columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.ops.gpu.sampling import DRAW, GREEDY, TOP
from octavo.sampling.adjust import bans_of
from octavo.sampling.batch import SeqSampling
from octavo.sampling.random import uniforms

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of single logits; each (row, token) at most once."""

    rows: Ints
    ids: Ints
    counts: Floats
    """Times the token was output; -1 where no penalty looks at it."""
    biases: Floats
    """Added first; -inf bans."""


_NO_IDS, _NO_VALUES = np.zeros(0, np.int32), np.zeros(0, np.float32)


class DeviceRows:
    """The columns of some sequences that do not change while they run on.

    seqs: in the order of the rows.
    """

    def __init__(self, seqs: Sequence[SeqSampling], vocab_size: int) -> None:
        self.seqs, self.vocab_size = list(seqs), vocab_size
        self.all_plain = all(seq.plain for seq in seqs)
        """Greedy and nothing else."""
        if self.all_plain:
            return
        params = [seq.params for seq in seqs]
        self.num_rows = len(params)
        self.top_k = np.array(
            [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params], dtype=np.int32
        )
        self.top_p = np.array([p.top_p for p in params])
        self.min_p = np.array([p.min_p for p in params], dtype=np.float32)
        greedy = np.array([seq.greedy for seq in seqs])
        limited = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0)
        self.modes = np.where(greedy, GREEDY, np.where(limited, TOP, DRAW)).astype(np.int32)
        temperatures = np.array([p.temperature for p in params])
        temperatures[greedy] = 1.0
        self.rates = (math.log2(math.e) / temperatures).astype(np.float32)
        self.top_rows = np.flatnonzero(self.modes == TOP).astype(np.int32)
        self.draws = not greedy.all()
        self.penalties = np.array(
            [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params],
            dtype=np.float32,
        ).T.copy()
        self._keys = np.array([seq.key for seq in seqs], dtype=np.uint64)
        self._biases = {row: _bias_of(seq) for row, seq in enumerate(seqs) if seq.params.logit_bias}
        self._bannable = {
            row
            for row, p in enumerate(params)
            if p.bad_words or (p.min_tokens and p.min_tokens_masked_ids)
        }
        counted = {row for row, seq in enumerate(seqs) if seq.counts is not None}
        self._edited = sorted(self._bannable | counted | set(self._biases))
        allowed = {
            row: p.allowed_token_ids
            for row, p in enumerate(params)
            if p.allowed_token_ids is not None
        }
        self.allowed_rows = np.array(sorted(allowed), dtype=np.int64)
        self.allowed_places = np.concatenate(
            [np.zeros(0, np.int64)]
            + [
                row * vocab_size + np.unique(np.array(allowed[row], np.int64))
                for row in sorted(allowed)
            ]
        )
        logprobs = [row for row, p in enumerate(params) if p.num_logprobs is not None]
        self.raw_rows = [row for row in logprobs if row in allowed]
        """Rows that want logprobs and lose most of their logits: copied before."""
        self.logprob_rows = self.raw_rows + [row for row in logprobs if row not in allowed]
        self.num_top = [params[row].num_logprobs or 0 for row in self.logprob_rows]

    def numbers(self) -> NDArray[np.float64]:
        """[num_rows] uniform numbers in [0, 1), for each sequence's next position."""
        positions = np.array([seq.num_output for seq in self.seqs], dtype=np.uint64)
        return uniforms(self._keys, positions)

    def constant(self) -> dict[str, NDArray[Any]]:
        """What is uploaded once while the same sequences run on; what there is none of is left
        out. `source` and `token_rows`: for each row with logprobs where its unchanged logits are
        (in the copies for the first, `raw_rows`), and where its token."""
        found: dict[str, NDArray[Any]] = {}
        if self.draws:
            found |= {"top_p": self.top_p, "modes": self.modes, "top_k": self.top_k,
                      "rates": self.rates, "min_p": self.min_p}  # fmt: skip
        if len(self.top_rows):
            found["top_rows"] = self.top_rows
        if self._edited:
            found |= {
                name: values
                for name, values in zip(
                    ("repetition", "frequency", "presence"), self.penalties, strict=True
                )
            }
        if len(self.allowed_rows):
            found |= {"allowed_rows": self.allowed_rows, "allowed_places": self.allowed_places}
        if self.raw_rows:
            found["raw_rows"] = np.array(self.raw_rows, dtype=np.int64)
        if self.logprob_rows:
            token_rows = np.array(self.logprob_rows, dtype=np.int32)
            source = token_rows.copy()
            source[: len(self.raw_rows)] = np.arange(len(self.raw_rows))
            found |= {"source": source, "token_rows": token_rows}
        return found

    def changing(self) -> dict[str, NDArray[Any]]:
        """What each launch uploads: uniform numbers, and edits if there are any."""
        found: dict[str, NDArray[Any]] = {}
        if self.draws:
            found["numbers"] = self.numbers()
        edits = self.edits() if self._edited else None
        if edits is not None:
            found |= {"edit_rows": edits.rows, "edit_ids": edits.ids,
                      "edit_counts": edits.counts, "edit_biases": edits.biases}  # fmt: skip
        return found

    def edits(self) -> Edits | None:
        """Bans, biases and penalties at the sequences' positions; None: there are none."""
        parts: list[tuple[Ints, Floats, Floats | None]] = []
        rows: list[int] = []
        for row in self._edited:
            part = self._edits_of(row)
            if len(part[0]):
                parts.append(part)
                rows.append(row)
        if not parts:
            return None
        sizes = np.array([len(part[0]) for part in parts])
        biases = np.zeros(int(sizes.sum()), np.float32)
        for (_, _, own), last in zip(parts, np.cumsum(sizes).tolist(), strict=True):
            if own is not None:
                biases[last - len(own) : last] = own
        return Edits(
            rows=np.repeat(np.array(rows, dtype=np.int32), sizes),
            ids=np.concatenate([part[0] for part in parts]),
            counts=np.concatenate([part[1] for part in parts]),
            biases=biases,
        )

    def _edits_of(self, row: int) -> tuple[Ints, Floats, Floats | None]:
        """(ids, counts, biases; None: all 0) of one row."""
        seq = self.seqs[row]
        ids, biases = self._biases.get(row, (_NO_IDS, _NO_VALUES))
        banned = bans_of(seq, self.vocab_size) if row in self._bannable else set()
        if banned:
            bans = np.array(sorted(banned), dtype=np.int32)
            left = np.isin(ids, bans, invert=True)
            ids = np.concatenate([ids[left], bans])
            biases = np.concatenate([biases[left], np.full(len(bans), -np.inf, np.float32)])
        if seq.counts is None:
            return ids, np.full(len(ids), -1, np.float32), biases
        own_ids, counts = seq.counts.ids, seq.counts.counts
        if not len(ids):
            return own_ids, counts, None
        own_biases = np.zeros(len(own_ids), np.float32)
        places = np.array([-1 if at is None else at for at in seq.counts.places(ids.tolist())])
        both = places >= 0
        own_biases[places[both]] = biases[both]
        return (
            np.concatenate([own_ids, ids[~both]]),
            np.concatenate([counts, np.full(int((~both).sum()), -1, np.float32)]),
            np.concatenate([own_biases, biases[~both]]),
        )


def _bias_of(seq: SeqSampling) -> tuple[Ints, Floats]:
    """(ids, sums of the biases), each id once."""
    ids, where = np.unique(
        np.array([token_id for token_id, _ in seq.params.logit_bias], dtype=np.int32),
        return_inverse=True,
    )
    biases = np.zeros(len(ids), np.float32)
    np.add.at(biases, where, np.array([b for _, b in seq.params.logit_bias], dtype=np.float32))
    return ids, biases
