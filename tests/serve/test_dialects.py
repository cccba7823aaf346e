"""Generated text read in every dialect, in one piece and in many."""

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.models.chat import ChatTemplate
from kvfunc.serve.dialects import Hermes, Llama, Mistral, Plain, Thinking, reading
from kvfunc.serve.harmony import Harmony
from kvfunc.serve.parsing import CallArguments, CallStart, Content, Reasoning

from .fake import byte_tokenizer

TEMPLATES = pathlib.Path(__file__).parents[1] / "models" / "templates"
TAGS = ("<think>", "</think>")
DIALECTS = {
    "hermes": Hermes, "mistral": Mistral, "llama": Llama,
    "harmony": lambda: Harmony(with_calls=True),
    "harmony without calls": lambda: Harmony(with_calls=False),
    "thinking": lambda: Thinking(TAGS, False, Hermes()),
    "opened thinking": lambda: Thinking(TAGS, True, Hermes()),
    "magistral": lambda: Thinking(("[THINK]", "[/THINK]"), False, Mistral()),
}
WEATHER = '{"city":"Graz",  "n": 1.50, "n": "\\u00e9</tool_call>}\\"{"}'  # not as anybody prints it
CHANNEL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def read(make, *pieces):
    """Content, reasoning and calls, and what came piece by piece."""
    reader = make()
    events = [event for piece in pieces for event in reader.push(piece)] + reader.end()
    return joined(events)


def joined(events):
    calls = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1][1] += event.text
    content, reasoning = ("".join(event.text for event in events if isinstance(event, kind))
                          for kind in (Content, Reasoning))
    return content, reasoning, [tuple(call) for call in calls]


@pytest.mark.parametrize("dialect, text, expected", [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {WEATHER}}}\n</tool_call>',
     ("", "", [("f", WEATHER)])),
    ("hermes", 'I look.\n<tool_call>{"arguments": {}, "name": "f"}</tool_call>\n<tool_call>\n'
     '{"name": "g.h", "arguments": { }}\n</tool_call>\n', ("I look.", "", [("f", "{}"),
                                                                          ("g.h", "{ }")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n done',
     ("\n done", "", [("f", "{}")])),
    ("mistral", f'ok[TOOL_CALLS] [{{"name": "f", "arguments": {WEATHER}, "id": "abc"}}, '
     '{"name": "g", "arguments": {}}]', ("ok", "", [("f", WEATHER), ("g", "{}")])),
    ("mistral", f"ok[TOOL_CALLS]f[ARGS]{WEATHER}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{{}}"
     "[TOOL_CALLS]h{}", ("ok", "", [("f", WEATHER), ("g", "{}"), ("h", "{}")])),
    ("llama", f'{{"name": "f", "parameters": {WEATHER}}}', ("", "", [("f", WEATHER)])),
    ("llama", '\n{"type": "function", "name": "f", "parameters": {}} ', ("", "", [("f", "{}")])),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {}}', ("", "", [("f", "{}")])),
    ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CHANNEL}{WEATHER}"
     "<|call|>", ("", "Hm.", [("f", WEATHER)])),
    ("harmony", f"{CHANNEL}{WEATHER}", ("", "", [("f", WEATHER)])),  # its end has no text
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g"
     "<|channel|>commentary json<|message|>{}<|call|>", ("I look.", "", [("g", "{}")])),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
     "<|message|>Yes.<|return|>", ("Yes.", "Hm.", [])),
    ("thinking", "\n<think>\nHm.\n</think>\n\nI look.\n<tool_call>{\"name\": \"f\", "
     '"arguments": {}}</tool_call>', ("I look.", "Hm.", [("f", "{}")])),
    ("thinking", "<think>\n\n</think>\n\n\nYes.", ("\nYes.", "", [])),
    ("opened thinking", "\nHm.<think></think>Yes.</think>", ("Yes.</think>", "Hm.<think>", [])),
    ("magistral", "[THINK]Hm.[/THINK]Yes.", ("Yes.", "Hm.", [])),
])
def test_markers_go_and_arguments_are_the_models_characters(dialect, text, expected):
    assert read(DIALECTS[dialect], text) == expected
    assert read(DIALECTS[dialect], *text) == expected


