import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfunc.serve.interface import Token
from kvfunc.serve.text import TextStream, claimed, first_stop


class Pieces:
    """A decoder whose token i stands for the i-th of some byte strings."""

    def __init__(self, pieces):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def run(pieces, stop=(), min_tokens=0):
    """All pieces of text, the ids given out with each, and whether a stop string ended it."""
    stream = TextStream(Pieces(pieces), stop, min_tokens)
    made = []
    for token_id in range(len(pieces)):
        made.append(stream.push(Token(token_id, None, ())))
        if stream.stopped:
            break
    else:
        made.append(stream.end())
    return ([piece.text for piece in made],
            [[placed.token.id for placed in piece.tokens] for piece in made], stream.stopped)


def test_the_stop_string_and_what_follows_are_left_out():
    assert run([b"Hello S", b"TO", b"P more"], ["STOP"]) == (
        ["Hello ", "", ""], [[0], [], []], True)


def test_a_beginning_that_comes_to_nothing_is_given_out_later():
    assert run([b"a S", b"TO", b"x"], ["STOP"]) == (
        ["a ", "", "STOx", ""], [[0], [], [1, 2], []], False)


def test_a_beginning_is_given_out_at_the_end():
    assert run([b"a", b"ST"], ["STOP"]) == (["a", "", "ST"], [[0], [], [1]], False)


def test_no_half_character():
    assert run([b"\xe2", b"\x82", b"\xac!"]) == (["", "", "€!", ""], [[], [], [0, 1, 2], []], False)


def test_bytes_that_are_no_character_come_at_the_end():
    assert run([b"a", b"\xe2"]) == (["a", "", "�"], [[0], [], [1]], False)


def test_the_stop_string_that_is_complete_first_counts():
    assert run([b"xabcd"], ["bcd", "abc", "c"]) == (["x"], [[0]], True)
    assert run([b"xab"], ["abcd", "b"]) == (["xa"], [[0]], True)


def test_a_stop_string_within_itself_is_found():
    assert run([b"aa", b"ab"], ["aab"]) == (["", "a"], [[], [0]], True)


def test_a_stop_string_within_the_first_tokens_ends_nothing():
    pieces = [b"aS", b"bS", b"cS", b"d"]
    assert run(pieces, ["S"], 1) == (["aS", "b"], [[0], [1]], True)
    assert run(pieces, ["S"], 2) == (["aS", "bS", "c"], [[0], [1], [2]], True)
    assert run(pieces, ["S"], 3)[2] is False


def test_a_stop_string_that_is_complete_behind_the_first_tokens_counts_from_where_it_begins():
    assert run([b"a S", b"TO", b"P more"], ["STOP"], 2) == (["a ", "", ""], [[0], [], []], True)
    assert run([b"STOPS", b"TOP"], ["STOP"], 1) == (["STOP", ""], [[0], []], True)


def test_bytes_that_are_no_character_belong_to_the_token_that_they_came_with():
    assert run([b"a", b"\xe2"], ["\ufffd"], 2)[2] is False
    assert run([b"a", b"\xe2"], ["\ufffd"], 1)[2] is True


def test_tokens_tell_where_they_begin():
    stream = TextStream(Pieces([b"ab", b"S", b"x"]), ["ST"])
    placed = [stream.push(Token(i, None, ())).tokens for i in range(3)]
    assert [[at.offset for at in tokens] for tokens in placed] == [[0], [], [2, 3]]


@pytest.mark.parametrize("text, stop, length", [
    ("abS", ["STOP"], 1), ("abSTO", ["STOP"], 3), ("abSTOP", ["STOP"], 0), ("aba", ["abac"], 3),
    ("S", ["x", "ST"], 1), ("ab", [], 0), ("", ["a"], 0), ("xab", ["bc", "abc"], 2),
])
def test_the_longest_end_that_may_begin_a_stop_string(text, stop, length):
    assert claimed(text, stop) == length


def test_of_two_that_end_together_the_longer_is_cut():
    assert first_stop("xabc", ["bc", "abc"]) == 1
    assert first_stop("xabc", ["bcd"]) is None


@pytest.mark.parametrize("exempt, start", [(0, 0), (1, 0), (2, 2), (3, 2), (4, None), (9, None)])
def test_no_stop_string_may_end_within_the_exempt_characters(exempt, start):
    assert first_stop("abab", ["ab"], exempt) == start


ALPHABET = "ab€😀"


@st.composite
def cut_texts(draw):
    """A text, perhaps with a stop string, cut into tokens anywhere, also within characters."""
    text = draw(st.text(ALPHABET, max_size=12))
    stop = draw(st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=3))
    if stop:
        text += draw(st.sampled_from(stop)) + draw(st.text(ALPHABET, max_size=4))
    raw = text.encode()
    lengths = draw(st.lists(st.integers(1, 6), min_size=len(raw), max_size=len(raw)))
    pieces = []
    for length in lengths:
        pieces, raw = [*pieces, raw[:length]], raw[length:]
    return text, stop, [piece for piece in pieces if piece]


def up_to_the_stop(text, stop, exempt=0):
    """Character by character, as the definition has it."""
    for end in range(exempt + 1, len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(cut_texts())
def test_whatever_the_token_borders_nothing_leaks(case):
    text, stop, pieces = case
    texts, ids, stopped = run(pieces, stop)
    assert ("".join(texts), stopped) == up_to_the_stop(text, stop)
    given_out = [i for of_piece in ids for i in of_piece]
    assert given_out == list(range(len(given_out)))
    assert stopped or len(given_out) == len(pieces)


@given(cut_texts(), st.integers(0, 12))
def test_the_first_tokens_are_exempt_whatever_is_held_back(case, min_tokens):
    text, stop, pieces = case
    exempt = len(b"".join(pieces[:min_tokens]).decode(errors="ignore"))
    texts, _, stopped = run(pieces, stop, min_tokens)
    assert ("".join(texts), stopped) == up_to_the_stop(text, stop, exempt)
