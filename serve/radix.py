"""The radix tree: which KV is resident, found by the stream of (events standing before it, token).

KV at a token is a function of the tokens and the events before it and of nothing else, so whatever
two streams begin with in common is one path, shared by reference. Positions are no part of the key:
a repos copies nothing. A token on a path may have lost its KV; then its slot is a hole, and what
lies behind it stays of use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

import numpy as np
from jaxtyping import Float, Int

from kvfunc.history import HOLE, Drop, Event, History, first_difference

from . import eviction
from .pages import Pages

Key = tuple[tuple[Event, ...], int]
Tokens = Int[np.ndarray, " tokens"]


@dataclasses.dataclass(eq=False)
class Node:
    """A stretch of a stream, from raw index `start` on, behind that of its parent."""

    start: int
    tokens: Tokens
    slots: Int[np.ndarray, " tokens"]  # HOLE where the KV is not resident
    events: tuple[Event, ...]  # those standing before one of these tokens
    parent: Node | None = None
    children: dict[Key, Node] = dataclasses.field(default_factory=dict)
    last_use: int = 0
    is_answer: bool = False  # generated, and no prompt has had it yet

    @property
    def stop(self) -> int:
        """The raw index behind its last token."""
        return self.start + len(self.tokens)

    @property
    def key(self) -> Key:
        """Under which its parent has it."""
        return tuple(e for e in self.events if e.at == self.start), int(self.tokens[0])

    def walk(self) -> Iterator[Node]:
        """All nodes of the subtree, parents first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