@pytest.mark.parametrize("dialect, text", [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}'),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": '),
    ("hermes", 'a\n<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call> \n'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} or</tool_call>'),
    ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    ("hermes", "</tool_call> <tool_call"),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a": ' * 5000 + "1"
     + "}" * 5001 + "</tool_call>"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}},]'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}}'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}} 1]'),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, 1]'),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{1}"),
    ("mistral", "[TOOL_CALLS]f and g {}"),
    ("mistral", "[TOOL_CALLS]" + "f" * 400 + "{}"),
    ("llama", '{"name": "f", "parameters": {}} is a call'),
    ("llama", 'see {"name": "f", "parameters": {}}'),
    ("llama", '{"name": "f"}'),
    ("llama", '<|python_tag|>search.call(query="x")'),
    ("llama", " \n"),
    ("harmony", f"{CHANNEL}{{\"a\": "),
    ("harmony", CHANNEL),
    ("harmony", f"{CHANNEL}[1]<|call|>"),
    ("harmony", "<|channel|>commentary to=browser.open code<|message|>{}<|call|>"),
    ("harmony without calls", f"{CHANNEL}{{}}<|call|>"),
    ("harmony", "<|start|>user<|message|>Hi<|end|>"),
    ("harmony", "plain"),
    ("thinking", "see <think>a</think>"),
    ("thinking", " \n"),
])
def test_what_is_no_call_is_content_to_the_last_character(dialect, text):
    assert read(DIALECTS[dialect], text) == (text, "", [])
    assert read(DIALECTS[dialect], *text) == (text, "", [])


@pytest.mark.parametrize("dialect, text, expected", [
    ("thinking", "<think>\nHm.\n", ("", "Hm.\n", [])),
    ("harmony", "<|channel|>analysis<|message|>Hm.", ("", "Hm.", [])),
    ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>",
     ("", "Hm.", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name"',
     ('\n<tool_call>\n{"name"', "", [("f", "{}")])),
    ("hermes", '<tool_call>{"na <tool_call>{"name": "f", "arguments": {}}</tool_call>',
     ('<tool_call>{"na ', "", [("f", "{}")])),
])
def test_what_breaks_off_leaves_the_rest_alone(dialect, text, expected):
    assert read(DIALECTS[dialect], *text) == read(DIALECTS[dialect], text) == expected


PARTS = [
    "a", " ", "\n", "\n\n", "{", "}", "[", "]", '"', "\\", ",", "<", "é", WEATHER, "{}",
    *TAGS, "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f",
    "<|python_tag|>", '{"name": "f", "arguments": {}}', f'{{"name": "g", "parameters": {WEATHER}}}',
    *Harmony.MARKERS, "<|start|>assistant", "<|channel|>analysis<|message|>", CHANNEL,
    "<|channel|>final<|message|>", '<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}]', "[TOOL_CALLS]f[ARGS]{}",
]


@pytest.mark.parametrize("dialect", DIALECTS)
@settings(deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), data=st.data())
def test_how_the_text_is_cut_makes_no_difference(dialect, parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(DIALECTS[dialect], *pieces) == read(DIALECTS[dialect], text)


MARKERS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "}"],
    "mistral": ['[TOOL_CALLS][{"name": "f", "arguments": ', '[TOOL_CALLS]f[ARGS]', "}]"],
    "llama": ['{"name": "f", "parameters": ', "<|python_tag|>", "}"],
    "harmony": [*Harmony.MARKERS, CHANNEL, "<|start|>assistant<|channel|>final<|message|>",
                "<|channel|>analysis<|message|>"],
    "thinking": [*TAGS, "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "}"],
}


def is_subsequence(short, long):
    rest = iter(long)
    return all(char in rest for char in short)


@pytest.mark.parametrize("dialect", MARKERS)
@settings(deadline=None)
@given(data=st.data())
def test_nothing_is_lost_but_markers(dialect, data):
    """Every letter comes out, in order within its field, if no marker has it."""
    letters = st.text("ÄÖÜ", max_size=3)
    parts = data.draw(st.lists(st.sampled_from(MARKERS[dialect]) | letters.map(
        lambda text: json.dumps({text: text}, ensure_ascii=False)) | letters, max_size=8))
    text = "".join(parts)
    content, reasoning, calls = read(DIALECTS[dialect], *text)
    said = content + reasoning + "".join(arguments for _, arguments in calls)
    assert sorted(c for c in said if c in "ÄÖÜ") == sorted(c for c in text if c in "ÄÖÜ")
    for field in (content, reasoning, *(arguments for _, arguments in calls)):
        assert is_subsequence(field, text)
    assert all(arguments in text and json.loads(arguments) is not None for _, arguments in calls)
    if not reasoning and not calls and dialect not in ("harmony", "thinking"):
        assert content == text


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("a\n <", max_size=3),
                          st.sampled_from([WEATHER, "{}", '{"a": {"b": [{}]}}']))),
       st.text("a\n ", max_size=3))
