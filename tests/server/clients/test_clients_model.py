"""The default model says the same through every client as in the offline engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from octavo import LLM, SamplingParams

QUESTION = "What is the capital of France?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
NUM = 12
FLAGS = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 512}


@pytest.fixture(scope="module")
def url(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model-server")
    command = [sys.executable, "-m", "octavo", "serve", str(default_model_path), "--port", "0"]
    command += ["--device", "cpu"]
    for name, value in FLAGS.items():
        command += ["--" + name.replace("_", "-"), str(value)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    with (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, env=env, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "octavo serves" in line:
            yield line.split(" at ", 1)[1].split()[0]
            break
    else:
        pytest.fail((folder / "err").read_text())
    process.terminate()
    process.wait(30)


@pytest.fixture(scope="module")
def expected(default_model_path: Path) -> str:
    llm = LLM(str(default_model_path), device="cpu", **FLAGS)  # type: ignore[arg-type]
    try:
        (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=NUM))
        return output.outputs[0].text
    finally:
        llm.close()


@pytest.mark.model
def test_every_client_says_the_same(url: str, expected: str) -> None:
    from langchain_openai import ChatOpenAI

    assert "Paris" in expected
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    chat = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=NUM
    )
    assert chat.choices[0].message.content == expected
    with client.responses.stream(
        model=model, input=QUESTION, temperature=0, max_output_tokens=NUM
    ) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(deltas) == expected
    with claude.messages.stream(
        model=model, messages=MESSAGES, max_tokens=NUM, extra_body={"temperature": 0}
    ) as said:
        assert "".join(said.text_stream) == expected
    chain = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",  # type: ignore[arg-type]
        model=model,
        temperature=0,
        max_tokens=NUM,  # type: ignore[call-arg]
    )
    assert chain.invoke(QUESTION).content == expected

    async def both() -> tuple[str, str]:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as one,
            anthropic.AsyncAnthropic(base_url=url, api_key="none") as other,
        ):
            response, message = await asyncio.gather(
                one.responses.create(
                    model=model, input=QUESTION, temperature=0, max_output_tokens=NUM
                ),
                other.messages.create(
                    model=model, messages=MESSAGES, max_tokens=NUM, extra_body={"temperature": 0}
                ),
            )
        return response.output_text, message.content[0].text  # type: ignore[union-attr]

    assert asyncio.run(both()) == (expected, expected)
