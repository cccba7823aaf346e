"""`kvfunc agents`: agents that read each other's answers, over any server with OpenAI's API.

A task goes once through a topology, and every call's prompt is static text with shared contents in
between: the task, and answers of other agents. Each content is a text part of its own under a name
(`"cache": {"share": NAME}`), and names and static text are the same for every task. So a server can
learn what a content's KV is like behind them, and reuse it in the prompts of all who read it.

What is measured is TTFT and how much of each prompt the server did not compute. A call counts as
**reused** if all its shared contents must have been. A server may compute the static text behind
the first content and the `HEAD_TOKENS` first tokens of each content (anchor_pool.md, 4); had it
computed one content whole, that would have been more by its length. So the bound is what it may
compute and `REUSED_BELOW` of the shortest content, lengths being estimated from characters.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import yaml

from .client import Client, Refused, ServerBroke, Usage
from .topologies import Topology

HEAD_TOKENS = 8
REUSED_BELOW = 0.5

CLOSING = {
    "gsm8k": '\n\nNow give your own answer. Its last line is "####" and the number asked for.\n',
    "humaneval": "\n\nNow give your own answer: the whole function in one ```python block.\n",
}
NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Mode(StrEnum):
    """How shared contents are sent."""

    share = "share"  # as named parts
    exact = "exact"  # as named parts, with the wish that nothing is estimated
    plain = "plain"  # within one string, for servers that know no `cache`


@dataclass(frozen=True)
class Settings:
    """What all requests have in common, but for `concurrency`: requests at once."""

    model: str
    mode: Mode = Mode.share
    max_tokens: int = 256
    ignore_eos: bool = False
    seed: int = 0
    salt: str | None = None  # a namespace of the server's cache
    concurrency: int = 1

    def __post_init__(self):
        for name in ("max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: take at least 1")
        if self.salt is not None and self.mode is Mode.plain:
            raise ValueError(f"salt is {self.salt!r}: leave it out, since mode plain has no cache")


@dataclass(frozen=True)
class Role:
    """Who an agent is; `reads` is said before the answers of others."""

    name: str
    prompt: str
    reads: str = ""


@dataclass(frozen=True)
class Task:
    """A question, with what is needed to judge an answer."""

    id: str
    kind: str
    text: str
    reference: str
    """The number of GSM8K, the function's name of HumanEval."""


@dataclass(frozen=True)
class Part:
    """A piece of a user message; with a name, it is shared."""

    text: str
    share: str | None = None


@dataclass(frozen=True)
class Answer:
    """What came of one streamed request."""

    text: str
    finish_reason: str
    usage: Usage
    predicted_error: float | None
    ttft_seconds: float
    seconds: float


@dataclass(frozen=True)
class Record:
    """One call, as it stands in the log."""

    task: str
    call: int
    agent: str
    round: int
    answer: Answer
    reused_below: float
    """Computed tokens below which all shared contents were reused (module docstring)."""
    correct: bool | None
    """GSM8K: whether the answer's number is the reference."""
    parses: bool | None
    """HumanEval: whether the answer's code parses and has the function. It is never run."""

    @property
    def reused(self) -> bool:
        """Whether all shared contents were reused."""
        return self.answer.usage.computed < self.reused_below

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Record":
        """Read a line of the log."""
        answer = dict(fields["answer"])
        usage = Usage(**answer.pop("usage"))
        return cls(**{**fields, "answer": Answer(**answer, usage=usage)})


