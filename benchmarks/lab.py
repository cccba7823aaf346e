"""A laboratory for reuse across contexts: one prompt computed exactly, and with some KV given."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvfunc.history import History
from kvfunc.models.llama import Llama
from kvfunc.models.load import LoadedModel
from kvfunc.segments import Segment, place, read
from kvfunc.storage import KV

LENGTH = 256  # tokens of a content
PROMPTS = {"tutor": 55, "analyst": 120, "programmer": 260, "airline agent": 512}
LONG = 320  # tokens of the prompt that the long base stands behind
ASK = "\n\nNow continue with your task: what are the most important facts above?"
QUOTE = "\n\nList the numbers of the text above, each with the words before it."
CHANGED = 8  # tokens that a near copy has otherwise
SLOTS, ROWS = 2048, 32  # of the pool and of the table: a prompt and what is computed of it
SIZES = (8, 64, 128, 384, 640, 1024)  # numbers of queries that are compiled


@dataclasses.dataclass(frozen=True)
class Case:
    """A content in a prompt, and a text that goes on from it: [before, content, behind, after]."""

    before: tuple[int, ...]
    content: tuple[int, ...]
    behind: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def start(self) -> int:
        """Where the content begins."""
        return len(self.before)

    @property
    def stop(self) -> int:
        """Where it ends."""
        return len(self.before) + len(self.content)

    @property
    def end(self) -> int:
        """Where the prompt ends."""
        return self.stop + len(self.behind)

    @property
    def stream(self) -> list[int]:
        """All of it."""
        return [*self.before, *self.content, *self.behind, *self.after]


@dataclasses.dataclass(frozen=True)
class Exact:
    """What the exact prefill of a case gives."""

    content: Segment
    behind: Segment
    logits: np.ndarray  # [1 + after, vocab], of the prompt's last token and of those after


class Lab:
    """One model in float32 over one pool of KV that is written again for every case.

    The prompt before the content stays computed from one case to the next, as a cache would have
    it: take the cases of one prompt together.
    """

    def __init__(self, model: LoadedModel):
        self.model, self.rope = model, model.config.rope
        c = model.config
        self._kv = KV.zeros(c.layers, SLOTS, c.kv_heads, c.head_dim, jnp.float32)
        self._stands: tuple[int, ...] = ()  # the prompt whose KV is in the first slots
        self._network = Llama(c, model.dtype)
        self._forward = jax.jit(self._network.forward, donate_argnums=4)
        self._read = jax.jit(functools.partial(read, rope=self.rope))
        self._place = jax.jit(functools.partial(place, rope=self.rope), donate_argnums=0)
        self._listen = jax.jit(self._forward_and_norms)

    def exact(self, case: Case) -> Exact:
        """Everything computed."""
        logits = self.given(case, None, range(len(case.content)))
        return Exact(self._segment(case.start, case.stop), self._segment(case.stop, case.end),
                     logits)

    def going_on(self, case: Case, count: int) -> Case:
        """The case with what greedy decoding says after its prompt."""
        case = dataclasses.replace(case, after=())
        logits = self.given(case, None, range(len(case.content)))
        for _ in range(count):
            case = dataclasses.replace(case, after=(*case.after, int(logits[-1].argmax())))
            logits = self._run(case.stream, np.array([len(case.stream) - 1]), np.zeros(1, int))
        return case

    def given(self, case: Case, content: Segment | None, recompute: Sequence[int] = (),
              behind: Segment | None = None) -> np.ndarray:
        """Logits as in `Exact`, where the content's KV is given.

        Args:
          case: whose prompt before the content is computed exactly.
          content: its KV; None where all of it is computed.
          recompute: which tokens of the content are computed all the same.
          behind: KV of the static text behind; its last token is computed. None: all of it is.
        """
        self._put(case, content, behind)
        first = case.stop if behind is None else case.end - 1
        queries = np.concatenate([case.start + np.asarray(sorted(recompute), int),
                                  np.arange(first, len(case.stream))]).astype(int)
        last = len(queries) - 1 - len(case.after)
        return self._run(case.stream, queries, np.arange(last, len(queries)))

    def attention(self, case: Case, content: Segment) -> np.ndarray:
        """How much attention the static text behind pays to each of the content's tokens.

        Returns:
          [layers, tokens of the content], means over heads and over the tokens behind.
        """
        self._put(case, content, None)
        stream, queries = case.stream[:case.end], np.arange(case.stop, case.end)
        packed, rows = self._packed(stream, queries)
        mass = self._listen(self.model.params, *packed, self._kv, rows, np.int32(case.end))
        return np.asarray(mass)[:, case.start:case.stop] / len(queries)

    def _forward_and_norms(self, params, tokens, births, slots, kv, rows, end):
        (_, kv), inner = self._network.apply(
            {"params": params}, tokens, births, slots, kv, rows, jnp.zeros(1, jnp.int32),
            capture_intermediates=lambda module, _: module.name == "attn_norm")
        c, raw = self.model.config, jnp.arange(SLOTS)
        allowed = (raw[None] <= births[:, None]) & (raw < end)[None] & (slots < SLOTS)[:, None]
        masses = []
        for i in range(c.layers):
            name = f"layer_{i}"
            h = inner["intermediates"][name]["attn_norm"]["__call__"][0]
            q = (h @ params[name]["q"]["weight"].T).reshape(len(h), c.heads, c.head_dim)
            q = self.rope.birth_rotation(births)(q).reshape(len(h), c.kv_heads, -1, c.head_dim)
            scores = jnp.einsum("qhgd,khd->hgqk", q, kv.k[i]) / c.head_dim**0.5
            shares = jax.nn.softmax(jnp.where(allowed, scores, -1e30), -1)
            masses.append(jnp.where(allowed, shares, 0).sum(2).mean((0, 1)))
        return jnp.stack(masses)

    def _put(self, case: Case, content: Segment | None, behind: Segment | None) -> None:
        if self._stands != case.before:
            if case.before:
                self._run(case.before, np.arange(case.start), np.array([case.start - 1]))
            self._stands = case.before
        for segment, start, stop in ((content, case.start, case.stop),
                                     (behind, case.stop, case.end)):
            if segment is not None:
                slots = np.arange(start, stop, dtype=np.int32)
                self._kv = self._place(self._kv, segment, slots, np.int32(start))

    def _segment(self, start: int, stop: int) -> Segment:
        return self._read(self._kv, np.arange(start, stop, dtype=np.int32), np.int32(start))

    def _packed(self, tokens: Sequence[int], queries: np.ndarray) -> tuple[tuple, ArrayLike]:
        stream = np.asarray(tokens, np.int32)
        history, size = History(len(stream)), next(s for s in SIZES if s >= len(queries))
        rows = history.rows(queries, np.arange(len(stream))).pad(ROWS, size)
        packed = np.zeros((2, size), np.int32)
        packed[:, :len(queries)] = stream[queries], history.births[queries]
        slots = np.full(size, SLOTS, np.int32)
        slots[:len(queries)] = queries
        return (packed[0], packed[1], slots), rows

    def _run(self, tokens: Sequence[int], queries: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Compute these tokens of a stream whose other KV stands in the pool; logits of some."""
        packed, rows = self._packed(tokens, queries)
        logits, self._kv = self._forward(self.model.params, *packed, self._kv, rows,
                                         at.astype(np.int32))
        return np.asarray(logits)


