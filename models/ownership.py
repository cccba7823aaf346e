"""Which message each character of a rendered chat template prints.

Text remembers where it came from. Every string that is handed to a template is a `Text`: a str
with a `Tag` on each run of its characters, kept through the string operations that templates use,
so that `system_message = messages[0].content | trim` still is message 0's wherever it is printed.
The template's own words carry no tag. They get one from the place where they are printed:

1. In one `{{ ... }}` beside a message's text, they are that message's header or footer; where
   that is only half a frame, of which rule 2 gives the other half to nobody, they are nobody's.
2. Otherwise the smallest branch or loop body around them that prints anything tagged decides: a
   body that prints one message's text is that message's; one that prints text of several messages,
   or also text that is nobody's (tool schemas), is nobody's. So a header and a footer around a
   message *and* the tool schema stay with the schema, which is never dropped.
3. The body of a loop over the messages is the message's that the loop stands at, except a branch
   that only its first round can take and that prints no message's text (a default system prompt).
4. Under `if add_generation_prompt`, they are the generation header.
5. What is left, at the template's top level, is nobody's.

The template is compiled a second time for this, with marks at the borders of branches and loop
bodies; the marks print nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2 import filters, nodes, sandbox, visitor

NOBODY = -1
GENERATION = -2  # the header of the message that is to be generated


class Tag(NamedTuple):
    """Where some characters come from."""

    owner: int  # index of a message, NOBODY or GENERATION
    field: str = ""  # the message's field that they print, ANY for several; empty for its frame
    # The template's words on one side only of a message's text: they close, or open, a frame that
    # something else opened, or closes, and are nobody's where the rest of that frame is.
    half_frame: bool = False
    # Where in the field the first of these characters stands; None where that is not known.
    at: int | None = None

    def moved(self, by: int) -> Tag:
        """The tag of the characters from the `by`th on."""
        return self if self.at is None else self._replace(at=self.at + by)


ANY = "*"
Runs = tuple[tuple[int, Tag | None], ...]  # (length, tag), one after the other; None: no tag


class Text(str):
    """A str that knows where its characters come from."""

    _runs: Runs  # the sandbox keeps templates off names that start with an underscore

    def __new__(cls, value: str = "", runs: Iterable[tuple[int, Tag | None]] | None = None) -> Text:
        """A copy of `value` with these runs, or without tags."""
        self = super().__new__(cls, value)
        self._runs = ((len(self), None),) if runs is None else tuple(runs) or ((0, None),)
        return self

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return joined(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined(other, self) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: int | slice) -> Text:
        chars = super().__getitem__(key)
        if not isinstance(key, slice):
            key = slice(key, key + 1 or None)
        start, stop, step = key.indices(len(self))
        return Text(chars, _cut(self._runs, start, max(start, stop)) if step == 1 else None)

    def lstrip(self, chars: str | None = None) -> Text:
        """As str.lstrip."""
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> Text:
        """As str.rstrip."""
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> Text:
        """As str.strip."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Text:
        """As str.removeprefix."""
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> Text:
        """As str.removesuffix."""
        return self[: len(super().removesuffix(suffix))]

    def partition(self, sep: str) -> tuple[Text, ...]:
        """As str.partition."""
        return self._in_order(super().partition(sep), 0)

    def rpartition(self, sep: str) -> tuple[Text, ...]:
        """As str.rpartition."""
        return self._in_order(super().rpartition(sep), 0)

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Text]:
        """As str.split."""
        return self._split(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[Text]:
        """As str.rsplit."""
        return self._split(super().rsplit(sep, maxsplit), sep)

    def _split(self, parts: list[str], sep: str | None) -> list[Text]:
        if sep is not None:
            return [*self._in_order(parts, len(sep))]
        at, found = 0, []
        for part in parts:  # there is only white space between them
            at = self.index(part, at)
            found.append(self[at : at + len(part)])
            at += len(part)
        return found

    def _in_order(self, parts: Iterable[str], gap: int) -> tuple[Text, ...]:
        """Parts that follow one another, each so many characters behind the last."""
        ends = itertools.accumulate((len(part) + gap for part in parts), initial=0)
        return tuple(self[start : stop - gap] for start, stop in itertools.pairwise(ends))


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its result tagged like its first argument, where that has one tag only."""

    def carrying(value: Any, *args: Any, **kwargs: Any) -> Any:
        return tagged(function(value, *args, **kwargs), tag_of(value))

    return carrying


for _name in ("splitlines", "replace", "lower", "upper", "title", "capitalize"):
    setattr(Text, _name, carried(getattr(str, _name)))


class Message(dict):
    """A message as a template sees it, with its place in the history."""

    def __init__(self, index: int, fields: Mapping[str, Any]):
        super().__init__()
        for name, value in fields.items():
            tag = Tag(index, name)
            self[tagged(name, tag)] = tagged(
                value, tag._replace(at=0) if isinstance(value, str) else tag)
        self._index = index


def tagged(value: Any, tag: Tag | None) -> Any:
    """A copy of JSON-like data in which every string carries the tag."""
    if isinstance(value, str):
        return Text(value, ((len(value), tag),))
    if isinstance(value, Mapping):
        return {tagged(k, tag): tagged(v, tag) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(tagged(v, tag) for v in value)
    return value


def tag_of(value: Any) -> Tag | None:
    """The tag that all strings in JSON-like data share; None if they do not."""
    tags = {tag and tag._replace(at=None) for tag in _tags(value)}
    if len(tags) == 1:
        return tags.pop()
    owners = {tag and tag.owner for tag in tags}
    return Tag(owners.pop(), ANY) if len(owners) == 1 else None


def _tags(value: Any) -> Iterator[Tag | None]:
    if isinstance(value, str):
        yield from (tag for _, tag in runs_of(value))
    elif isinstance(value, Mapping):
        yield from itertools.chain.from_iterable(map(_tags, itertools.chain(*value.items())))
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tags, value))


def runs_of(text: str) -> Runs:
    """The tagged runs of a string."""
    return text._runs if isinstance(text, Text) else ((len(text), None),)


def joined(*parts: Any) -> Text:
    """Concatenation of strings (or of what prints as one)."""
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    return Text("".join(texts), itertools.chain.from_iterable(map(runs_of, texts)))


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    kept, at = [], 0
    for length, tag in runs:
        low, high = max(start, at), min(stop, at + length)
        if low < high:
            kept.append((high - low, tag and tag.moved(low - at)))
        at += length
    return tuple(kept) or ((0, runs[0][1]),)


def printed(value: Any) -> Text:
    """What `{{ value }}` prints; beside tagged text, the template's words get its tag (rule 1)."""
    text = value if isinstance(value, str) else tagged(str(value), tag_of(value))
    runs = runs_of(text)
    places = [i for i, (_, tag) in enumerate(runs) if tag is not None]
    if not places:
        return Text(text)
    first, last = places[0], places[-1]
    half = (sum(n for n, _ in runs[:first]) > 0) != (sum(n for n, _ in runs[last + 1 :]) > 0)
    tags, owner = [], runs[first][1].owner
    for i, (_, tag) in enumerate(runs):
        owner = owner if tag is None else tag.owner
        tags.append(tag or Tag(owner, half_frame=half and not first < i < last))
    return Text(text, ((length, tag) for (length, _), tag in zip(runs, tags, strict=True)))


@dataclasses.dataclass
class _Body:
    """A branch or a round of a loop, while it is being printed."""

    depth: int
    message: int | None = None  # of a loop over messages: the one it stands at
    loop: bool = False
    first_only: bool = False
    generation: bool = False
    start: int = 0  # its first run
    untagged: list[int] = dataclasses.field(default_factory=list)  # runs still without a tag
    half_frames: list[int] = dataclasses.field(default_factory=list)
    owners: set[int] = dataclasses.field(default_factory=set)  # of all that it printed

    def verdict(self) -> Tag | None:
        """Who owns the template's words in this body (rules 2 and 3)."""
        if self.message is not None:
            return Tag(self.message)
        if len(self.owners) == 1:
            return Tag(*self.owners)
        return Tag(NOBODY) if self.owners or self.first_only else None


class _Mark(str):
    """The border of a body in the stream of printed pieces; prints nothing."""

    body: _Body | None  # the body that begins here
    depth: int  # bodies at this depth and below have ended

    def __new__(cls, depth: int, body: _Body | None = None) -> _Mark:
        self = super().__new__(cls)
        self.depth, self.body = depth, body
        return self

    def __str__(self) -> str:
        return self


def _take_calls(body: _Body, runs: list[tuple[int, Tag | None]]) -> None:
    """Give a round's message what the round prints of other messages' calls alone (rule 3)."""
    for owner in body.owners - {body.message, NOBODY}:
        its = [i for i in range(body.start, len(runs)) if runs[i][1] and runs[i][1].owner == owner]
        if {runs[i][1].field for i in its} - {""} == {"tool_calls"}:
            body.owners.remove(owner)
            for i in its:
                runs[i] = (runs[i][0], Tag(body.message))


def _gathered(parts: Iterable[str]) -> Text:
    """The printed pieces as one text, in which every body has given its verdict."""
    texts: list[str] = []
    runs: list[tuple[int, Tag | None]] = []
    open_bodies = [_Body(depth=-1)]

    def close() -> None:
        body, outer = open_bodies.pop(), open_bodies[-1]
        tag = body.verdict()
        if body.message is not None:
            _take_calls(body, runs)
        if body.generation:
            tag, body.untagged = Tag(GENERATION), [
                i for i in range(body.start, len(runs))
                if runs[i][1] is None or runs[i][1].owner == NOBODY
            ]
            body.owners.discard(NOBODY)
        if tag is None:
            outer.untagged += body.untagged
        else:
            shared = NOBODY in body.owners and tag.owner == NOBODY
            for i in body.untagged + (body.half_frames if shared else []):
                runs[i] = (runs[i][0], tag)
        outer.owners |= body.owners

    for part in parts:
        if isinstance(part, _Mark):
            while open_bodies[-1].depth >= part.depth:
                close()
            if part.body is not None:
                loop = next((body for body in reversed(open_bodies) if body.loop), None)
                part.body.first_only &= loop is not None and loop.message is not None
                part.body.start = len(runs)
                open_bodies.append(part.body)
            continue
        texts.append(part)
        body = open_bodies[-1]
        for length, tag in runs_of(part):
            if tag is None:
                body.untagged.append(len(runs))
            else:
                body.owners.add(tag.owner)
                if tag.half_frame:
                    body.half_frames.append(len(runs))
            runs.append((length, tag))
    while len(open_bodies) > 1:
        close()
    return Text("".join(texts), runs)


class OwnershipEnvironment(sandbox.ImmutableSandboxedEnvironment):
    """A Jinja environment whose traced templates render to a `Text`."""

    concat = staticmethod(_gathered)

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.filters["join"] = _join
        self.filters.update(_TRACERS)

    def compile_traced(self, source: str) -> jinja2.Template:
        """The template with marks at the borders of its bodies."""
        tree = _Instrument().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)