def test_what_goes_in_is_what_comes_out_and_the_markers(calls, tail):
    written = "".join(f'{content}<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
                      for content, arguments in calls) + tail
    content, _, found = read(Hermes, *written)
    assert found == [("f", arguments) for _, arguments in calls]
    expected = "".join(
        "" if place and not said.strip() else said.removesuffix("\n")
        for place, (said, _) in enumerate(calls))
    assert content == expected + ("" if calls and not tail.strip() else tail)


def test_content_is_given_out_as_soon_as_it_cannot_be_a_marker():
    reader = Hermes()
    assert reader.push("a <tool") == [Content("a ")]
    assert reader.push("box") == [Content("<toolbox")]
    reader = Thinking(TAGS, False, Plain())
    assert [reader.push(piece) for piece in ("<thi", "nk>Hm", ".\n</thi", "nks", "</think>", "Yes")
            ] == [[], [Reasoning("Hm")], [Reasoning(".")], [Reasoning("\n</thinks")], [],
                  [Content("Yes")]]
    reader = Llama()
    assert [reader.push(piece) for piece in (" ", "a", "{")] == [
        [], [Content(" a")], [Content("{")]]


def test_a_long_call_is_given_out_with_its_last_character():
    arguments = json.dumps({"a": ["}>]" * 100, {"b": "é" * 500}]})
    for make, text in [
            (Hermes, f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'),
            (Mistral, f'[TOOL_CALLS][{{"name": "f", "arguments": {arguments}}}]'),
            (Mistral, f"[TOOL_CALLS]f[ARGS]{arguments}"),
            (lambda: Harmony(True), f"{CHANNEL}{arguments}<|call|>")]:
        reader = make()
        assert not any(reader.push(char) for char in text[:-1])
        assert reader.push(text[-1])[1:] == [CallArguments(0, arguments)]


def test_a_call_has_the_models_id_or_one_of_its_own():
    def ids(make, text):
        reader = make()
        return [event.id for event in reader.push(text) + reader.end()
                if isinstance(event, CallStart)]

    (own,), (nine,) = (ids(make, text) for make, text in [
        (Hermes, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        (Mistral, "[TOOL_CALLS]f[ARGS]{}")])
    assert own.startswith("call_") and len(own) == 29
    assert len(nine) == 9 and nine.isalnum()
    assert ids(Mistral, "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}") == ["abc"]
    assert ids(Mistral, '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}]') == ["abc"]


# Which dialect is a template's


@pytest.mark.parametrize("name, calls, thinks", [
    ("qwen2.5", Hermes, False), ("qwen3", Hermes, True), ("llama3.1", Llama, False),
    ("mistral-v7", Mistral, False), ("mistral-v13", Mistral, True), ("gemma3", None, False),
])
def test_the_template_tells_the_dialect(name, calls, thinks):
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), byte_tokenizer())
    found = reading(template, "", True)
    reader = found and found.reader()
    assert isinstance(reader, Thinking) == thinks
    assert type(reader._rest if thinks else reader) is (calls or type(None))
    assert (reading(template, "", False) is None) == (not thinks)
    if calls:
        assert set(calls.MARKERS) <= set(found.markers)
        assert not thinks or not set(calls.MARKERS) & set(reading(template, "", False).markers)


def test_harmony_is_read_also_without_tools():
    template = ChatTemplate((TEMPLATES / "gpt-oss.jinja").read_text(), byte_tokenizer())
    assert isinstance(reading(template, "", False).reader(), Harmony)


def test_a_prompt_may_have_opened_the_reasoning():
    template = ChatTemplate("{{ '<think></think>' }}", byte_tokenizer())
    text = "Hm.</think>Yes."
    assert read(reading(template, "[a]<think>\n", False).reader, text) == ("Yes.", "Hm.", [])
    assert read(reading(template, "<think>\n\n</think>\n\n", False).reader, text) == (text, "", [])
