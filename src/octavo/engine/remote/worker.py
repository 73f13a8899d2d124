"""The engine's process: takes messages, steps, and tells what came of it.

    python -m octavo.engine.remote.worker IN OUT PARENT_PID LOG_LEVEL LOG_FORMAT

One thread, so that nothing happens between two lines of a decision. While there is work messages
are looked for between steps and never waited for. The process lives as long as its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import zmq

from octavo.config import EngineConfig
from octavo.engine.remote import wire
from octavo.engine.remote.leaks import LeakCheck
from octavo.engine.remote.log_lines import LogFormat, set_up_logging
from octavo.engine.remote.questions import Questions
from octavo.engine.remote.snapshot import about, stats_of
from octavo.errors import EngineDeadError, InvalidRequestError, OctavoError, StepFailedError
from octavo.events import EventKind

if TYPE_CHECKING:
    from octavo.engine.built import BuiltEngine
    from octavo.sched.watch import PoolWatch

logger = logging.getLogger("octavo")

_STATS_S = 0.25
"""Between two snapshots for metrics; they are the sign of life too."""
_FRAME_SHARE = 0.01
"""Of the engine's time, for frames: where one takes longer, they come less often."""
_MOST_REST_S = 2.0
"""Between two frames, whatever one took."""
_LIVE_S = 1.0
"""Between two lists of all requests."""
_BEAT_S = 0.5
"""Longest wait while idle."""
_QUIET_S = 1.0
"""So long has nothing run before it is looked whether all was given back."""
_STILL = 3
"""So many steps in a row without a plan or news: there is nothing to do but to wait."""
_STILL_S = 0.01
"""Between two such steps."""