# These take the context so that Jinja does not call them once, at compile time.
@jinja2.pass_context
def _begin_branch(context: Any, depth: int, first_only: bool, generation: bool) -> _Mark:
    return _Mark(depth, _Body(depth, first_only=first_only, generation=generation))


@jinja2.pass_context
def _begin_round(context: Any, depth: int, *targets: Any) -> _Mark:
    message = next((value._index for value in targets if isinstance(value, Message)), None)
    return _Mark(depth, _Body(depth, message=message, loop=True))


@jinja2.pass_context
def _end(context: Any, depth: int) -> _Mark:
    return _Mark(depth)


# Called as filters, which is Jinja's cheapest call, by names that no template can spell.
_PRINTED, _JOINED, _BRANCH, _ROUND, _END = "(printed)", "(joined)", "(branch)", "(round)", "(end)"
_TRACERS = {
    _PRINTED: printed, _JOINED: joined, _BRANCH: _begin_branch, _ROUND: _begin_round, _END: _end,
}


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> Text:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    parts = [part for item in value for part in (d, item)]
    return joined(*parts[1:])


def _expressions(*sources: str) -> list[nodes.Expr]:
    parse = jinja2.Environment().parse
    return [parse("{{" + source + "}}").body[0].nodes[0] for source in sources]


