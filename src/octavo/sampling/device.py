"""Sampling on a GPU: a launch waits for nothing, the host reads the answer later.

Same order and definitions as `sampler.sample`, and the same random numbers; the same tokens are
kept by top_k, top_p and min_p. One thing differs: a row with top_k or top_p draws among the kept
tokens in the order of the vocabulary, not of their probability, so that a seed's token may be
another than on a CPU. For a given seed it is the same in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.ops.gpu.logprobs import token_logprobs
from octavo.ops.gpu.sampling import (
    MAX_SPLITS,
    Runs,
    argmax_into,
    argmax_scratch,
    draw_all,
    edit_logits,
    num_tiles,
    restore_logits,
)
from octavo.ops.gpu.sampling_top import CAPACITY, MAX_ROWS, PAIRS, draw_top, top_scratch
from octavo.plan import TokenLogprobs
from octavo.sampling.batch import SamplingState
from octavo.sampling.device_rows import DeviceRows
from octavo.sampling.sampler import Sampled, not_finite
from octavo.sampling.select import looks_at_all, top_candidates
from octavo.sampling.staging import HostBytes, offsets_of, upload

_TOP_ELEMENTS = 1 << 23
"""Logits whose most probable tokens are looked for at a time."""


class DeviceDraw:
    """One launch: its tokens are on the device, and on their way to the host.

    rows: of the sequences; most: top tokens that a row with logprobs wants, the most of all rows.
    """

    def __init__(
        self, sampler: DeviceSampler, seq_ids: list[int], rows: DeviceRows, most: int
    ) -> None:
        self.seq_ids, self._sampler, self._rows, self._most = seq_ids, sampler, rows, most
        self._hosts: tuple[HostBytes, HostBytes] | None = sampler.take_hosts()
        n = len(seq_ids)
        k = 0 if rows.all_plain else len(rows.logprob_rows)
        self._starts, size = offsets_of([8 * n, 4 * n, 4 * k, 4 * k, 8 * k * most, 4 * k * most])
        self._held = torch.empty(size, dtype=torch.uint8, device=sampler.device)
        self.token_ids = self._piece(0, torch.int64, n)
        """[num_rows] int64 on the device."""
        self.finite = self._piece(1, torch.int32, n)
        """[num_rows] int32: 0 where a row had a NaN, or no finite maximum."""
        self._num_logprobs = k
        if k:
            self.logprobs = self._piece(2, torch.float32, k)
            self.ranks = self._piece(3, torch.int32, k)
            self.top_ids = self._piece(4, torch.int64, k * most).view(k, most)
            self.top_logprobs = self._piece(5, torch.float32, k * most).view(k, most)

    def _piece(self, which: int, dtype: torch.dtype, num: int) -> Tensor:
        start = self._starts[which]
        return self._held[start : start + num * dtype.itemsize].view(dtype)

    @property
    def hosts(self) -> tuple[HostBytes, HostBytes]:
        """(Of what goes to the device, of what comes back)."""
        assert self._hosts is not None, "this draw has been collected"
        return self._hosts

    def send(self) -> None:
        """Queue the copy to the host."""
        self.hosts[1].at_least(len(self._held)).copy_(self._held, non_blocking=True)

    def collect(self) -> Sampled:
        """Tokens and logprobs, once; the caller has waited for an event recorded after the launch.

        Raises `NumericsError` that names the sequences whose logits were not finite.
        """
        hosts, n = self.hosts, len(self.seq_ids)
        token_ids = hosts[1].read(self._starts[0], np.int64, (n,)).tolist()
        finite = hosts[1].read(self._starts[1], np.int32, (n,)).tolist()
        logprobs = self._logprobs(token_ids, hosts[1])
        self._hosts = None
        self._sampler.give_hosts(hosts)
        if not all(finite):
            bad = [seq_id for seq_id, fine in zip(self.seq_ids, finite, strict=True) if not fine]
            raise not_finite(bad)
        return Sampled(token_ids, logprobs)

    def _logprobs(self, token_ids: list[int], host: HostBytes) -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(self.seq_ids)
        k, most = self._num_logprobs, self._most
        if not k:
            return found
        logprobs = host.read(self._starts[2], np.float32, (k,)).tolist()
        ranks = host.read(self._starts[3], np.int32, (k,)).tolist()
        top_ids = host.read(self._starts[4], np.int64, (k, most)).tolist()
        top_logprobs = host.read(self._starts[5], np.float32, (k, most)).tolist()
        wanted = zip(self._rows.logprob_rows, self._rows.num_top, strict=True)
        for i, (row, num) in enumerate(wanted):
            top = tuple(zip(top_ids[i][:num], top_logprobs[i][:num], strict=True))
            found[row] = TokenLogprobs(token_ids[row], logprobs[i], ranks[i], top)
        return found


class DeviceSampler:
    """The memory that launches share; they follow one another on one stream.

    max_rows: most rows of a launch.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.vocab_size, self.max_rows, self.device = vocab_size, max_rows, device
        self.argmax_scratch = argmax_scratch(max_rows, device)
        self._runs = Runs.of(max_rows, vocab_size, device)
        self._top_scratch = top_scratch(max_rows, device)

        def column(dtype: torch.dtype) -> Tensor:
            return torch.empty(max_rows, dtype=dtype, device=device)

        self._bests, self._leasts = column(torch.float32), column(torch.float32)
        self._totals = column(torch.float64)
        self._tops, self._log_sums = column(torch.float32), column(torch.float32)
        self._hosts: list[tuple[HostBytes, HostBytes]] = []
        self._rows = DeviceRows([], vocab_size)
        self._constant: dict[str, Tensor] | None = None

    def take_hosts(self) -> tuple[HostBytes, HostBytes]:
        """Host memory for one launch, until `give_hosts`."""
        if self._hosts:
            return self._hosts.pop()
        return HostBytes(self.device), HostBytes(self.device)

    def give_hosts(self, hosts: tuple[HostBytes, HostBytes]) -> None:
        """Of a launch that is done with it."""
        self._hosts.append(hosts)

    @torch.inference_mode()
    def launch(self, logits: Tensor, seq_ids: Sequence[int], state: SamplingState) -> DeviceDraw:
        """Sample one token a row, on the current stream and without waiting for it.

        logits: [num_rows, vocab] float32, contiguous; used up. `state` is not advanced:
        `state.advance` does that, at once. Sequences whose parameters need their past must have
        learned all of it before.
        """
        assert logits.shape == (len(seq_ids), self.vocab_size), f"logits {tuple(logits.shape)}"
        assert len(seq_ids) <= self.max_rows, f"{len(seq_ids)} rows, at most {self.max_rows}"
        assert logits.dtype == torch.float32 and logits.is_contiguous()
        seq_ids = list(seq_ids)
        seqs = state.sequences(seq_ids)
        if seqs != self._rows.seqs:
            self._rows, self._constant = DeviceRows(seqs, self.vocab_size), None
        rows = self._rows
        most = 0
        if not rows.all_plain:
            most = min(max(rows.num_top, default=0), self.vocab_size)
        draw = DeviceDraw(self, seq_ids, rows, most)
        if rows.all_plain:
            argmax_into(logits, draw.token_ids, draw.finite, self.argmax_scratch)
        else:
            self._launch(logits, rows, draw)
        draw.send()
        return draw

    def _launch(self, logits: Tensor, rows: DeviceRows, draw: DeviceDraw) -> None:
        of = self._upload(rows, draw)
        raw = logits.index_select(0, of["raw_rows"]) if rows.raw_rows else logits
        if "allowed_rows" in of:
            flat = logits.view(-1)
            kept = flat.index_select(0, of["allowed_places"])
            logits.index_fill_(0, of["allowed_rows"], -torch.inf)
            flat.index_copy_(0, of["allowed_places"], kept)
        olds: Tensor | None = None
        if "edit_rows" in of:
            olds = edit_logits(
                logits, of["edit_rows"], of["edit_ids"], of["edit_counts"], of["edit_biases"],
                of["repetition"], of["frequency"], of["presence"],
            )  # fmt: skip
        self._draw(logits, of, draw)
        num_raw, num_logprobs = len(rows.raw_rows), len(rows.logprob_rows)
        if num_raw:
            self._look(raw, of, 0, num_raw, draw)
        if num_raw < num_logprobs:
            if olds is not None:
                restore_logits(logits, of["edit_rows"], of["edit_ids"], olds)
            self._look(logits, of, num_raw, num_logprobs, draw)

    def _upload(self, rows: DeviceRows, draw: DeviceDraw) -> dict[str, Tensor]:
        changing = rows.changing()
        if self._constant is None:
            constant = rows.constant()
            found = upload(constant | changing, draw.hosts[0], self.device)
            self._constant = {name: found[name] for name in constant}
            return found
        if changing:
            return self._constant | upload(changing, draw.hosts[0], self.device)
        return self._constant

    def _draw(self, logits: Tensor, of: dict[str, Tensor], draw: DeviceDraw) -> None:
        """The tokens, from logits as they are to be drawn from."""
        if "modes" not in of:
            argmax_into(logits, draw.token_ids, draw.finite, self.argmax_scratch)
            return
        draw_all(
            logits, of["modes"], of["rates"], of["numbers"], self._runs, draw.token_ids,
            draw.finite, self._bests, self._leasts, self._totals,
        )  # fmt: skip
        if "top_rows" in of:
            draw_top(
                logits, of["top_rows"], of["rates"], of["min_p"], of["top_k"], of["top_p"],
                of["numbers"], self._bests, self._leasts, self._totals, self._top_scratch,
                draw.token_ids,
            )  # fmt: skip

    def _look(
        self, logits: Tensor, of: dict[str, Tensor], first: int, last: int, draw: DeviceDraw
    ) -> None:
        """Logprobs of the drawn tokens and of the most probable ones, from unchanged logits."""
        rows, token_rows = of["source"][first:last], of["token_rows"][first:last]
        token_logprobs(
            logits, rows, token_rows, draw.token_ids, self._runs, draw.logprobs[first:last],
            draw.ranks[first:last], self._tops, self._log_sums,
        )  # fmt: skip
        most = draw.top_ids.shape[1]
        if not most:
            return
        sorts = looks_at_all(most, self.vocab_size)
        at_once = max(1, (_TOP_ELEMENTS // 8 if sorts else _TOP_ELEMENTS) // self.vocab_size)
        for start in range(0, last - first, at_once):
            some = slice(start, min(start + at_once, last - first))
            out = slice(first + some.start, first + some.stop)
            own = logits.index_select(0, rows[some])
            ids = top_candidates(own, most)
            draw.top_ids[out] = ids
            other = own.gather(1, ids) - self._tops[some, None]
            draw.top_logprobs[out] = other - self._log_sums[some, None]


def device_sampling_bytes(max_rows: int, vocab_size: int) -> int:
    """What a `DeviceSampler` holds. Launches take a little more while they run: results, uploads,
    and where logprobs are wanted, copies of rows (`_TOP_ELEMENTS` logits at a time; rows with
    `allowed_token_ids` all at once)."""
    per_row = 2 * 4 * MAX_SPLITS + 4 * 4 * num_tiles(vocab_size) + 4 * 4 + 8
    return max_rows * per_row + min(max_rows, MAX_ROWS) * (CAPACITY + PAIRS) * 8