def divergence(exact: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Mean KL of next-token distributions in nats, and the share whose top token differs."""
    p, q = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (
        exact.astype(np.float64), other.astype(np.float64)))
    return (float((np.exp(p) * (p - q)).sum(-1).mean()),
            float((p.argmax(-1) != q.argmax(-1)).mean()))


@dataclasses.dataclass(frozen=True)
class World:
    """The prompts and contents."""

    consumers: dict[str, tuple[int, ...]]
    bases: dict[str, tuple[int, ...]]
    contents: list[tuple[int, ...]]
    ask: tuple[int, ...]
    quote: tuple[int, ...]
    dash: tuple[int, ...]  # begins a line of the answer to that
    is_digit: np.ndarray  # by token
    is_word: np.ndarray


def texts(questions: pathlib.Path, runs: pathlib.Path) -> tuple[list[str], list[str]]:
    """Stretches of real text: questions of GSM8K several at a time, and long tool results."""
    asked = [json.loads(line)["question"] for line in questions.open()]
    asked = ["\n\n".join(asked[start:start + 8]) for start in range(0, len(asked), 8)]
    results = [message["content"] for line in runs.open()
               for message in json.loads(line)["messages"]
               if message["role"] == "tool" and isinstance(message["content"], str)
               and len(message["content"]) > 1000]
    return asked, results


def stretches(encode, sources: list[str], count: int) -> list[tuple[int, ...]]:
    """The first contents of texts that share little: at most a tenth of their runs of 8 tokens."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for text in sources:
        ids = encode(text)
        for start in range(0, min(len(ids), 6 * LENGTH) - LENGTH + 1, LENGTH):
            ids_here = tuple(ids[start:start + LENGTH])
            runs = {ids_here[i:i + 8] for i in range(LENGTH - 7)}
            if len(runs & seen) < 25 and len(found) < count:
                found.append(ids_here)
                seen |= runs
    return found


def world(model, questions: pathlib.Path, runs: pathlib.Path, count: int) -> World:
    """Read prompts and contents; contents are questions and tool results by turns."""
    encode = model.tokenizer.encode
    asked, results = texts(questions, runs)
    systems = [message["content"] for line in runs.open()
               for message in json.loads(line)["messages"] if message["role"] == "system"]
    solved = "\n\n".join(f"Question: {line['question']}\nAnswer: {line['answer']}"
                         for line in map(json.loads, questions.read_text().splitlines()[-20:]))
    roles = {"tutor": "You are a careful mathematician. Solve the task step by step. " + solved,
             "analyst": next(text for text in systems if "cybersecurity" in text),
             "programmer": next(text for text in systems if "programmer" in text),
             "airline agent": next(text for text in systems if "airline" in text.lower())}

    def prompt(role: str, length: int) -> tuple[int, ...]:
        end = encode("<|im_end|>\n<|im_start|>user\nRead this:\n")
        return (*encode("<|im_start|>system\n" + role)[:length - len(end)], *end)

    def behind(text: str) -> tuple[int, ...]:
        return tuple(encode(f"{text}<|im_end|>\n<|im_start|>assistant\n"))

    half = (count + 1) // 2
    contents = itertools.zip_longest(stretches(encode, asked[:-4], half),
                                     stretches(encode, results[::-1], count - half))
    strings = [model.tokenizer.decode([i]) for i in range(model.config.vocab_size)]
    critic = "You check what other agents wrote and say what is wrong. Examples:\n" + solved[4000:]
    return World(
        {name: prompt(roles[name], length) for name, length in PROMPTS.items()},
        {"neutral": tuple(encode("<|im_start|>user\n")), "long": prompt(critic, LONG)},
        [content for pair in contents for content in pair if content is not None],
        behind(ASK), behind(QUOTE), tuple(encode("\n-")),
        np.array([text.strip().isdigit() for text in strings]),
        np.array([text[:1] == " " and text[1:].isalpha() and text.islower() and len(text) > 4
                  for text in strings]))


def near_copy(world: World, content: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """The content with the first digits of some numbers changed, or words where digits are few."""
    rng = np.random.default_rng(seed)
    copy = np.array(content)
    places = numbers(world, content)
    if len(places) < CHANGED:
        places = np.nonzero(world.is_word[copy])[0]
    for at in rng.choice(places, CHANGED, replace=False):
        alike = np.unique(copy[world.is_digit[copy] == world.is_digit[copy[at]]])
        alike = alike[(world.is_digit | world.is_word)[alike] & (alike != copy[at])]
        copy[at] = rng.choice(alike)
    return tuple(int(token) for token in copy)


def numbers(world: World, content: tuple[int, ...]) -> np.ndarray:
    """Where numbers begin."""
    digit = world.is_digit[list(content)]
    return np.nonzero(digit & ~np.concatenate([[False], digit[:-1]]))[0]