_FIRST_ROUND = _expressions(
    "loop.first", "loop.index0 == 0", "loop.index == 1", "not loop.index0")
_GENERATION = _expressions(
    "add_generation_prompt", "add_generation_prompt is true", "add_generation_prompt == true")


class _Instrument(visitor.NodeTransformer):
    """Puts marks around bodies, and tags on what `{{ }}` prints."""

    def __init__(self):
        self._depth = 0

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        pieces: list[nodes.Node] = []
        for child in node.nodes:
            if isinstance(child, nodes.CondExpr):
                shown = [nodes.Output([branch]) if branch else None
                         for branch in (child.expr1, child.expr2)]
                branch = nodes.If(child.test, [shown[0]], [], [shown[1]] if shown[1] else [])
                pieces.append(self.visit(branch.set_lineno(node.lineno, override=True)))
            elif isinstance(child, (nodes.TemplateData, nodes.Const)):
                pieces.append(nodes.Output([child], lineno=node.lineno))
            else:
                pieces.append(_print(_PRINTED, self.visit(child)))
        return pieces

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _call(_JOINED, *map(self.visit, node.nodes))

    def visit_If(self, node: nodes.If) -> nodes.Node:
        conditions = list(_conditions(node.test))
        flags = [any(c in known for c in conditions) for known in (_FIRST_ROUND, _GENERATION)]
        node.test = self.visit(node.test)
        node.body = self._body(_BRANCH, map(nodes.Const, flags), node.body)
        node.elif_ = [self.visit(branch) for branch in node.elif_]
        if node.else_:
            no_flags = map(nodes.Const, (False, False))
            node.else_ = self._body(_BRANCH, no_flags, node.else_)
        return node

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        node.iter = self.visit(node.iter)
        node.test = node.test and self.visit(node.test)
        names = [*([node.target] if isinstance(node.target, nodes.Name) else []),
                 *node.target.find_all(nodes.Name)]
        targets = [nodes.Name(name.name, "load") for name in names]
        node.body = self._body(_ROUND, targets, node.body)
        node.else_ = self._visit_all(node.else_)
        # A round that ends early, by `continue` or `break`, ends at the next mark.
        return [node, _print(_END, nodes.Const(self._depth))]

    def _body(
        self, begin: str, args: Iterable[nodes.Expr], body: Sequence[nodes.Node]
    ) -> list[nodes.Node]:
        depth = nodes.Const(self._depth)
        self._depth += 1
        inner = self._visit_all(body)
        self._depth -= 1
        return [_print(begin, depth, *args), *inner, _print(_END, depth)]

    def _visit_all(self, body: Sequence[nodes.Node]) -> list[nodes.Node]:
        return nodes.Template(self.generic_visit(nodes.Template(list(body))).body).body


def _conditions(test: nodes.Expr) -> Iterator[nodes.Expr]:
    """What must all hold for the test to hold."""
    if isinstance(test, nodes.And):
        yield from _conditions(test.left)
        yield from _conditions(test.right)
    else:
        yield test


def _call(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None)


def _print(name: str, *args: nodes.Expr) -> nodes.Output:
    return nodes.Output([_call(name, *args)])