class AgentClient(Client):
    """A client of any server with OpenAI's API. Raises `Refused` or `ServerBroke`."""

    def first_model(self) -> str:
        """The model that the server lists first."""
        return self._json("GET", "/v1/models")["data"][0]["id"]

    def answer(self, body: Mapping[str, Any]) -> Answer:
        """Stream one chat completion and time it. Counters that a server has not are 0."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        text, ttft, reason, usage, error = [], None, None, None, None
        start = time.perf_counter()
        with self._response("POST", "/v1/chat/completions", body) as response:
            for chunk in _chunks(response):
                if "error" in chunk:
                    raise ServerBroke(chunk["error"]["message"])
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    text.append(delta.get("content") or "")
                    reason = choice.get("finish_reason") or reason
                    if ttft is None and (text[-1] or delta.get("reasoning_content") or reason):
                        ttft = time.perf_counter() - start
                usage = chunk.get("usage") or usage
                error = (chunk.get("cache") or {}).get("predicted_error", error)
        if reason is None:
            raise ServerBroke("the answer broke off")
        if usage is None:
            raise ServerBroke("the stream had no usage: the server ignores include_usage, without "
                              "which nothing can be measured")
        return Answer("".join(text), reason, _usage(usage), error, ttft,
                      time.perf_counter() - start)


def read_roles(path: Path, kind: str) -> list[Role]:
    """Read the roles for a kind of task from YAML. Raises ValueError naming what is wrong.

    The file is a list of {name, prompt, reads (may be left out)}, or has such a list for each kind.
    """
    try:
        entries = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        raise ValueError(f"roles {path}: no YAML ({error}). See examples/roles.yaml") from error
    if isinstance(entries, dict):
        entries = entries.get(kind)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"roles {path}: {entries!r:.60} is no list of roles for {kind}. Give a "
                         "list of name and prompt each, as examples/roles.yaml has.")
    for place, entry in enumerate(entries):
        keys = entry if isinstance(entry, dict) else {}
        faulty = not {"name", "prompt"} <= {*keys} <= {"name", "prompt", "reads"}
        if faulty or not all(isinstance(text, str) and text.strip() for text in keys.values()):
            raise ValueError(f"roles {path}, role {place}: {entry!r:.60} is no role. Give it a "
                             "name, a prompt and, if wanted, a sentence reads; all are text.")
    roles = [Role(**{key: text.strip() for key, text in entry.items()}) for entry in entries]
    for place, role in enumerate(roles):
        if role.name in (other.name for other in roles[:place]):
            raise ValueError(f"roles {path}, role {place}: the name {role.name!r} is taken. "
                             "Answers go by the name: give another.")
    return roles


def read_tasks(path: Path, limit: int | None = None) -> list[Task]:
    """Read the first `limit` GSM8K questions or HumanEval problems, one JSON object a line.

    Raises ValueError naming the line that is neither.
    """
    tasks: dict[str, Task] = {}
    lines = path.read_text("utf-8").rstrip("\n").split("\n")
    for number, line in enumerate(lines[:limit], 1):
        try:
            task = _task(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"tasks {path}, line {number}: not a task ({error!r}). Each line is an object of "
                "GSM8K (question, answer) or HumanEval (prompt, entry_point)."
            ) from error
        if task.id in tasks:
            raise ValueError(f"tasks {path}, line {number}: {task.id} was there before; remove it")
        tasks[task.id] = task
    return list(tasks.values())


def agent_names(roles: Sequence[Role], agents: int) -> list[str]:
    """Roles in turn; numbered where several agents have the same role."""
    names = []
    for agent in range(agents):
        turn, place = divmod(agent, len(roles))
        alone = place + len(roles) >= agents
        names.append(roles[place].name if alone else f"{roles[place].name} {turn + 1}")
    if len(set(names)) < agents:
        raise ValueError(f"roles make agents {names}, two of one name: rename a role that ends in "
                         "a number")
    return names


def prompt(task: Task, role: Role, read: Sequence[tuple[str, str]]) -> list[Part]:
    """The user message: the task, then `read`, (agent's name, answer) each, and what to do now.

    Static text begins and ends with line breaks, so that few tokens reach over a border.
    """
    parts = [Part("Task:\n"), Part(task.text, "task")]
    before = f"\n\n{role.reads}" if role.reads else ""
    for name, answer in read:
        parts.append(Part(f"{before}\n\nAnswer of {name}:\n"))
        parts.append(Part(answer.strip() or "(none)", f"answer:{name}"))
        before = ""
    return [*parts, Part(CLOSING[task.kind])]


def request(role: Role, parts: Sequence[Part], settings: Settings) -> dict[str, Any]:
    """The body of a chat completion."""
    if settings.mode is Mode.plain:
        content = "".join(part.text for part in parts)
    else:
        content = [{"type": "text", "text": part.text} | (
            {"cache": {"share": part.share}} if part.share else {}) for part in parts]
    body: dict[str, Any] = {
        "model": settings.model, "temperature": 0, "seed": settings.seed,
        "max_tokens": settings.max_tokens,
        "messages": [{"role": "system", "content": role.prompt},
                     {"role": "user", "content": content}]}
    cache: dict[str, Any] = {"exact": True} if settings.mode is Mode.exact else {}
    if settings.salt is not None:
        cache["salt"] = settings.salt
    if cache:
        body["cache"] = cache
    if settings.ignore_eos:
        body["ignore_eos"] = True
    return body


def run(client: AgentClient, topology: Topology, roles: Sequence[Role], tasks: Sequence[Task],
        settings: Settings, *, log: Path | None = None,
        tick: Callable[[], None] = lambda: None) -> list[Record]:
    """Take every task through the topology.

    Args:
      client: of the server to measure.
      topology: as `topologies.build` makes it.
      roles: of the agents, in turn.
      tasks: one after the other. Calls of one task that need not wait for each other may run at
        once, up to `settings.concurrency`.
      settings: of the requests.
      log: a JSON line that says what is run, then one a call. Tasks that it has whole are not run
        again.
      tick: called after each call, for those of the log too.

    Returns:
      The records in order of tasks and calls.

    Raises:
      Refused, ServerBroke: naming task and agent. What was logged stays, and can be gone on from.
      ValueError: if the log is of another run, or two agents would have one name.
    """
    runner = _Runner(client, topology, roles, agent_names(roles, topology.agents), settings)
    records: list[Record] = []
    with contextlib.ExitStack() as stack:
        finished, write = {}, lambda record: None
        if log is not None:
            header = {"topology": topology, "roles": roles, **dataclasses.asdict(settings)}
            del header["concurrency"]
            finished, write = stack.enter_context(_log(log, header, len(topology.calls)))
        pool = stack.enter_context(ThreadPoolExecutor(settings.concurrency))
        for task in tasks:
            if task.id in finished:
                done = finished[task.id]
                for _ in done:
                    tick()
            else:
                done = []
                for record in runner.records(task, pool):
                    write(record)
                    done.append(record)
                    tick()
            records += sorted(done, key=lambda record: record.call)
    return records


@dataclass(frozen=True)
class _Runner:
    client: AgentClient
    topology: Topology
    roles: Sequence[Role]
    names: Sequence[str]
    settings: Settings

    def records(self, task: Task, pool: ThreadPoolExecutor) -> Iterator[Record]:
        answers: dict[int, str] = {}
        for level in self.topology.levels:
            # `map` also takes back what waits when one of the calls fails.
            for record in pool.map(functools.partial(self._ask, task, dict(answers)), level):
                answers[record.call] = record.answer.text
                yield record

    def _ask(self, task: Task, answers: Mapping[int, str], place: int) -> Record:
        calls = self.topology.calls
        call, name = calls[place], self.names[calls[place].agent]
        role = self.roles[call.agent % len(self.roles)]
        read = [(self.names[calls[read].agent], answers[read]) for read in call.reads]
        parts = prompt(task, role, read)
        try:
            answer = self.client.answer(request(role, parts, self.settings))
        except Refused as error:
            raise Refused(f"{task.id}, {name}: {error}", error.code) from error
        except ServerBroke as error:
            raise ServerBroke(f"{task.id}, {name}: {error}") from error
        bound = reused_below(role, parts, answer.usage.prompt)
        return Record(task.id, place, name, call.round, answer, bound, *_judge(task, answer.text))


def _judge(task: Task, answer: str) -> tuple[bool | None, bool | None]:
    if task.kind == "gsm8k":
        return gsm8k_number(answer) == Decimal(task.reference), None
    return None, defines(answer, task.reference)


def reused_below(role: Role, parts: Sequence[Part], prompt_tokens: int) -> float:
    """Computed tokens below which a call counts as reused (module docstring)."""
    tokens_per_character = prompt_tokens / sum(map(len, [role.prompt, *(p.text for p in parts)]))
    # The first part is static and stands before all contents.
    behind = sum(len(part.text) for part in parts[1:] if not part.share)
    shared = [len(part.text) for part in parts if part.share]
    own = behind + REUSED_BELOW * min(shared)
    return tokens_per_character * own + HEAD_TOKENS * len(shared)


def gsm8k_number(text: str) -> Decimal | None:
    """The number behind the last "####", or the last of the text where none stands there."""
    found = NUMBER.findall(text.rpartition("####")[2])[:1] if "####" in text else []
    found = found or NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "")) if found else None


def defines(text: str, function: str) -> bool:
    """Whether the first code block, or the text that has none, is Python with this function."""
    block = CODE.search(text)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(block[1] if block else text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)


@contextlib.contextmanager
def _log(path: Path, header: Mapping[str, Any], calls: int) -> Iterator[
        tuple[dict[str, list[Record]], Callable[[Any], None]]]:
    """The records of the tasks that the log has whole, and what writes one line more."""
    header = json.loads(_line(header))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:

        def write(value: Any) -> None:
            file.write(_line(value))
            file.flush()

        file.seek(0)
        content = file.read()
        if content:
            lines = content.split(b"\n")[:-1]
            finished = _finished(path, lines, header, calls)
            # A killed run may have left half a line.
            file.truncate(sum(len(line) + 1 for line in lines))
        else:
            finished = {}
            write({"run": header})
        yield finished, write


def _finished(path: Path, lines: Sequence[bytes], header: Mapping[str, Any],
              calls: int) -> dict[str, list[Record]]:
    try:
        first, *others = map(json.loads, lines)
        was = first["run"]
        records = [Record.from_json(fields) for fields in others]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"log {path}: no log of `kvfunc agents` ({error!r}). Give another file, "
                         "or one that is not there yet") from error
    for name, value in header.items():
        if was.get(name) != value:
            raise ValueError(
                f"log {path}: of another run, whose {name} is {was.get(name)!r:.200} and not "
                f"{value!r:.200}. Give another file, or say the same")
    tasks: dict[str, dict[int, Record]] = {}
    for record in records:
        tasks.setdefault(record.task, {})[record.call] = record
    return {task: [done[call] for call in range(calls)]
            for task, done in tasks.items() if len(done) == calls}


def _line(value: Any) -> bytes:
    return json.dumps(value, default=dataclasses.asdict).encode() + b"\n"


def _task(line: Mapping[str, str]) -> Task:
    kind = "gsm8k" if "question" in line else "humaneval"
    text = line["question" if kind == "gsm8k" else "prompt"].strip()
    name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    if kind == "humaneval":
        return Task(name, kind, text, line["entry_point"])
    number = gsm8k_number(line["answer"])
    if number is None:
        raise ValueError("its answer has no number")
    return Task(name, kind, text, str(number))


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The objects of a stream's data lines.

    Lines end at "\\n" alone: httpx's `iter_lines` would also cut at a U+2028 within a text.
    """
    rest = b""
    for received in response.iter_bytes():
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield json.loads(data)


def _usage(usage: Mapping[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt=usage["prompt_tokens"], generated=usage["completion_tokens"],
        **{name: details.get(f"{name}_tokens") or 0
           for name in ("cached", "repos", "drop_skipped", "approximate")})
