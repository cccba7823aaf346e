"""Where parts of messages stand among tokens; one token is one byte, or `size` of them."""

import pathlib
import types

import numpy as np
import pytest

from kvfunc.models.chat import ChatTemplate
from kvfunc.models.load_gguf import open_gguf
from kvfunc.models.tokenizer import Tokenizer
from kvfunc.policies import Part
from kvfunc.serve.spans import Layout

from .fake import byte_tokenizer

TEMPLATES = pathlib.Path(__file__).parents[1] / "models" / "templates"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}|{% endfor %}"
USER = {"role": "user", "content": "Hi"}
TAGS = ("<think>", "</think>")


class Coarse:
    """A tokenizer whose tokens have `size` characters."""

    def __init__(self, size):
        self.size, self.pieces = size, []

    def encode_with_offsets(self, text):
        starts = range(0, len(text), self.size)
        self.pieces = [text[i:i + self.size].encode() for i in starts]
        return list(range(len(starts))), [(i, min(i + self.size, len(text))) for i in starts]

    def piece(self, token_id):
        return self.pieces[token_id]


def layout_of(source, messages, tokenizer=None, **fields):
    tokenizer = tokenizer or byte_tokenizer()
    rendered = ChatTemplate(source, tokenizer).render(messages, **fields)
    layout = Layout(rendered, TAGS, tokenizer.piece)
    layout.text = lambda ranges: [
        b"".join(map(tokenizer.piece, rendered.tokens[start:stop].tolist())).decode()
        for start, stop in ranges]
    return layout


def chars(messages, message, text, occurrence=1):
    start = -1
    for _ in range(occurrence):
        start = messages[message]["content"].index(text, start + 1)
    return Part(message, (start, start + len(text)))


@pytest.fixture(scope="module")
def smollm(embedded_gguf):
    reader = open_gguf(embedded_gguf)
    tokenizer = Tokenizer.from_gguf(reader)
    chat = ChatTemplate.from_gguf(reader, tokenizer)
    return types.SimpleNamespace(tokenizer=tokenizer, chat=chat)


def qwen3():
    return (TEMPLATES / "qwen3.jinja").read_text()


def test_text_is_found_where_the_template_prints_it_trimmed():
    messages = [{"role": "user", "content": "  say naïve 😀 twice, naïve \n"}, USER]
    layout = layout_of(PLAIN, messages)
    for occurrence, start in ((1, 10), (2, 29)):
        part = chars(messages, 0, "naïve", occurrence)
        ((at, stop),) = layout.part(part)
        assert (at, stop) == (start, start + len("naïve".encode()))
        assert layout.text([(at, stop)]) == ["naïve"]
    assert layout.text(layout.part(chars(messages, 0, "  say "))) == ["say "]
    assert layout.part(Part(0, (0, 2))) is None
    assert layout.part(chars(messages, 0, " \n")) is None
    assert layout.text(layout.part(chars(messages, 1, "Hi"))) == ["Hi"]


@pytest.mark.parametrize("text, inside", [
    ("bcde", ["bcde"]), ("abcdef", ["bcde"]), ("cd", []), ("cde", ["de"]), ("a", [])])
def test_tokens_that_reach_beyond_a_text_stay(text, inside):
    messages = [{"role": "user", "content": "abcdef"}]
    layout = layout_of("|{% for m in messages %}{{ m.content }}|{% endfor %}", messages, Coarse(2))
    assert layout.text(layout.part(chars(messages, 0, text))) == inside  # of "|a", "bc", "de", "f|"


@pytest.mark.parametrize("shown, inside", [
    ("{{ m.content.split('</think>')[-1].lstrip('\n') }}", ["yes"]),
    ("{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}", ["yes, or"]),
    ("{{ m.content.rsplit('</think>', 1)[1] }}", ["yes"]),
    ("{{ m.content.partition('</think>')[2] }}", ["yes"]),
    ("{{ m.content.rpartition('</think>')[2] }}", ["yes"]),
    ("{{ m.content.split()[-1] }}", ["yes"]),
    ("{{ m.content.removeprefix('<think>yes, or no?</think>') }}", ["yes"]),
    ("{{ m.content[26:] }}", ["yes"]),
    ("{{ m.content }}{{ m.content }}", ["yes", "yes"]),
])
def test_a_text_that_occurs_twice_is_found_where_it_was_cut_from(shown, inside):
    """Not wherever a search of the prompt would find it."""
    messages = [{"role": "user", "content": "<think>yes, or no?</think>\nyes"}]
    layout = layout_of(f"{{% for m in messages %}}{shown}{{% endfor %}}", messages)
    occurrence = 1 if inside == ["yes, or"] else 2
    other = 3 - occurrence
    part = chars(messages, 0, inside[0], occurrence)
    assert layout.text(layout.part(part)) == inside
    if len(inside) == 1 and "removeprefix" not in shown:
        assert layout.part(chars(messages, 0, "yes", other)) is None


