"""What happened to each request: told once, and written to the metrics and to the request log.

The log is the logger `kvfunc.requests`, one JSON line a request when it is over. No line has any
text of a prompt or an answer.
"""

from __future__ import annotations

import datetime
import json
import logging
import logging.handlers
import sys
import time
from typing import Any

from .interface import Generation, Usage
from .metrics import Metrics

LOGGER = "kvfunc.requests"
CLIENT_LEFT = "client_closed_request"  # the error code where nobody waited for the end

_log = logging.getLogger(LOGGER)


def open_log(path: str) -> None:
    """Write the request log to a file, or to standard output for "-".

    A file that is moved away, as by logrotate, is opened anew.

    Raises:
      OSError: if the file cannot be written.
    """
    handler = (logging.StreamHandler(sys.stdout) if path == "-" else
               logging.handlers.WatchedFileHandler(path, encoding="utf-8"))
    handler.setFormatter(logging.Formatter("%(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    _log.propagate = False


class RequestRecord:
    """One request from its arrival to its end; its times are those of `time.perf_counter`.

    Args:
      request_id: as the client gets it in `x-request-id`.
      endpoint: the path.
      model: the name of the model served.
      metrics: what is fed.
    """

    def __init__(self, request_id: str, endpoint: str, model: str, metrics: Metrics):
        self.id, self._endpoint, self._model = request_id, endpoint, model
        self._metrics = metrics
        self._arrived, self._time = time.perf_counter(), datetime.datetime.now(datetime.UTC)
        self._submitted: float | None = None
        self._queue: float | None = None
        self._first: float | None = None
        self._gaps, self._gap_seconds = 0, 0.0
        self._answers: list[_Answer] = []
        self._waiting: list[_Answer] = []  # those whose turn has not been noted
        self._error: str | None = None
        self.stream = False
        self.status: int | None = None  # of HTTP

    @property
    def age(self) -> float:
        """Seconds since the arrival."""
        return time.perf_counter() - self._arrived

    @property
    def queue_seconds(self) -> float | None:
        """From the submission to its turn; None before."""
        self._look_for_turns()
        return self._queue

    @property
    def generated(self) -> int:
        """Tokens so far, all answers together."""
        return sum(answer.generated for answer in self._answers)

    def submitted(self, generation: Generation, has_own_prompt: bool) -> None:
        """The next answer goes to the engine.

        Args:
          generation: the answer.
          has_own_prompt: whether no answer before it has the same prompt, which counts once.
        """
        if self._submitted is None:
            self._submitted = time.perf_counter()
        self._answers.append(_Answer(generation, has_own_prompt))
        self._waiting.append(self._answers[-1])

    def token(self, index: int, at: float) -> None:
        """An answer has one more token, since this moment."""
        self._look_for_turns()
        answer = self._answers[index]
        answer.generated += 1
        self._metrics.generation_tokens.inc()
        if self._first is None:
            self._first = at - self._arrived
            self._metrics.first_token.observe(self._first)
        if answer.last is not None:
            self._gaps += 1
            self._gap_seconds += at - answer.last
            self._metrics.between_tokens.observe(at - answer.last)
        answer.last = at

    def dropped(self, index: int, count: int) -> None:
        """So many tokens of an answer have been dropped as thinking so far."""
        answer = self._answers[index]
        self._metrics.dropped_answer_tokens.inc(count - answer.dropped)
        answer.dropped = count

    def finished(self, index: int, reason: str) -> None:
        """An answer is complete."""
        self._answers[index].reason = reason

    def failed(self, code: str) -> None:
        """The request ends with this error code."""
        self._error = code

    def close(self) -> None:
        """The request is over, however it ended."""
        seconds = self.age
        self._look_for_turns()
        reasons = [answer.reason for answer in self._answers]
        if self._error is None and (None in reasons or self.status is None):
            self._error = CLIENT_LEFT
        if self._error is not None:
            self._metrics.failed(self._error)
        elif reasons:
            self._metrics.whole_time.observe(seconds)
            for reason in reasons:
                self._metrics.succeeded(reason)
        if _log.isEnabledFor(logging.INFO):
            _log.info(json.dumps(self._line(seconds, reasons)))

    def _look_for_turns(self) -> None:
        """Note whose turn has come since the last look."""
        come = [answer for answer in self._waiting if answer.generation.admitted is not None]
        if not come:
            return
        self._waiting = [answer for answer in self._waiting if answer not in come]
        for answer in come:
            answer.usage = usage = answer.generation.usage
            if self._queue is None:
                self._queue = answer.generation.admitted - self._submitted
                self._metrics.queue_time.observe(self._queue)
            if answer.has_own_prompt:
                self._metrics.prompt_tokens.inc(usage.prompt_tokens)
                self._metrics.cache_queries.inc(usage.prompt_tokens)
                self._metrics.cache_hits.inc(usage.cached_tokens + usage.repos_tokens)
                self._metrics.dropped_tokens.inc(usage.drop_skipped_tokens)
                self._metrics.repositioned_tokens.inc(usage.repos_tokens)
                self._metrics.approximate_tokens.inc(usage.approximate_tokens)

    def _line(self, seconds: float, reasons: list[str | None]) -> dict[str, Any]:
        prompts = [answer.usage for answer in self._answers
                   if answer.has_own_prompt and answer.usage is not None]
        return {
            "id": self.id, "time": self._time.isoformat(timespec="milliseconds"),
            "endpoint": self._endpoint, "model": self._model, "stream": self.stream,
            "status": self.status, "error": self._error, "finish_reasons": reasons,
            **{name: sum(getattr(usage, name) for usage in prompts) for name in (
                "prompt_tokens", "cached_tokens", "repos_tokens", "drop_skipped_tokens",
                "approximate_tokens", "computed_tokens")},
            "generated_tokens": self.generated,
            "generated_dropped_tokens": sum(answer.dropped for answer in self._answers),
            "queue_s": self._queue, "ttft_s": self._first,
            "e2e_s": seconds, "inter_token": {"count": self._gaps, "sum_s": self._gap_seconds},
            "preempted": sum(answer.generation.preempted for answer in self._answers)}


class _Answer:
    def __init__(self, generation: Generation, has_own_prompt: bool):
        self.generation, self.has_own_prompt = generation, has_own_prompt
        self.usage: Usage | None = None
        self.generated = self.dropped = 0
        self.last: float | None = None  # when its newest token came
        self.reason: str | None = None
