"""Messages to tokens: a model's chat template, and the owner of every token it prints.

See `ownership` for the rules by which text is a message's, nobody's, or the generation header.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gguf
import jinja2
import numpy as np
from jaxtyping import Int
from jinja2 import ext, meta, nodes, sandbox

from .ownership import (
    ANY,
    GENERATION,
    NOBODY,
    Message,
    OwnershipEnvironment,
    Tag,
    carried,
    runs_of,
    tagged,
)
from .tokenizer import Tokenizer, gguf_fields, read_json, special_text

NO_TOOL_CALLS = "the chat template prints no tool calls: the model does not see those it made"
NOT_PRINTED = "the chat template prints no content of messages with the role {role!r}"
NOT_TRACED = (
    "the owners of this template's text cannot be traced: requests that drop or reposition are "
    "refused"
)

# The tags that stand around a model's thinking.
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
             ("<thinking>", "</thinking>"))

# What a template raises, beside Jinja's own errors, on values of a form it did not expect.
_FAILURES = (TypeError, AttributeError, LookupError, RecursionError)


class Printed(NamedTuple):
    """Characters of a message's content, as they are printed."""

    message: int
    start: int  # of the prompt's text, half-open
    stop: int
    at: int  # where in the content the first of them stands


@dataclasses.dataclass(frozen=True, eq=False)
class Rendered:
    """A prompt as text and as tokens, and who owns each token.

    `offsets` holds the half-open range of characters that each token stands for. `owner` holds the
    index of a message, `len(messages)` for the generation header, or NOBODY. A token that crosses a
    border belongs to the owner of its first character. `monotonic` is False where owners do not
    increase along the text (the template moves a message): then a drop or a repos after a message
    has no place in the text. `warnings` has one fixed sentence a finding. `printed` has the
    contents as far as they are printed and not rewritten, in order of the text.
    """

    text: str
    tokens: Int[np.ndarray, " n"]
    offsets: Int[np.ndarray, "n 2"]
    owner: Int[np.ndarray, " n"]
    warnings: tuple[str, ...] = ()
    monotonic: bool = True
    printed: tuple[Printed, ...] = ()


