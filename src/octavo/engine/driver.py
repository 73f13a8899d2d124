"""Steps an engine for callers that wait in one thread: each gets its own requests' outputs."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from octavo.engine.engine import Engine
from octavo.engine.input import Params, Prompt
from octavo.errors import StepFailedError
from octavo.outputs import OutputKind, RequestOutput


class Driver:
    """A mailbox for each request that somebody waits for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids = itertools.count()
        self._mail: dict[str, deque[RequestOutput]] = {}
        self._failures: dict[str, StepFailedError] = {}
        """Of those that somebody waits for: the step that each was aborted with."""
        self.after_step: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Requests that somebody waits for."""
        return len(self._mail)

    def add(
        self,
        prompt: Prompt,
        params: Params,
        kind: OutputKind,
        priority: int = 0,
        client_id: str = "",
    ) -> str:
        """Queue a request under a new id, which is returned. Raises as `Engine.add`."""
        request_id = str(next(self._ids))
        self._mail[request_id] = deque()
        try:
            self._engine.add(
                request_id, prompt, params, priority=priority, client_id=client_id, kind=kind
            )
        except BaseException:
            del self._mail[request_id]
            raise
        return request_id

    def stream(self, request_id: str) -> RequestStream:
        """The request's outputs as they come."""
        return RequestStream(self, request_id)

    def next_output(self, request_id: str) -> RequestOutput:
        """Step until there is news of a request. A step that fails is an error of those it was
        aborted for; the others go on."""
        mail = self._mail[request_id]
        while not mail:
            self._check_alive(request_id)
            self._step()
        return mail.popleft()

    def run_to_end(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        """The last outputs of requests of the kind FINAL_ONLY, in their order. Raises
        `StepFailedError` as soon as one of them was aborted."""
        from tqdm import tqdm

        ends: dict[str, RequestOutput] = {}
        inbox: deque[RequestOutput] = deque()
        """One for all, so that a step costs what it brings, however many wait."""
        for request_id in request_ids:
            inbox += self._mail[request_id]
            self._mail[request_id] = inbox
        with tqdm(total=len(request_ids), unit="request", disable=not use_tqdm) as bar:
            for request_id in request_ids:
                while request_id not in ends:
                    if not inbox:
                        self._check_alive(request_id)
                        self._step()
                    for failed_id in self._failures:
                        if self._mail.get(failed_id) is inbox and failed_id not in ends:
                            self._check_alive(failed_id)
                    while inbox:
                        output = inbox.popleft()
                        ends[output.request_id] = output
                        bar.update()
        return [ends[request_id] for request_id in request_ids]

    def forget(self, request_ids: list[str]) -> None:
        """Abort those that still run and stop keeping mail for them."""
        for request_id in request_ids:
            self._failures.pop(request_id, None)
            if self._mail.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def close(self) -> None:
        """Nobody waits any more."""
        self._mail.clear()
        self._failures.clear()

    def _step(self) -> None:
        """One step of everything that runs; outputs go to whoever waits for them."""
        try:
            outputs = self._engine.step()
        except StepFailedError as error:
            told = [i for i in error.request_ids if i in self._mail]
            self._failures.update(dict.fromkeys(told, error))
            if not error.request_ids:
                raise
            return
        for output in outputs:
            mail = self._mail.get(output.request_id)
            if mail is not None:
                mail.append(output)
        if self.after_step is not None:
            self.after_step()

    def _check_alive(self, request_id: str) -> None:
        failure = self._failures.get(request_id)
        if failure is not None:
            raise StepFailedError(str(failure), request_ids=failure.request_ids) from (
                failure.__cause__
            )
        self._engine.check_open()
        if not self._engine.has(request_id):
            raise StepFailedError(
                f"request {request_id} was aborted: the step in which it ran was interrupted",
                request_ids=[request_id],
            )


class RequestStream(Iterator[RequestOutput]):
    """A request's outputs as they come. Closing or dropping it aborts what still runs."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        self.request_id = request_id
        """As in its outputs, `LLM.events` and `LLM.block_tables`."""
        self._driver: Driver | None = driver
        weakref.finalize(self, driver.forget, [request_id])

    def __next__(self) -> RequestOutput:
        if self._driver is None:
            raise StopIteration
        try:
            output = self._driver.next_output(self.request_id)
        except BaseException:
            self.close()
            raise
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Abort the request if it still runs; closing twice is fine."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.forget([self.request_id])
