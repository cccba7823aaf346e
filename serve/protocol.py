"""The request types: what OpenAI's API takes, plus the `cache` object, checked at the door.

Every fault raises `ApiError`, which names the parameter, its value and the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationError

from kvfunc.models.chat import normalised
from kvfunc.policies import Part, Policy, Schedule, rolling_tool_outputs

from . import akv
from .drops import CANONICAL, Dropped, read_drop, read_reposition
from .errors import ApiError, first_fault, invalid, shown, unsupported
from .interface import MAX_LOGPROBS, Sampling
from .messages import Closed, Message, Strict

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only


class ToolFunction(Strict):
    """What a tool does, in JSON schema; the template gets it as it was sent."""

    name: str


class Tool(Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(Strict):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class PolicyChoice(Closed):
    """The `cache.policy` object."""

    type: Literal["rolling_tool_outputs"]
    keep: Annotated[int, Field(ge=1)] = 12
    reposition_above_tokens: Annotated[int, Field(ge=0)] | None = None


class Cache(Closed):
    """The `cache` object (api.md)."""

    drop: dict[str, Any] | None = None
    reposition: list[Any] | None = None
    policy: PolicyChoice | None = None
    salt: str | None = None
    explain: bool | None = None
    exact: bool | None = None  # no KV that rests on estimates
    drop_thinking: bool | None = None


StopString = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Request(Strict):
    """What both kinds of completion share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None) = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    ignore_eos: bool | None = None  # the model's own ends do not end the answer
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # seconds
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache: Cache | None = None
    _body: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Request:
        """Check a request's JSON object."""
        _check_neutral(body)
        _check_bias_keys(body.get("logit_bias"))
        try:
            request = cls.model_validate(body)
        except ValidationError as error:
            raise first_fault(error, body) from None
        request._body = body
        if request.stream_options is not None and not request.stream:
            raise invalid("stream_options", body["stream_options"],
                          'it goes with "stream": true; set that or leave it out')
        if request.best_of not in (None, request.choices):
            raise unsupported("best_of", request.best_of,
                              f"send {request.choices}, which is n, or leave it out")
        limit = request.token_limit
        if limit is not None and (request.min_tokens or 0) > limit:
            raise invalid("min_tokens", request.min_tokens,
                          f"the answer has at most {limit} tokens; give {limit} or less, or a "
                          "larger max_tokens")
        return request

    def check_token_ids(self, vocab_size: int) -> None:
        """Refuse a bias or an end that the model has no token for."""
        for key, value in (self.logit_bias or {}).items():
            if int(key) >= vocab_size:
                raise invalid(f"logit_bias[{shown(key)}]", value,
                              f"there is no such token; give token ids below {vocab_size}")
        check_token_ids(self.stop_token_ids or (), "stop_token_ids", vocab_size)

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, None for as many as there is room for."""
        raise NotImplementedError

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def salt(self) -> str:
        """The cache namespace."""
        return (self.cache and self.cache.salt) or ""

    @property
    def shares(self) -> dict[Part, str]:
        """The texts whose KV may be estimated, each by its name, in order."""
        return {}

    @property
    def explain(self) -> bool:
        """Whether the plan is wanted instead of an answer."""
        return bool(self.cache and self.cache.explain)

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with the counters: asked for, or implied by any cache field."""
        asked = bool(self.stream_options and self.stream_options.include_usage)
        return asked or bool(self.model_fields_set & {"cache", *AKV_FIELDS}) or bool(self.shares)

    def samplings(self, ends: Collection[int]) -> list[Sampling]:
        """How tokens are chosen, for each answer of a prompt.

        Args:
          ends: the tokens that end an answer of this model's.
        """
        given = {name: float(value) for name in NUMBERS
                 if (value := getattr(self, name)) is not None}
        shared = Sampling(
            top_k=max(self.top_k or 0, 0), seed=self.seed, logprobs=self.alternatives,
            logit_bias=tuple((int(key), float(value))
                             for key, value in (self.logit_bias or {}).items()),
            min_tokens=self.min_tokens or 0,
            stop_ids=frozenset(self.stop_token_ids or ()).union(() if self.ignore_eos else ends),
            **given)
        return [shared if self.seed is None else
                dataclasses.replace(shared, seed=self.seed + place)
                for place in range(self.choices)]

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report, None for no log-probabilities at all."""
        raise NotImplementedError


AKV_FIELDS = ("drop_message", "drop_rule", "reposition")
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
           "repetition_penalty")


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None  # others are refused before
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    drop_message: dict[str, Any] | None = None
    drop_rule: akv.DropRule | None = None
    reposition: list[Any] | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> ChatRequest:
        """Check a request's JSON object."""
        akv.check_rule(body.get("drop_rule"))
        request = super().parse(body)
        for index, message in enumerate(body["messages"]):
            _check_message(message, f"messages[{index}]")
        if isinstance(request.drop_rule, akv.KeepTextDrop):
            for index, message in enumerate(body["drop_rule"]["full_messages"]):
                _check_message(message, f"drop_rule.full_messages[{index}]")
        if request.top_logprobs and not request.logprobs:
            raise invalid("top_logprobs", request.top_logprobs,
                          'it goes with "logprobs": true; set that or leave it out')
        for name in ("messages", "tools", "add_generation_prompt", "strftime_now"):
            if name in (request.chat_template_kwargs or ()):
                raise invalid(f"chat_template_kwargs.{name}", request.chat_template_kwargs[name],
                              "the server sets it; leave it out")
        return request

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate, None for as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report, None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @functools.cached_property
    def shares(self) -> dict[Part, str]:
        """The texts whose KV may be estimated, each by its name, in order."""
        found = {}
        for index, message in enumerate(self.messages):
            at = 0
            for part in message.content if isinstance(message.content, list) else ():
                if part.cache is not None:
                    found[Part(index, (at, at + len(part.text)))] = part.cache.share
                at += len(part.text)
        return found

    @property
    def takes_calls(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def drops_thinking(self) -> bool:
        """Whether assistants' thinking goes as soon as it is complete."""
        return bool(self.cache and self.cache.drop_thinking)

    @functools.cached_property
    def conversation(self) -> list[dict[str, Any]]:
        """The history that is rendered and that events are about, in the form of templates."""
        if not isinstance(self.drop_rule, akv.KeepTextDrop):
            return self._visible
        full = normalised(self._body["drop_rule"]["full_messages"])
        if akv.aligned(self._visible, full) is not None:
            return full
        if self.drop_rule.force:
            return self._visible
        raise ApiError("messages cannot be found in drop_rule.full_messages: each must have the "
                       "role, calls and ids of one of those, in order, and a piece of its content; "
                       'correct them, or set "force": true to go on without the full history',
                       param="drop_rule.full_messages", code="invalid_value")

    @functools.cached_property
    def _visible(self) -> list[dict[str, Any]]:
        return normalised(self._body["messages"])

    def edits(self, tags: tuple[str, str] = ("<think>", "</think>")) -> Schedule | Policy | None:
        """The events asked for, in whichever spelling: written out, or left to a policy.

        Args:
          tags: those around the model's thinking.
        """
        cache, messages = self.cache or Cache(), self.conversation
        given = {f"cache.{name}": value for name in ("drop", "reposition", "policy")
                 if (value := getattr(cache, name)) is not None}
        akv_given = [name for name in AKV_FIELDS if getattr(self, name) is not None]
        if given and akv_given:
            raise ApiError(f"{', '.join(given)} and {', '.join(akv_given)} are two spellings of "
                           "events in one request: use one of them", param=akv_given[0],
                           code="invalid_value")
        if cache.policy is not None:
            if len(given) > 1:
                raise ApiError("cache.policy derives the events itself: leave out cache.drop and "
                               "cache.reposition, or the policy", param="cache.policy",
                               code="invalid_value")
            return rolling_tool_outputs(cache.policy.keep, cache.policy.reposition_above_tokens)
        if not given and not akv_given:
            return None
        if not akv_given:
            drop = read_drop(cache.drop or {}, "cache.drop", messages, with_parts=True)
            moves, param = cache.reposition, "cache.reposition"
        else:
            drop = self._akv_drop(tags)
            moves, param = None if self._is_forced else self.reposition, "reposition"
        return Schedule(drop, read_reposition(moves or [], param, len(messages)))

    @property
    def _is_forced(self) -> bool:
        """Whether the full history that came along is left aside."""
        return isinstance(self.drop_rule, akv.KeepTextDrop) and (
            self.conversation is self._visible)

    @property
    def names_parts(self) -> bool:
        """Whether parts of messages are dropped by name, not as what is left beside others."""
        return not isinstance(self.drop_rule, akv.KeepTextDrop)

    def name_of(self, trigger: int, place: int) -> str:
        """What errors call the so manyeth thing that a trigger drops."""
        return "drop_rule" if self.drop_rule else f'cache.drop["{trigger}"][{place}]'

    def _akv_drop(self, tags: tuple[str, str]) -> Dropped:
        if self.drop_rule is None:
            return read_drop(self.drop_message or {}, "drop_message", self.conversation)
        if self.drop_message is not None:
            raise ApiError("drop_message and drop_rule are two spellings of one thing: use one",
                           param="drop_rule", code="invalid_value")
        return akv.read_rule(self.drop_rule, self.conversation, self._visible, tags)


Prompt = (str | Annotated[list[str], Field(min_length=1)]
          | Annotated[list[TokenId], Field(min_length=1)]
          | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)])


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def parse(cls, body: dict[str, Any]) -> CompletionRequest:
        """Check a request's JSON object."""
        cache = body.get("cache")
        fields = {f"cache.{name}": value for name, value in cache.items()
                  if name not in ("salt", "exact")} if isinstance(cache, dict) else {}
        for param, value in {**fields, **{name: body.get(name) for name in AKV_FIELDS}}.items():
            if value is not None:
                raise invalid(param, value, "it speaks of messages; use /v1/chat/completions")
        return super().parse(body)

    @property
    def prompts(self) -> dict[str, str | list[int]]:
        """The prompts in order, each by the parameter that holds it."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return {"prompt": self.prompt}
        return {f"prompt[{place}]": prompt for place, prompt in enumerate(self.prompt)}

    @property
    def token_limit(self) -> int:
        """The most tokens to generate."""
        return self.max_tokens or DEFAULT_COMPLETION_TOKENS

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to report, None for no log-probabilities at all."""
        return self.logprobs


def check_token_ids(ids: Sequence[int], param: str, vocab_size: int) -> None:
    """Refuse ids that the model has no token for."""
    for place, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise invalid(f"{param}[{place}]", token_id, f"give token ids below {vocab_size}")


# Parameters that would change the answer and are not built: the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,), "suffix": ("",), "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},), "functions": ([],),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
}


def _check_neutral(body: dict[str, Any]) -> None:
    for name, allowed in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(
                value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                for neutral in allowed):
            raise unsupported(name, value, f"send {' or '.join(map(shown, allowed))}, or leave "
                                           "it out")


def _check_bias_keys(logit_bias: Any) -> None:
    for key, value in logit_bias.items() if isinstance(logit_bias, dict) else ():
        if not CANONICAL.fullmatch(key):
            raise invalid(f"logit_bias[{shown(key)}]", value,
                          "the key must be a token id: an integer from 0 without leading zeros")


def _check_message(message: dict[str, Any], param: str) -> None:
    if "content" not in message and not message.get("tool_calls"):
        raise ApiError(f"{param}.content is missing: give a string, a list of text parts or null",
                       param=f"{param}.content", code="missing_required_parameter")
