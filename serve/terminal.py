"""`kvfunc chat`: a conversation in the terminal whose KV cache can be edited."""

import collections
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from .client import Card, Client, Refused, Usage

HELP = """\
/drop 1 2   drop messages 1 and 2: whatever comes next cannot attend to them
/repos      close the gaps that drops left; nothing is computed again
/show       the messages with their numbers and tokens
/reset      begin again
/help       this list
/quit       leave (so does the end of the input)
"""


class Conversation:
    """The history and its schedule of edits; both are sent whole with every turn."""

    def __init__(self, client: Client, system: str | None, max_tokens: int, temperature: float):
        self._client = client
        self._options = {"max_tokens": max_tokens, "temperature": temperature}
        self._system = system
        self.reset()

    def reset(self) -> None:
        """Forget all turns and edits, but not the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []
        self.dropped: dict[int, int] = {}  # message -> the message after which it was dropped
        self._reposition: list[int] = []

    @property
    def cache(self) -> dict:
        """The request's `cache` object (api.md)."""
        drop: dict[str, list[int]] = {}
        for message, after in self.dropped.items():
            drop.setdefault(str(after), []).append(message)
        return {"drop": drop, "reposition": self._reposition}

    def drop(self, messages: list[int]) -> None:
        """Drop messages after the last one. Raises ValueError on a number that is no message."""
        for message in messages:
            if not 0 <= message < len(self.messages):
                raise ValueError(f"there is no message {message}; /show lists them")
        for message in messages:
            self.dropped.setdefault(message, len(self.messages) - 1)

    def repos(self) -> None:
        """Close the gaps after the last message. Raises ValueError if there is none."""
        last = len(self.messages) - 1
        if last < 0:
            raise ValueError("there is no message yet")
        if last not in self._reposition:
            self._reposition.append(last)

    def plan(self) -> dict:
        """The server's plan of the history as it stands."""
        return self._client.plan(self.messages, self.cache)

    def ask(self, text: str, write: Callable[[str], None]) -> tuple[Usage, dict]:
        """Run one turn, writing the answer as it comes; return its counters and plan.

        Ctrl-C ends the answer: what has come stays in the history, and `KeyboardInterrupt` is
        raised. A refused turn leaves the history as it was.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            plan = self.plan()
            for piece in self._client.stream(self.messages, self.cache, **self._options):
                if isinstance(piece, Usage):
                    usage = piece
                else:
                    answer += piece
                    write(piece)
        except Refused:
            del self.messages[-1]
            raise
        except KeyboardInterrupt:
            self.messages.append({"role": "assistant", "content": answer})
            raise
        self.messages.append({"role": "assistant", "content": answer})
        return usage, plan


def converse(conversation: Conversation, card: Card, console: Console) -> None:
    """Read lines until /quit or the end of the input, and answer them."""
    tty = sys.stdin.isatty()
    console.print(card.name, style="bold")
    console.print(f"context {card.max_model_len:,} tokens; /help lists the commands")
    while True:
        try:
            line = input("\n> " if tty else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line and not tty:
            console.print(f"\n> {line}")
        try:
            if line.startswith("/"):
                _command(conversation, line, console)
            elif line:
                _turn(conversation, line, console)
        except Refused as refusal:
            console.print(f"refused: {refusal}", style="red")
            if refusal.code == "context_length_exceeded":
                console.print("/drop messages and close the gaps with /repos, or /reset")
        except ValueError as error:
            console.print(str(error), style="red")


def _command(conversation: Conversation, line: str, console: Console) -> None:
    name, *arguments = line.split()
    match name:
        case "/drop" if arguments and all(word.isdecimal() for word in arguments):
            conversation.drop([int(word) for word in arguments])
            console.print("dropped for whatever comes next; /repos closes the gap")
        case "/drop":
            raise ValueError("/drop takes numbers of messages, as in /drop 1 2; /show lists them")
        case "/repos":
            conversation.repos()
            console.print("the gaps are closed for whatever comes next")
        case "/show":
            _show(conversation, console)
        case "/reset":
            conversation.reset()
            console.print("a new conversation")
        case "/help":
            console.print(HELP, end="")
        case _:
            raise ValueError(f"there is no command {name}; /help lists them")


def _show(conversation: Conversation, console: Console) -> None:
    if not conversation.messages:
        raise ValueError("there is no message yet")
    plan = conversation.plan()
    tokens = collections.Counter[int | None]()
    for span in plan["messages"]:
        tokens[span["index"]] += span["tokens"]
    table = Table(box=None, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("role")
    table.add_column("tokens", justify="right")
    table.add_column("message", no_wrap=True, overflow="ellipsis", ratio=1)
    for index, message in enumerate(conversation.messages):
        after = conversation.dropped.get(index)
        text = " ".join(message["content"].split())
        text = text if after is None else f"(dropped after {after}) {text}"
        style = None if after is None else "dim"
        table.add_row(str(index), message["role"], str(tokens[index]), text, style=style)
    console.print(table)
    console.print(f"{plan['live_tokens']} of {plan['prompt_tokens']} tokens are live")


def _turn(conversation: Conversation, line: str, console: Console) -> None:
    def write(text: str) -> None:
        console.out(text, end="", highlight=False)

    start = time.perf_counter()
    try:
        usage, plan = conversation.ask(line, write)
    except KeyboardInterrupt:
        console.print("\n(stopped)", style="dim")
        return
    seconds = time.perf_counter() - start
    live = plan["live_tokens"]
    console.print(
        f"\nlive {live} · cached {usage.cached} · repositioned {usage.repos} · "
        f"dropped {usage.prompt - live} · computed {usage.computed} · "
        f"generated {usage.generated} tokens, {seconds:.1f} s",
        style="dim",
    )
    for warning in plan["warnings"]:
        console.print(f"warning: {warning}", style="yellow")
