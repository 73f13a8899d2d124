"""`AsyncEngine`: an engine in its own process, for the event loop of a server.

This process validates, tokenizes and detokenizes, without torch; the other decides and computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from octavo.config import EngineConfig
from octavo.engine.arguments import check_priority
from octavo.engine.input import InputProcessor, Params, Prompt, check_streamable
from octavo.engine.output import OutputProcessor
from octavo.engine.remote import wire
from octavo.engine.remote.life import EngineLife, error_of
from octavo.engine.remote.options import EngineInfo, EngineOptions, EngineState
from octavo.engine.remote.streams import OutputStream
from octavo.engine.remote.text import TextSide
from octavo.errors import EngineDeadError, InvalidRequestError, OctavoError, StepFailedError
from octavo.outputs import OutputKind, RequestKVUsage, RequestMetrics, RequestOutput
from octavo.stats import EngineStats

if TYPE_CHECKING:
    from octavo.sched import SeqUpdate
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights.progress import Progress

logger = logging.getLogger("octavo")
_AT_A_TIME = 8
"""So many sequences' news become outputs, and are handed out, before the next ones: whoever writes
them at once has written the first when the last are not looked at yet."""

__all__ = ["AsyncEngine", "EngineInfo", "EngineOptions", "EngineState", "OutputStream"]


class AsyncEngine(EngineLife):
    """Starts the engine's process, restarts it when it ends, and hands out streams of outputs.

    All methods belong to the event loop in which `start` ran.
    """

    def __init__(self, config: EngineConfig, *, options: EngineOptions | None = None) -> None:
        super().__init__(config, options=options)
        self.stats = EngineStats()
        """The latest; of a running engine at most some 0.3 s old."""
        self.tokenizer: Tokenizer | None = None
        self._text: TextSide | None = None
        self._streams: WeakValueDictionary[str, OutputStream] = WeakValueDictionary()
        """Who drops a stream wants nothing more of it."""
        self._known: dict[str, tuple[RequestMetrics, RequestKVUsage]] = {}
        """Of the requests whose end a message tells, while it is taken in."""
        self._held: dict[str, RequestOutput] = {}
        """Last outputs of requests that a stop string has ended, until their cost is told."""
        self._leaving: set[str] = set()
        """Aborted requests of which late news may still come."""
        self._outputs = OutputProcessor(None)
        self._handlers[wire.News] = self._take_news

    async def start(self, progress: Progress | None = None) -> None:
        """As `EngineLife.start`."""
        self._loop = asyncio.get_running_loop()
        await super().start(progress)

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended."""
        return 0 if self._text is None else len(self._outputs) + len(self._held)

    async def _load_text(self) -> None:
        """The tokenizer, once: a restarted engine has the same."""
        if self._text is None:
            load = asyncio.to_thread(TextSide.load, self.info.config)
            self._text = await load
            self.tokenizer = self._text.tokenizer
        inputs = InputProcessor(self.tokenizer, **self._limits)
        self._inputs, self._outputs = inputs, OutputProcessor(self.tokenizer)

    def _lose_all(self, error: OctavoError) -> None:
        """Nobody will answer those who wait."""
        for request_id, output in list(self._held.items()):
            self._deliver_end(request_id, output)
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        if self._text is not None:
            self._outputs.keep_only(set())
        self._leaving.clear()
        super()._lose_all(error)

    # -- requests

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        priority: int = 0,
        kind: OutputKind = OutputKind.DELTA,
        client_id: str = "",
        max_kv_share: float | None = None,
    ) -> OutputStream:
        """Send a request; its outputs come by the stream.

        Raises `InvalidRequestError` or `RequestCapacityError` for what can be seen from here,
        `EngineDeadError` unless the engine is ready. What only the scheduler sees comes by the
        stream.
        """
        self._check_ready()
        check_priority(priority, self.info.config)
        request, text = self._inputs.process(
            request_id,
            prompt,
            params,
            arrival_s=time.monotonic(),
            priority=priority,
            client_id=client_id,
            max_kv_share=max_kv_share,
        )
        if kind is not OutputKind.FINAL_ONLY:
            check_streamable(params)
        if self.has_request(request_id):
            raise InvalidRequestError(
                f"request_id {request_id!r} belongs to a request that has not ended: choose "
                "another id, or wait for its end",
                parameter="request_id",
            )
        self._outputs.add(request, text, params, kind)
        self._inputs.accepted(params)
        stream = OutputStream(request_id, self._leave, merges=kind is OutputKind.DELTA)
        self._streams[request_id] = stream
        self._send(wire.Add(request))
        return stream

    def has_request(self, request_id: str) -> bool:
        """Whether one has this id that has not ended, or of which late news may still come, which
        would be taken for another's."""
        is_here = self._outputs.has(request_id) or request_id in self._held
        return is_here or request_id in self._leaving

    def abort(self, request_id: str) -> bool:
        """Drop a request; its blocks come back within one step. False if it is not here."""
        is_here = self._text is not None and self._outputs.has(request_id)
        if not is_here and request_id not in self._held:
            return False
        self._leaving.add(request_id)
        self._send(wire.Abort([request_id]))
        self._lose(
            request_id,
            StepFailedError(f"request {request_id} was aborted", request_ids=[request_id]),
        )
        return True

    def _leave(self, request_id: str) -> None:
        """A stream was dropped, perhaps by the garbage collector in another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the engine with it
            self._loop.call_soon_threadsafe(self.abort, request_id)

    # -- text

    @property
    def _texts(self) -> TextSide:
        if self._text is None:
            raise EngineDeadError(f"the engine is not ready: {self.why_not_ready}")
        return self._text

    async def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids; a long text is cut in another thread, so that others are not held up.

        max_tokens: raise `RequestCapacityError` for one that is sure to have many more, without
        cutting all of it.
        """
        return await self._texts.encode(text, add_special_tokens, max_tokens=max_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._texts.decode(token_ids, skip_special_tokens)

    async def chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """A conversation as token ids, through the model's template or the given one. max_tokens:
        as of `encode`. Raises `InvalidRequestError` for messages that it refuses, `TokenizerError`
        without a template."""
        return await self._texts.chat_prompt(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_tokens=max_tokens,
            **variables,
        )

    # -- messages

    def _take_news(self, message: wire.News) -> None:
        if message.stats is not None:
            self.stats = message.stats
        self._leaving.difference_update(message.aborted)
        if message.live is not None:
            self._drop_unknown(message.live)
        for refusal in message.refused:
            error = error_of(refusal.kind, refusal.text, refusal.parameter)
            self._lose(refusal.request_id, error)
        for hit in message.hit:
            for request_id in hit.request_ids:
                self._lose(request_id, StepFailedError(hit.text, request_ids=hit.request_ids))
        self._known = {ended.request_id: (ended.metrics, ended.kv) for ended in message.ended}
        if message.updates:
            self._take_updates(message.updates)
        for request_id, (metrics, kv) in self._known.items():
            held = self._held.pop(request_id, None)
            if held is not None:
                held.metrics, held.kv, held.num_cached_tokens = metrics, kv, kv.cached_tokens
                self._deliver_end(request_id, held)

    def _drop_unknown(self, live: list[str]) -> None:
        """The engine must not work for nobody, should a message ever have been lost."""
        here = (self._outputs.has, self._held.__contains__, self._leaving.__contains__)
        lost = [i for i in live if not any(has(i) for has in here)]
        if lost:
            self._send(wire.Abort(lost, is_leak=True))

    def _take_updates(self, updates: Sequence[SeqUpdate]) -> None:
        assert self._process is not None, "this is news of it"
        is_latest = not self._process.has_more
        if not is_latest:
            self._hand_out(updates, False)
            return
        for first in range(0, len(updates), _AT_A_TIME):
            self._hand_out(updates[first : first + _AT_A_TIME], True)

    def _hand_out(self, updates: Sequence[SeqUpdate], is_latest: bool) -> None:
        known, streams = self._known, self._streams
        outputs, stopped = self._outputs.process(updates, time.monotonic(), known.get)
        for seq_id, stop_string in stopped:
            owner = next(u.request_id for u in updates if u.seq_id == seq_id)
            self._send(wire.Finish(owner, seq_id, stop_string))
        for output in outputs:
            request_id = output.request_id
            stream = streams.get(request_id)
            if stream is None:
                continue  # left while the others of this step were told
            if not output.finished:
                self._put(stream, output, is_latest)
            elif request_id in known:
                self._deliver_end(request_id, output)
            else:
                self._held[request_id] = output

    def _deliver_end(self, request_id: str, output: RequestOutput) -> None:
        self._held.pop(request_id, None)
        stream = self._streams.pop(request_id, None)
        self._num_in_a_row = 0
        if stream is not None:
            self._put(stream, output, False)

    def _put(self, stream: OutputStream, output: RequestOutput, is_latest: bool) -> None:
        """Whoever is told at once may fail: that ends this request, and no other's."""
        try:
            stream.put(output, is_latest)
        except Exception as error:
            logger.exception("request %s: its reader failed", stream.request_id)
            self._streams.pop(stream.request_id, None)
            self.abort(stream.request_id)
            stream.fail(error)

    def _lose(self, request_id: str, error: OctavoError) -> None:
        self._outputs.drop(request_id)
        self._held.pop(request_id, None)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)