def test_text_that_a_template_rewrites_is_not_printed():
    messages = [{"role": "user", "content": "Some text"}]
    for shown in ("{{ m.content | replace('e', 'i') }}", "{{ m.content | tojson }}", "{{ m }}"):
        layout = layout_of(f"{{% for m in messages %}}{shown}{{% endfor %}}", messages)
        assert layout.part(chars(messages, 0, "text")) is None


def test_thinking_is_found_as_it_is_rendered():
    thought = "<think>\n1+2\n</think>"
    said = [{"role": "assistant", "content": f"{thought}\n\nIt is 3."},
            {"role": "assistant", "content": "It is 3.", "reasoning_content": "1+2"}]
    for message in said:
        layout = layout_of(qwen3(), [USER, message])
        assert layout.text(layout.part(Part(1))) == [thought]
        ((at, span),) = layout.thinking(1)
        assert layout.text([span]) == [thought] and at == span[1]
    forgotten = layout_of(qwen3(), [USER, said[0], USER])
    assert forgotten.part(Part(1)) is None and list(forgotten.thinking(1)) == []
    assert forgotten.part(chars([USER, *said], 1, "1+2")) is None


def test_the_generation_header_is_the_answers_beginning():
    layout = layout_of(qwen3(), [USER], enable_thinking=False)
    ((at, span),) = layout.thinking(1)
    assert layout.text([span]) == ["<think>\n\n</think>"]
    assert layout.start(1) == span[0] - len("<|im_start|>assistant\n")
    assert list(layout_of(qwen3(), [USER]).thinking(1)) == []
    assert layout.start(7) == at + len("\n\n")


def test_text_of_nobody_within_thinking_stays():
    source = ("{% for m in messages %}{{ '<think>' + m.content }}{% if loop.first and tools %}"
              "{{ tools | tojson }}{% endif %}{{ '</think>' }}{% endfor %}")
    layout = layout_of(source, [{"role": "assistant", "content": "so"}], tools=["T"])
    assert layout.text(layout.part(Part(0))) == ["<think>so", "</think>"]
    assert [layout.text([span]) for _, span in layout.thinking(0)] == [["<think>so"], ["</think>"]]
    assert len({at for at, _ in layout.thinking(0)}) == 1


def test_the_tokens_of_a_part_are_found_in_a_real_vocabulary(smollm):
    messages = [{"role": "user", "content": "Lorem 😀 ipsum dolor, lorem 😀."}]
    rendered = smollm.chat.render(messages)
    layout = Layout(rendered, TAGS, smollm.tokenizer.piece)
    part = chars(messages, 0, " 😀", 2)
    (tokens,) = layout.part(part)
    inside = b"".join(map(smollm.tokenizer.piece, rendered.tokens[slice(*tokens)].tolist()))
    assert inside.decode() == " 😀"
    assert tokens[0] > np.flatnonzero(rendered.owner == 0)[5]


@pytest.mark.parametrize("size, tokens, outer", [
    (1, (10, 14), (10, 14)),
    (3, (4, 4), (3, 5)),  # "see |abcd|!" cut as "[us" "er]" "see" " ab" "cd!" has none inside
    (4, (3, 3), (2, 4)),
])
def test_a_shared_part_is_the_tokens_inside_and_those_over_its_borders(size, tokens, outer):
    messages = [{"role": "user", "content": "see abcd!"}]
    layout = layout_of(PLAIN, messages, Coarse(size))
    share = layout.share("document", chars(messages, 0, "abcd"))
    if tokens[0] == tokens[1]:
        assert share is None
    else:
        assert (share.name, share.start, share.stop, share.outer) == ("document", *tokens, outer)


def test_borders_of_a_shared_part_reach_to_the_next_tokens():
    messages = [{"role": "user", "content": "see abcdefgh!"}]
    layout = layout_of(PLAIN, messages, Coarse(3))  # "[us" "er]" "see" " ab" "cde" "fgh" "!|"
    share = layout.share("document", chars(messages, 0, "abcdefgh"))
    assert (share.start, share.stop, share.outer) == (4, 6, (3, 6))


def test_a_part_that_is_not_printed_is_not_shared():
    messages = [{"role": "user", "content": "see abcd   "}]
    layout = layout_of(PLAIN, messages)
    assert layout.share("document", Part(0, (9, 11))) is None
    assert layout.share("document", Part(3, (0, 2))) is None