class Tree:
    """Resident KV by its key. Namespaces (`salt`) share nothing.

    Args:
      pages: where the KV stands.
      policy: what is evicted first (eviction.py).
      doubling: length of context at which a token's attention costs as much as all else of it.
    """

    def __init__(self, pages: Pages, policy: eviction.Policy = eviction.by_worth,
                 doubling: int = 4096):
        self._pages, self._policy, self._doubling = pages, policy, doubling
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0
        self._gap = eviction.Gap()

    def find(self, salt: Hashable, tokens: Tokens, history: History) -> Int[np.ndarray, " tokens"]:
        """The slot of every token that has KV under this key, HOLE for the others."""
        slots = np.full(len(tokens), HOLE, np.int32)
        for node, shared in self._path(salt, tokens, history):
            slots[node.start:node.start + shared] = node.slots[:shared]
        return slots

    def use(self, salt: Hashable, tokens: Tokens, history: History) -> None:
        """Note that a request came for this stream: what it finds is of use still."""
        self._clock += 1
        for node, shared in self._path(salt, tokens, history):
            if shared < len(node.tokens):
                self._split(node, shared)
            elif not node.children:
                self._gap.observe(self._clock - node.last_use)
            node.last_use, node.is_answer = self._clock, False

    def insert(self, salt: Hashable, tokens: Tokens, history: History,
               slots: Int[np.ndarray, " tokens"], is_answer: bool = False) -> None:
        """Keep the KV of a stream's tokens, except where the tree has it already.

        Args:
          salt: the namespace.
          tokens: the stream.
          history: its events; those that stand behind the last token are no part of it.
          slots: where the KV of each stands; HOLE for none.
          is_answer: whether those that are new to the tree were generated.
        """
        at, node = 0, self._roots.setdefault(salt, Node(0, tokens[:0], slots[:0], ()))
        for node, shared in self._path(salt, tokens, history):
            at = node.start + shared
            if shared < len(node.tokens):
                self._split(node, shared)
            new = slots[node.start:at]
            adopted = (node.slots[:shared] == HOLE) & (new != HOLE)
            node.slots[:shared][adopted] = new[adopted]
            node.last_use = self._clock
            self._pages.keep(new[adopted])
        if at < len(tokens):
            rest = Node(at, tokens[at:].copy(), slots[at:].copy(),
                        history.events_between(at, len(tokens)), node, last_use=self._clock,
                        is_answer=is_answer)
            node.children[rest.key] = rest
            self._pages.keep(rest.slots)
        self._tidy(salt)

    def evict(self, pages: int) -> int:
        """Free so many pages, or all that can be; the tokens that lost their KV are counted."""
        columns = self._columns()
        cost = self._policy(columns, self._pages.count)
        cost[~self._pages.evictable_pages] = np.inf
        chosen = np.argsort(cost, kind="stable")[:min(pages, self._pages.evictable)]
        gone = np.zeros(self._pages.count, bool)
        gone[chosen] = True
        lost = 0
        for node in self._nodes():
            leaves = (node.slots != HOLE) & gone[node.slots // self._pages.size]
            self._pages.forget(node.slots[leaves])
            node.slots[leaves] = HOLE
            lost += int(leaves.sum())
        for salt in [*self._roots]:
            self._tidy(salt)
        return lost

    def clear(self) -> None:
        """Forget everything."""
        for node in self._nodes():
            self._pages.forget(node.slots)
        self._roots.clear()

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from root.walk()

    def _path(self, salt: Hashable, tokens: Tokens, history: History) -> Iterator[tuple[Node, int]]:
        """The nodes along a stream, each with how many of its tokens the stream shares."""
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(tokens):
            node = node.children.get((history.events_between(at, at + 1), int(tokens[at])))
            if node is not None:
                shared = _shared(node, tokens, history)
                at += shared
                leaves = shared < len(node.tokens)  # whoever gets the node may cut it
                yield node, shared
                if leaves:
                    return

    def _split(self, node: Node, place: int) -> None:
        """Cut a node in two; it keeps its first tokens."""
        at = node.start + place
        tail = Node(at, node.tokens[place:], node.slots[place:],
                    tuple(e for e in node.events if e.at >= at), node, node.children, node.last_use,
                    node.is_answer)
        for child in tail.children.values():
            child.parent = tail
        node.tokens, node.slots = node.tokens[:place], node.slots[:place]
        node.events = tuple(e for e in node.events if e.at < at)
        node.children = {tail.key: tail}

    def _tidy(self, salt: Hashable) -> None:
        """Remove stretches without KV at the ends of branches, and needless cuts between nodes."""
        root = self._roots[salt]
        for node in reversed([*root.walk()][1:]):
            only = next(iter(node.children.values())) if len(node.children) == 1 else None
            if only is not None and (only.last_use, only.is_answer) == (
                    node.last_use, node.is_answer):
                node.tokens = np.concatenate([node.tokens, only.tokens])
                node.slots = np.concatenate([node.slots, only.slots])
                node.events += only.events
                node.children = only.children
                for grandchild in node.children.values():
                    grandchild.parent = node
            elif not node.children and (node.slots == HOLE).all():
                del node.parent.children[node.key]
        if not root.children:
            del self._roots[salt]

    def _columns(self) -> eviction.Columns:
        """Everything that is resident, one entry a token."""
        slots, raw, last_use, worth = [], [], [], []
        for root in self._roots.values():
            nodes = [*root.walk()]
            dropped = {root: 0}
            for node in nodes[1:]:
                dropped[node] = dropped[node.parent] + _dropped_by(node.events)
            future: dict[Node, Float[np.ndarray, " tokens"]] = {}
            for node in reversed(nodes):
                below = [future.pop(child) for child in node.children.values()]
                future[node] = (np.sum([x[:node.stop] for x in below], axis=0) if below else
                                np.full(node.stop, self._worth(node, node.stop - dropped[node])))
                for start, stop in _ranges(node.events):
                    future[node][start:stop] = 0
                resident = np.flatnonzero(node.slots != HOLE)
                slots.append(node.slots[resident])
                raw.append(node.start + resident)
                last_use.append(np.full(len(resident), node.last_use))
                worth.append(future[node][node.start:][resident])
        slots, raw, last_use, worth = (
            np.concatenate([np.zeros(0), *part]) for part in (slots, raw, last_use, worth))
        page = slots.astype(np.int64) // self._pages.size
        return eviction.Columns(page=page, raw=raw, last_use=last_use, worth=worth)

    def _worth(self, end: Node, live: int) -> float:
        """The work that one live token at the end of a branch may be expected to save.

        A branch's end stands for a conversation that may go on. If any of its KV is missing then,
        what it dropped has to be computed again too, for the missing KV was computed from that.
        """
        if end.is_answer and end.last_use < end.parent.last_use:
            return 0.0  # the conversation went on without this answer
        work = end.stop * (1 + live / (2 * self._doubling))
        return self._gap.chance(self._clock - end.last_use) * work / max(live, 1)


def _shared(node: Node, tokens: Tokens, history: History) -> int:
    """How many of a node's (events, token) a stream has, that has its parent's."""
    stop = min(node.stop, len(tokens))
    differs = np.flatnonzero(node.tokens[:stop - node.start] != tokens[node.start:stop])
    if len(differs):
        stop = node.start + int(differs[0])
    events = history.events_between(node.start, stop)
    return min(stop, first_difference(events, node.events)) - node.start


def _ranges(events: tuple[Event, ...]) -> Iterator[tuple[int, int]]:
    return (span for event in events if isinstance(event, Drop) for span in event.ranges)


def _dropped_by(events: tuple[Event, ...]) -> int:
    return sum(stop - start for start, stop in _ranges(events))
