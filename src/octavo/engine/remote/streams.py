"""One request's outputs on their way to who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from octavo.outputs import CompletionOutput, RequestOutput


class OutputStream(AsyncIterator[RequestOutput]):
    """What came since the last output was taken is one output.

    Iterate, or set `on_news` and call `take_nowait`: then no task is switched for a token. Ends
    after the finished output. Raises `RequestCapacityError` when the scheduler refuses the request,
    `StepFailedError` or `EngineDeadError` when it is lost. Closing it aborts what still runs.
    """

    def __init__(self, request_id: str, leave: Callable[[str], object], *, merges: bool) -> None:
        """leave: told once when the request is not wanted any more before its end, from any thread.
        merges: outputs are differences, to be joined; else the last one says all."""
        self.request_id = request_id
        self.on_news: Callable[[bool], None] | None = None
        """Called in the event loop when there is something to take and was not before. True:
        nothing else is known to come, so that it is best taken now."""
        self.on_put: Callable[[RequestOutput], None] | None = None
        """Told of every output as it comes, before it is merged."""
        self.on_end: Callable[[BaseException | None], None] | None = None
        """Told once: of the last output (None), of an error, or that nobody waits any more (None).
        """
        self._leave, self._merges = leave, merges
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last output was taken, or the stream was closed."""
        return self._is_over

    def take_nowait(self) -> RequestOutput | None:
        """What there is; None if nothing. Raises what went wrong, once all before was taken."""
        output, self._pending = self._pending, None
        if output is not None:
            self._is_over |= output.finished
            return output
        if self._error is not None:
            error, self._error = self._error, None
            self._is_over = True
            raise error
        return None

    async def __anext__(self) -> RequestOutput:
        while True:
            output = self.take_nowait()
            if output is not None:
                return output
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close(self) -> None:
        """Abort the request if it still runs; closing twice is fine."""
        is_running = not self._is_over and not self.has_end
        self._is_over, self._pending, self._error = True, None, None
        if is_running:
            self._leave(self.request_id)
        self._tell_end(None)
        self._wake()

    abort = close

    def __del__(self) -> None:
        if not self._is_over and not self.has_end:
            self._leave(self.request_id)

    @property
    def has_end(self) -> bool:
        """Whether the end has come, taken or not."""
        ended = self._pending is not None and self._pending.finished
        return ended or self._error is not None

    # -- the engine's side

    def put(self, output: RequestOutput, is_latest: bool = False) -> None:
        """News. is_latest: no more have come from the engine so far."""
        if self._is_over:
            return
        if self.on_put is not None:
            self.on_put(output)
        if output.finished:
            self._tell_end(None)
        if self._pending is not None:
            self._pending = joined(self._pending, output) if self._merges else output
            return
        self._pending = output
        self._wake(is_latest)

    def fail(self, error: BaseException) -> None:
        """There will be no more outputs."""
        if not self._is_over:
            self._error = error
            self._tell_end(error)
            self._wake()

    def _tell_end(self, error: BaseException | None) -> None:
        on_end = self.on_end
        self.on_end = self.on_put = None
        if on_end is not None:
            on_end(error)

    def _wake(self, is_latest: bool = False) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_news is not None:
            self.on_news(is_latest)


def joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two differences of one request as one."""
    by_index = {output.index: output for output in first.outputs}
    for news in second.outputs:
        known = by_index.get(news.index)
        by_index[news.index] = news if known is None else _joined(known, news)
    second.outputs = [by_index[index] for index in sorted(by_index)]
    if second.prompt_logprobs is None:
        second.prompt_logprobs = first.prompt_logprobs
    return second


def _joined(first: CompletionOutput, second: CompletionOutput) -> CompletionOutput:
    second.text = first.text + second.text
    second.token_ids = first.token_ids + second.token_ids
    if first.logprobs is not None and second.logprobs is not None:
        second.logprobs = first.logprobs + second.logprobs
    return second
