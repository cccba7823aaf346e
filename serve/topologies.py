"""Who reads whom: a list of calls, each with the earlier calls whose answers it reads.

The last call gives the final answer. Nothing is generated for nobody: where a shape leaves answers
that no one reads, the last call reads them too. Only the last round of a debate is not read, since
every debater is asked once more there.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST, MOST = 2, 16
NAMES = ("full", "chain", "star", "debate", "layered", "mesh", "random")

Reads = list[Sequence[int]]


@dataclass(frozen=True)
class Call:
    """One request of one agent."""

    agent: int
    round: int
    reads: tuple[int, ...]
    """Places of earlier calls, in the order in which their answers stand in the prompt."""


@dataclass(frozen=True)
class Topology:
    """The calls that one task takes, in an order in which they can be made."""

    name: str
    agents: int
    calls: tuple[Call, ...]

    @property
    def levels(self) -> list[list[int]]:
        """Places of calls; those of one level depend on earlier levels alone."""
        depth: list[int] = []
        for call in self.calls:
            depth.append(1 + max((depth[read] for read in call.reads), default=-1))
        return [[place for place, at in enumerate(depth) if at == level]
                for level in range(max(depth) + 1)]


def build(name: str, agents: int, *, rounds: int = 2, width: int = 2, seed: int = 0) -> Topology:
    """Make a topology.

    Args:
      name: one of `NAMES`. full: everyone reads all before; chain: the one before; star: the last
        reads all others, who read only the task; debate: everyone reads the whole round before;
        layered: everyone reads the whole layer before, the last agent is a layer of its own; mesh:
        agents on a grid read their neighbours to the left and above; random: everyone but the
        first reads at least one before, others by the toss of a coin.
      agents: 2 to 16.
      rounds: of a debate, at least 2.
      width: agents in a layer of layered, at least 1.
      seed: of random; the same seed is the same topology.

    Raises:
      ValueError: naming the parameter, its value and the remedy.
    """
    if name not in NAMES:
        raise ValueError(f"topology is {name!r}: take one of {', '.join(NAMES)}")
    if not FEWEST <= agents <= MOST:
        raise ValueError(f"agents is {agents}: take {FEWEST} to {MOST}")
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: take at least 2, or debaters read nothing")
    if width < 1:
        raise ValueError(f"width is {width}: take at least 1 agent a layer")
    if name == "debate":
        return Topology(name, agents, _debate(agents, rounds))
    reads = _reads(name, agents, width, seed)
    read = {place for row in reads for place in row}
    reads[-1] = sorted({*reads[-1], *(set(range(agents - 1)) - read)})
    return Topology(name, agents, tuple(Call(i, 0, tuple(row)) for i, row in enumerate(reads)))


def _reads(name: str, agents: int, width: int, seed: int) -> Reads:
    match name:
        case "full":
            return [range(agent) for agent in range(agents)]
        case "chain":
            return [range(max(0, agent - 1), agent) for agent in range(agents)]
        case "star":
            return [*[()] * (agents - 1), range(agents - 1)]
        case "layered":
            return _layered(agents, width)
        case "mesh":
            return _mesh(agents)
        case _:
            return _random(agents, seed)


def _layered(agents: int, width: int) -> Reads:
    reads: Reads = []
    for agent in range(agents - 1):
        first = agent - agent % width
        reads.append(range(max(0, first - width), first))
    last_layer = (agents - 2) // width * width
    return [*reads, range(last_layer, agents - 1)]


def _mesh(agents: int) -> Reads:
    columns = math.isqrt(agents - 1) + 1  # as square as it gets
    return [[*([agent - columns] if agent >= columns else []),
             *([agent - 1] if agent % columns else [])] for agent in range(agents)]


def _random(agents: int, seed: int) -> Reads:
    toss = random.Random(seed)
    reads: Reads = [()]
    for agent in range(1, agents):
        sure = toss.randrange(agent)
        reads.append([other for other in range(agent) if toss.random() < 0.5 or other == sure])
    return reads


def _debate(agents: int, rounds: int) -> tuple[Call, ...]:
    return tuple(
        Call(agent, round, tuple(range((round - 1) * agents, round * agents)) if round else ())
        for round in range(rounds) for agent in range(agents))