class Worker:
    """Serves one engine over two sockets until it is told to stop, or its parent is gone."""

    def __init__(self, built: BuiltEngine, inbox: zmq.Socket[bytes], outbox: Outbox) -> None:
        self._built, self._core = built, built.engine.core
        self._inbox, self._outbox = inbox, outbox
        self._decode = wire.decoder_of_engine().decode
        self._questions = Questions(built)
        self._leaks = LeakCheck(self._core)
        self._news = wire.News([], [], [], [], [])
        self._num_still = 0
        self._parent_pid = os.getppid()
        self._is_stopped = False
        self._watch: PoolWatch | None = None
        self._frame_s = 0.0
        self._next_frame_s = self._next_stats_s = self._idle_since_s = 0.0
        self._next_live_s = 0.0
        self._wants_full = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            wire.Add: self._add,
            wire.Abort: self._abort,
            wire.Finish: self._finish,
            wire.Call: self._answer,
            wire.Watch: self._set_watch,
            wire.Stop: self._stop,
        }

    def run(self) -> None:
        """Until `Stop`. Raises what ends the engine."""
        core = self._core
        while not self._is_stopped:
            has_work = core.has_unfinished()
            self._take_messages(self._patience_s(has_work))
            if core.has_unfinished():
                self._step()
            if not core.has_unfinished() or self._num_still >= _STILL:
                if os.getppid() != self._parent_pid:
                    return
                self._idle()
            else:
                self._idle_since_s = 0.0
            self._tell()

    def _patience_s(self, has_work: bool) -> float:
        """How long a message may be waited for."""
        if has_work:
            return 0.0 if self._num_still < _STILL else _STILL_S
        if self._watch is None:
            return _BEAT_S
        return min(_BEAT_S, max(0.0, self._next_frame_s - time.monotonic()))

    # -- messages

    def _take_messages(self, wait_s: float) -> None:
        inbox = self._inbox
        if wait_s and not inbox.poll(int(wait_s * 1000) + 1):
            return
        while True:
            try:
                message = self._decode(inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self._handlers[type(message)](message)

    def _add(self, message: wire.Add) -> None:
        request = message.request
        try:
            self._core.add_request(request)
        except InvalidRequestError as error:
            refusal = wire.Refused(
                request.request_id, type(error).__name__, str(error), error.parameter
            )
            self._news.refused.append(refusal)

    def _abort(self, message: wire.Abort) -> None:
        for request_id in message.request_ids:
            was_here = self._core.abort(request_id)
            if was_here and message.is_leak:
                why = f"nobody waited for request {request_id} any more: aborted"
                logger.error("leak: %s", why)
                self._core.note(EventKind.LEAK, request_id, why)
        self._news.aborted.extend(message.request_ids)

    def _finish(self, message: wire.Finish) -> None:
        self._core.finish(message.seq_id, message.stop_reason)
        self._note_end(message.request_id)

    def _answer(self, message: wire.Call) -> None:
        try:
            answer = wire.Answer(message.call_id, self._questions.ask(message.name, message.args))
        except OctavoError as error:
            parameter = getattr(error, "parameter", None)
            kind, text = type(error).__name__, str(error)
            answer = wire.Answer(message.call_id, None, kind, text, parameter)
        self._outbox.send(answer)
        self._core.check_open()

    def _set_watch(self, message: wire.Watch) -> None:
        if not message.hz:
            if self._watch is not None:
                self._watch.close()
            self._watch = None
            return
        if self._watch is None:
            from octavo.sched.watch import PoolWatch

            self._watch = PoolWatch(self._core.kv, self._core.scheduler)
        self._frame_s = 1.0 / message.hz
        self._wants_full, self._next_frame_s = True, 0.0
        self._questions.watch = self._watch

    def _stop(self, _: wire.Stop) -> None:
        self._is_stopped = True

    # -- steps

    def _step(self) -> None:
        scheduler = self._core.scheduler
        step_id = scheduler.next_step_id
        try:
            updates = self._core.step()
        except StepFailedError as error:
            self._news.hit.append(wire.Hit(error.request_ids, str(error)))
            self._tell()
            self._core.check_open()  # a lost device ends the process, and another one is started
            return
        is_still = not updates and step_id == scheduler.next_step_id
        self._num_still = self._num_still + 1 if is_still else 0
        self._news.updates.extend(updates)
        for update in updates:
            if update.finish_reason is not None:
                self._note_end(update.request_id)

    def _note_end(self, request_id: str) -> None:
        """Tell what a request cost, if no sequence of it is left."""
        core = self._core
        if core.scheduler.seq_ids(request_id):
            return
        stats = core.stats(request_id)
        if stats is not None:
            self._news.ended.append(wire.Ended(request_id, *stats))
            core.forget(request_id)

    def _idle(self) -> None:
        """Nothing runs: look whether all is given back, now and then."""
        scheduler = self._core.scheduler
        if scheduler.num_running or scheduler.num_waiting:
            return
        now_s = time.monotonic()
        if not self._idle_since_s:
            self._idle_since_s = now_s
            self._next_stats_s = 0.0  # so that what is known of an idle engine is exact
            self._leaks.expect_quiet()
        elif now_s - self._idle_since_s >= _QUIET_S:
            lost = self._leaks.look()
            if lost:
                text = (
                    f"the engine had lost {len(lost)} requests, which are aborted; see its events"
                )
                self._news.hit.append(wire.Hit(lost, text))

    # -- what is told

    def _tell(self) -> None:
        now_s = time.monotonic()
        news, stats, live = self._news, None, None
        if now_s >= self._next_stats_s:
            self._next_stats_s = now_s + _STATS_S
            stats = stats_of(self._built)
            if now_s >= self._next_live_s:
                self._next_live_s = now_s + _LIVE_S
                live = list(self._core.live_request_ids)
            news = wire.News(
                news.updates, news.ended, news.hit, news.refused, news.aborted, stats, live
            )
        if stats or news.updates or news.ended or news.hit or news.refused or news.aborted:
            self._outbox.send(news)
            self._news = wire.News([], [], [], [], [])
        if self._watch is not None and now_s >= self._next_frame_s:
            self._send_frame(self._watch, now_s)

    def _send_frame(self, watch: PoolWatch, now_s: float) -> None:
        frame = watch.frame(now_s, full=self._wants_full)
        is_full = frame["kind"] == "full"  # so it is after a resize, too
        if is_full:
            frame["about"] |= self._questions.about_frame()
        self._outbox.send_frame(frame, is_full)
        self._wants_full = False
        rest_s = min(_MOST_REST_S, (time.monotonic() - now_s) / _FRAME_SHARE)
        self._next_frame_s = now_s + max(self._frame_s, rest_s)


class Outbox:
    """What is sent to the parent."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        import msgspec

        self._socket = socket
        self._encode = wire.encoder().encode
        self._json = msgspec.json.Encoder().encode
        self.sent_s = 0.0

    def send(self, message: wire.FromEngine) -> None:
        """Never waits: the parent reads, or is gone."""
        self.sent_s = time.monotonic()
        self._socket.send(self._encode(message))

    def send_frame(self, frame: dict[str, Any], is_full: bool) -> None:
        """A picture of the pool."""
        self.send(wire.Frame(is_full, self._json(frame)))


class SentProgress:
    """A `Progress` that tells the parent, at most ten times a second."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def start(self, what: str, total_bytes: int | None = None) -> None:
        """See `Progress`."""
        self._outbox.send(wire.Loading("start", what, total_bytes))

    def update(self, done_bytes: int) -> None:
        """See `Progress`."""
        if time.monotonic() - self._outbox.sent_s >= 0.1:
            self._outbox.send(wire.Loading("update", "", done_bytes))

    def finish(self) -> None:
        """See `Progress`."""
        self._outbox.send(wire.Loading("finish", "", None))


def _serve(inbox: zmq.Socket[bytes], outbox: Outbox) -> None:
    """Build what the first message asks for, and serve it."""
    start = wire.decoder_of_engine().decode(inbox.recv())
    if not isinstance(start, wire.Start):
        return
    module, _, name = start.build.partition(":")
    build = getattr(importlib.import_module(module), name)
    built: BuiltEngine = build(EngineConfig.from_kwargs(**start.config), SentProgress(outbox))
    try:
        outbox.send(wire.Ready(about(built)))
        Worker(built, inbox, outbox).run()
    finally:
        with contextlib.suppress(OctavoError):
            built.close()


def _end_with_parent(parent_pid: int) -> None:
    """An engine without a server would hold memory for nobody."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main(argv: list[str]) -> int:
    """Run the process; returns its exit status."""
    into, out, parent_pid, log_level, log_format = argv
    _end_with_parent(int(parent_pid))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # told to a whole group: the parent drains first
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    set_up_logging(log_level, cast("LogFormat", log_format), "engine")
    context = zmq.Context()
    inbox, outbox_socket = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox_socket):
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 2000)
    inbox.bind(into)
    outbox_socket.connect(out)
    outbox = Outbox(outbox_socket)
    status = 0
    try:
        _serve(inbox, outbox)
    except OctavoError as error:
        outbox.send(wire.Failed(type(error).__name__, str(error)))
        status = 2
    except BaseException as error:
        logger.exception("the engine's process ends")
        text = f"the engine's process ended with {type(error).__name__}: {error}"
        outbox.send(wire.Failed(EngineDeadError.__name__, text))
        status = 1
    context.destroy(linger=2000)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
