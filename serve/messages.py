"""What a request says in messages, checked as OpenAI's API has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """Keys it does not know are ignored, as by other servers; types are not bent."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Closed(BaseModel):
    """Keys it does not know are refused."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PartCache(Closed):
    """The `cache` object of a part of a message's content."""

    share: Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    cache: PartCache | None = None


class Function(Strict):
    """A call of a tool."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Strict):
    """One entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(Strict):
    """One message; the template gets it as it was sent."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
