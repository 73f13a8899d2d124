"""A long run of random requests with random aborts: every answer comes, and nothing stays behind.

    python benchmarks/soak.py --seconds 600 [--model M] [--device cuda] ...

Requests of all kinds (greedy, sampled, several samples, beams, penalties, stop tokens, logprobs)
arrive while the engine runs; a share of them is aborted at a random moment; the pool is small, so
that there are preemptions, and its size changes now and then. Greedy requests that ran to their end
are asked again alone at the end of the run: their tokens must be the same (in float32). At the end
nothing may run, and free + cached blocks must be the pool.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import CapacityError
from octavo.outputs import OutputKind, RequestOutput

_ASKED_AGAIN = 64


class Soak:
    """One engine under random load."""

    def __init__(self, llm: LLM, seed: int, most_live: int) -> None:
        self._llm, self._rng, self._most_live = llm, random.Random(seed), most_live
        self._built = llm._engine
        self._engine = self._built.engine
        self._vocab = llm.arch.vocab_size
        self._prefix = [self._rng.randrange(self._vocab) for _ in range(300)]
        self._live: dict[str, tuple[list[int], Any]] = {}
        self.greedy: list[tuple[list[int], int, list[int]]] = []
        """(prompt, tokens, answer) of greedy requests that ran to their end."""
        self.num_added = self.num_aborted = self.num_ended = self.num_tokens = 0
        self.num_steps = self.num_resizes = 0

    def prompt(self) -> list[int]:
        """Some begin alike."""
        rng = self._rng
        own = [rng.randrange(self._vocab) for _ in range(rng.choice((1, 5, 17, 60, 200)))]
        return self._prefix[: rng.choice((0, 0, 16, 100, 300))] + own

    def params(self) -> SamplingParams | BeamSearchParams:
        """One of all kinds of requests."""
        rng = self._rng
        most, kind = rng.choice((1, 8, 40, 120, 300)), rng.randrange(12)
        hot: dict[str, Any] = {"temperature": 0.9, "max_tokens": most, "seed": rng.randrange(99)}
        if kind < 5:
            return SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        if kind == 5:
            return BeamSearchParams(beam_width=rng.choice((2, 4)), max_tokens=min(most, 40))
        if kind == 6:
            return SamplingParams(**hot, n=rng.choice((2, 4)))
        if kind == 7:
            return SamplingParams(**hot, top_p=0.9, top_k=rng.choice((0, 40)), logprobs=3)
        if kind == 8:
            return SamplingParams(**hot, repetition_penalty=1.2, frequency_penalty=0.3)
        if kind == 9:
            stop = [rng.randrange(self._vocab) for _ in range(200)]
            return SamplingParams(**hot, stop_token_ids=stop, min_tokens=min(3, most))
        if kind == 10:
            return SamplingParams(temperature=0.0, max_tokens=min(most, 8), prompt_logprobs=1)
        return SamplingParams(**hot, min_p=0.05)

    def add(self) -> None:
        """One more request."""
        request_id, prompt, params = f"r{self.num_added}", self.prompt(), self.params()
        self.num_added += 1
        try:
            self._engine.add(
                request_id, {"prompt_token_ids": prompt}, params, kind=OutputKind.FINAL_ONLY
            )
        except CapacityError:
            return
        self._live[request_id] = (prompt, params)

    def step(self) -> None:
        """One step of the engine, with what happens around it."""
        rng = self._rng
        while len(self._live) < self._most_live and rng.random() < 0.7:
            self.add()
        if self._live and rng.random() < 0.05:
            request_id = rng.choice(list(self._live))
            self._engine.abort(request_id)
            del self._live[request_id]
            self.num_aborted += 1
        if rng.random() < 0.001:
            self._resize()
        self.take(self._engine.step())
        self.num_steps += 1
        if self.num_steps % 500 == 0:
            self._engine.core.kv.check_integrity()

    def take(self, outputs: list[RequestOutput]) -> None:
        """Keep the answers of greedy requests."""
        for output in outputs:
            if not output.finished or output.request_id not in self._live:
                continue
            prompt, params = self._live.pop(output.request_id)
            self.num_ended += 1
            self.num_tokens += sum(len(c.token_ids) for c in output.outputs)
            is_greedy = isinstance(params, SamplingParams) and params.temperature == 0
            if is_greedy and params.prompt_logprobs is None and len(self.greedy) < _ASKED_AGAIN:
                self.greedy.append((prompt, params.max_tokens, list(output.outputs[0].token_ids)))

    def _resize(self) -> None:
        num_bytes = self._built.plan.kv_bytes
        try:
            self._llm.resize_kv_cache(int(num_bytes * self._rng.choice((0.8, 0.9, 1.1, 1.25))))
            self.num_resizes += 1
        except CapacityError:
            pass

    def drain(self) -> None:
        """No more requests: those that run end, and nothing stays behind."""
        while self._engine.has_unfinished():
            self.take(self._engine.step())
        assert not self._live, f"no answer came for {sorted(self._live)}"
        kv = self._engine.core.kv
        kv.check_integrity()
        ledger = self._llm.memory_report().ledger
        assert ledger.num_physical_blocks == 0, "blocks are still held by nobody"
        assert kv.num_free_blocks == kv.num_blocks, "free and cached blocks are not the pool"

    def num_different(self) -> int:
        """Greedy answers that are others when asked again, alone."""
        count = 0
        for prompt, num_tokens, answer in self.greedy:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            (again,) = self._llm.generate([prompt], params, use_tqdm=False)
            count += again.outputs[0].token_ids != answer
        return count


def device_bytes() -> int:
    """Held by torch on the GPU."""
    import torch

    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def main() -> None:
    """Run, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blocks", type=int, default=1500)
    parser.add_argument("--live", type=int, default=96, help="most requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    options = {} if args.model is None else {"model": args.model}
    with LLM(
        **options, dtype=args.dtype, device=args.device, max_num_seqs=128, max_model_len=1024,
        max_num_batched_tokens=512, num_gpu_blocks_override=args.blocks,
        skip_tokenizer_init=True, load_format=args.load_format,
    ) as llm:  # fmt: skip
        soak = Soak(llm, args.seed, args.live)
        begun = last = time.perf_counter()
        early = 0
        while (now := time.perf_counter()) - begun < args.seconds:
            soak.step()
            if not early and now - begun > args.seconds / 4:
                early = device_bytes()
            if now - last > 30:
                last = now
                print(f"{now - begun:5.0f} s  {soak.num_steps:,} steps", flush=True)
        late = device_bytes()
        soak.drain()
        report = llm.memory_report()
        different = soak.num_different()
        print(
            f"{soak.num_steps:,} steps, {soak.num_added:,} requests, {soak.num_ended:,} ended, "
            f"{soak.num_aborted:,} aborted, {soak.num_tokens:,} tokens, "
            f"{soak.num_resizes} resizes, {report.num_preemptions:,} preemptions\n"
            f"drained: nothing held, free + cached = {report.ledger.num_blocks:,} blocks\n"
            f"device memory after a quarter and at the end: {early:,} and {late:,} B\n"
            f"greedy answers that differ when asked again alone: {different} of {len(soak.greedy)}"
        )
        assert late <= early or late - early < 64 << 20, "device memory grows"
        assert args.dtype != "float32" or not different


if __name__ == "__main__":
    main()