class ChatTemplate:
    """A chat template in Jinja, as Hugging Face and GGUF files carry them.

    Args:
      source: the template.
      tokenizer: of the same model.
      bos_token: text that the template may print as `bos_token`.
      eos_token: text that the template may print as `eos_token`.

    Attributes:
      source: the template.
      fingerprint: a hash of the source.
      thinking: the tags around a model's thinking: those that the template's source names, or
        else `<think>` and `</think>`.

    Raises:
      ValueError: the template is not valid Jinja.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, bos_token: str = "", eos_token: str = ""
    ):
        self._tokenizer = tokenizer
        self.fingerprint = hashlib.sha256(source.encode()).hexdigest()
        self.source = source
        self._constants = {"bos_token": bos_token, "eos_token": eos_token}
        plain = _prepared(sandbox.ImmutableSandboxedEnvironment)
        traced = _prepared(OwnershipEnvironment)
        traced.filters["tojson"] = carried(_to_json)
        try:
            names = meta.find_undeclared_variables(plain.parse(source))
            self._plain, self._traced = plain.from_string(source), traced.compile_traced(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        self._bos = bos_token if "bos_token" in names else ""
        self.thinking = next((tags for tags in _THINKING if tags[1] in source), _THINKING[0])

    @classmethod
    def from_gguf(
        cls, file: str | pathlib.Path | gguf.GGUFReader, tokenizer: Tokenizer
    ) -> ChatTemplate:
        """Read the template in a GGUF file's metadata.

        Args:
          file: path of the file, or a reader that is already open (opening takes seconds).
          tokenizer: read from the same file.

        Raises:
          ValueError: the file has no chat template.
        """
        fields = gguf_fields(file)
        source = fields("tokenizer.chat_template")
        if source is None:
            raise ValueError(
                "the GGUF file has no tokenizer.chat_template: its model is served for plain "
                "completions only"
            )
        tokens = fields("tokenizer.ggml.tokens")
        ids = (fields(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
        bos, eos = ("" if i is None else tokens[i] for i in ids)
        return cls(source, tokenizer, bos_token=bos, eos_token=eos)

    @classmethod
    def from_hf(cls, directory: str | pathlib.Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read chat_template.jinja, or `chat_template` in tokenizer_config.json.

        Raises:
          ValueError: the folder has neither.
        """
        directory = pathlib.Path(directory)
        config = read_json(directory / "tokenizer_config.json")
        file = directory / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if not source:
            raise ValueError(
                f"no chat template in {str(directory)!r}: its model is served for plain "
                "completions only"
            )
        bos, eos = (special_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
        return cls(source, tokenizer, bos_token=bos, eos_token=eos)

    def render(
        self,
        messages: Sequence[Any],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> Rendered:
        """Render messages, in the form of OpenAI's API, to tokens with owners.

        Args:
          messages: `content` may be a string, null or a list of text parts; the arguments of tool
            calls may be JSON in a string, which templates expect parsed.
          tools: OpenAI's tool definitions.
          add_generation_prompt: whether to end with the header of the answer.
          template_kwargs: further variables of the template.

        Raises:
          ValueError: a message of a form that is not supported, or that the template refuses.
        """
        messages = normalised(messages)
        tools = list(tools) if tools else None
        now = datetime.datetime.now()
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        outside = {**self._constants, "tools": tools, "documents": None, **template_kwargs}
        try:
            text = self._plain.render(**outside, **fixed, strftime_now=now.strftime)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except _FAILURES as error:
            raise ValueError(f"the chat template fails on these messages: {error}") from error
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        tokens = np.array(ids, np.int32)
        offsets = np.array(offsets, np.int64).reshape(-1, 2)

        nobody = Tag(NOBODY)
        try:
            fixed["messages"] = [Message(i, message) for i, message in enumerate(messages)]
            traced = self._traced.render(
                **{k: v if k in self._constants else tagged(v, nobody) for k, v in outside.items()},
                **fixed,
                strftime_now=lambda form: tagged(now.strftime(form), nobody),
            )
        except (jinja2.TemplateError, *_FAILURES):
            traced = None
        if traced != text:  # an ordinary request needs no owners, and is served all the same
            owner = np.full_like(tokens, NOBODY)
            return Rendered(text, tokens, offsets, owner, (NOT_TRACED,), monotonic=False)
        char_owner = self._char_owners(traced, len(messages))
        owner = char_owner[np.minimum(offsets[:, 0], len(text) - 1)]
        owned = owner[owner != NOBODY]
        return Rendered(
            text, tokens, offsets, owner, _warnings(messages, traced),
            monotonic=bool((np.diff(owned) >= 0).all()), printed=tuple(_printed(traced)),
        )

    def _char_owners(self, text: str, header: int) -> Int[np.ndarray, " chars"]:
        owners = {GENERATION: header}
        lengths, tags = zip(*runs_of(text), strict=True)
        owner = np.repeat(
            np.array([owners.get(t.owner, t.owner) if t else NOBODY for t in tags], np.int32),
            lengths,
        )
        if text.startswith(self._bos):
            owner[: len(self._bos)] = NOBODY  # where every query finds its attention sink
        return owner


def prefix_break(
    previous: Int[np.ndarray, " n"], current: Int[np.ndarray, " m"]
) -> int | None:
    """Where a turn's tokens stop extending the previous turn's prompt; None if they begin with it.

    Args:
      previous: tokens of the previous turn's prompt, its generation header included.
      current: tokens of this turn's prompt.

    Returns:
      Index of the first token of `previous` that `current` does not repeat in its place.
    """
    common = min(len(previous), len(current))
    differs = np.flatnonzero(previous[:common] != current[:common])
    if differs.size:
        return int(differs[0])
    return None if common == len(previous) else common


def normalised(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as templates expect them.

    Content is a string, a key whose value is null is absent, no list of tool calls is empty, and
    the arguments of a call are an object where they were the JSON of one.

    Raises:
      ValueError: a message, content part or tool call of another form, named by its place.
    """
    if not messages:
        raise ValueError("messages is empty: send at least one")
    return [_normalised(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalised(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{place} is {message!r}: it must be an object with a string `role`")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _content(message.get("content"), f"{place}.content")
    calls = plain.pop("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"{place}.tool_calls is {calls!r}: it must be a list of objects")
    if calls:
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _tool_call(function)}
    return {**call, "arguments": _arguments(call["arguments"])} if "arguments" in call else {**call}


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{place} is {content!r}: it must be a string, null or a list of parts")
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{place}[{j}] is a part of type {kind!r}: only "
                '{"type": "text", "text": "..."} is supported'
            )
    return "".join(part["text"] for part in content)


def _arguments(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _printed(text: str) -> Iterator[Printed]:
    start = 0
    for length, tag in runs_of(text):
        if length and tag is not None and tag.field == "content" and tag.at is not None:
            yield Printed(tag.owner, start, start + length, tag.at)
        start += length


def _warnings(messages: Sequence[Mapping[str, Any]], text: str) -> tuple[str, ...]:
    shown = {(tag.owner, tag.field) for _, tag in runs_of(text) if tag is not None}

    def hidden(i: int, field: str) -> bool:
        return (i, field) not in shown and (i, ANY) not in shown

    found = []
    if any("tool_calls" in m and hidden(i, "tool_calls") for i, m in enumerate(messages)):
        found.append(NO_TOOL_CALLS)
    roles = [
        message["role"]
        for i, message in enumerate(messages)
        if message["content"].strip() and hidden(i, "content")
    ]
    return (*found, *(NOT_PRINTED.format(role=role) for role in dict.fromkeys(roles)))


class _GenerationTag(ext.Extension):
    """`{% generation %}`, by which training code finds the model's own words: prints its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _prepared(kind: type[jinja2.Environment]) -> Any:
    environment = kind(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
