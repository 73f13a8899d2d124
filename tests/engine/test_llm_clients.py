"""Clients of an `LLM` take turns under the fair policy, and are refused where nothing looks."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import InvalidRequestError

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, seed=1)


def order_of_ends(llm: LLM, clients: list[str]) -> list[str]:
    """Whose requests ended, in order, of one prompt each, one at a time."""
    streams = [
        llm.stream([7 + i] * 4, PARAMS, client_id=client, final_only=True)
        for i, client in enumerate(clients)
    ]
    ends = []
    for client, stream in zip(clients, streams, strict=True):
        (output,) = list(stream)
        assert output.metrics.finished_s is not None
        ends.append((output.metrics.finished_s, client))
    return [client for _, client in sorted(ends)]


def test_clients_take_turns(tiny_model_path: Path) -> None:
    options = {"load_format": "dummy", "max_num_seqs": 1, "num_gpu_blocks_override": 64}
    with LLM(model=str(tiny_model_path), scheduling_policy="fair", swap_space=0, **options) as llm:
        assert order_of_ends(llm, list("aaab")) == list("abaa")
        message = [{"role": "user", "content": "x"}]
        outputs = llm.chat([message, message], PARAMS, use_tqdm=False, client_id=["a", "b"])
        assert len(outputs) == 2
        assert llm._engine.engine.core.scheduler.roster.clients.service().keys() == {"a", "b"}


def test_a_client_that_nothing_looks_at_is_refused(tiny_model_path: Path) -> None:
    with LLM(model=str(tiny_model_path), load_format="dummy", num_gpu_blocks_override=64) as llm:
        with pytest.raises(InvalidRequestError, match="--scheduling-policy fair") as error:
            llm.generate([[5, 6]], PARAMS, use_tqdm=False, client_id="a")
        assert error.value.parameter == "client_id"
        with pytest.raises(InvalidRequestError, match="client_id"):
            llm.generate([[5], [6]], PARAMS, use_tqdm=False, client_id=["a"])
