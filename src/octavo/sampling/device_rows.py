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
from octavo.sampling.packed import unpack
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
        columns = unpack(seq.packed for seq in seqs)
        self.all_plain = bool(columns["plain"].all())
        """Greedy and nothing else."""
        if self.all_plain:
            return
        self.num_rows = len(columns)
        top_k, greedy = columns["top_k"], columns["greedy"]
        self.top_k = np.where((top_k > 0) & (top_k < vocab_size), top_k, 0).astype(np.int32)
        self.top_p = columns["top_p"].copy()
        self.min_p = columns["min_p"].astype(np.float32)
        limited = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0)
        self.modes = np.where(greedy, GREEDY, np.where(limited, TOP, DRAW)).astype(np.int32)
        temperatures = np.where(greedy, 1.0, columns["temperature"])
        self.rates = (math.log2(math.e) / temperatures).astype(np.float32)
        self.top_rows = np.flatnonzero(self.modes == TOP).astype(np.int32)
        self.draws = not greedy.all()
        self.penalties = np.stack(
            [columns[name] for name in ("repetition", "frequency", "presence")]
        ).astype(np.float32)
        self._keys = columns["key"].copy()
        edited = columns["bannable"] | columns["counted"] | columns["biased"]
        self._edited = np.flatnonzero(edited).tolist()
        self._bannable = set(np.flatnonzero(columns["bannable"]).tolist())
        biased = np.flatnonzero(columns["biased"]).tolist()
        self._biases = {row: _bias_of(self.seqs[row]) for row in biased}
        self.allowed_rows = np.flatnonzero(columns["allowed"])
        self.allowed_places = np.concatenate(
            [
                np.zeros(0, np.int64),
                *(row * vocab_size + self._allowed(row) for row in self.allowed_rows.tolist()),
            ]
        )
        self.raw_rows = np.flatnonzero(columns["logprobs"] & columns["allowed"]).tolist()
        """Rows that want logprobs and lose most of their logits: copied before."""
        others = np.flatnonzero(columns["logprobs"] & ~columns["allowed"]).tolist()
        self.logprob_rows: list[int] = self.raw_rows + others
        self.num_top = [self.seqs[row].params.num_logprobs or 0 for row in self.logprob_rows]

    def _allowed(self, row: int) -> NDArray[np.int64]:
        return np.unique(np.array(self.seqs[row].params.allowed_token_ids, np.int64))

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
