import functools
import itertools
import json
import pathlib

import gguf
import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.models.chat import (
    NO_TOOL_CALLS,
    NOBODY,
    NOT_PRINTED,
    ChatTemplate,
    normalised,
    prefix_break,
)
from kvfunc.models.load_gguf import open_gguf
from kvfunc.models.tokenizer import Tokenizer

TEMPLATES = pathlib.Path(__file__).parent / "templates"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"n": "int"}}}
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}}
    ],
}
RESULT, ANSWER = {"role": "tool", "content": "3"}, {"role": "assistant", "content": "It is 3."}
SMOLLM_DEFAULT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n"
)
QWEN_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "parameters": {"n": "int"}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call><|im_end|>\n"
)
LLAMA_TOOLS = """\
Respond in the format {"name": function name, "parameters": dictionary of argument name and its \
value}.Do not use variables.

{
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "n": "int"
        }
    }
}

"""


class Pieces(Tokenizer):
    """A tokenizer with one token for every `size` characters."""

    def __init__(self, size=1):
        self.size = size

    def encode_with_offsets(self, text):
        starts = range(0, len(text), self.size)
        return [ord(text[i]) for i in starts], [(i, i + self.size) for i in starts]


@pytest.fixture(scope="module")
def reader(embedded_gguf):
    return open_gguf(embedded_gguf)


@pytest.fixture(scope="module")
def smollm_tokenizer(reader):
    return Tokenizer.from_gguf(reader)


@pytest.fixture(scope="module")
def smollm(reader, smollm_tokenizer):
    return ChatTemplate.from_gguf(reader, smollm_tokenizer)


@pytest.fixture(scope="module")
def sources(reader):
    """The template of every model here, by name."""
    embedded = reader.get_field("tokenizer.chat_template").contents()
    return {"smollm2": embedded, **{f.stem: f.read_text() for f in TEMPLATES.glob("*.jinja")}}


@pytest.fixture(scope="module")
def templates(sources, smollm_tokenizer):
    """The templates over real tokens; SmolLM2's vocabulary serves them all."""
    return {name: ChatTemplate(source, smollm_tokenizer) for name, source in sources.items()}


@functools.cache
def chars(source):
    """A template over a tokenizer of characters: owners of characters."""
    return ChatTemplate(source, Pieces(), bos_token="<bos>", eos_token="<eos>")


def stored(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def owned(rendered):
    """The text as [(owner, piece), ...], one piece for each run of tokens with one owner."""
    assert len(rendered.text) == len(rendered.tokens)
    borders = [0, *(np.flatnonzero(np.diff(rendered.owner)) + 1), len(rendered.owner)]
    return [
        (int(rendered.owner[start]), rendered.text[start:stop])
        for start, stop in itertools.pairwise(borders)
    ]


# --- who owns what, on real templates


def test_smollm2_messages_own_their_blocks(sources):
    rendered = chars(sources["smollm2"]).render([SYSTEM, USER])
    assert owned(rendered) == [
        (0, "<|im_start|>system\nBe brief.<|im_end|>\n"),
        (1, "<|im_start|>user\nHi<|im_end|>\n"),
        (2, "<|im_start|>assistant\n"),
    ]
    assert rendered.monotonic
    assert rendered.warnings == ()


def test_smollm2_default_system_block_is_nobodys(sources):
    assert owned(chars(sources["smollm2"]).render([USER, ANSWER, USER])) == [
        (NOBODY, SMOLLM_DEFAULT),
        (0, "<|im_start|>user\nHi<|im_end|>\n"),
        (1, "<|im_start|>assistant\nIt is 3.<|im_end|>\n"),
        (2, "<|im_start|>user\nHi<|im_end|>\n"),
        (3, "<|im_start|>assistant\n"),
    ]


def test_smollm2_tokens_have_owners(smollm, smollm_tokenizer):
    rendered = smollm.render([SYSTEM, USER])
    pieces = [smollm_tokenizer.decode([i], skip_special=False) for i in rendered.tokens.tolist()]
    assert rendered.tokens.dtype == rendered.owner.dtype == np.int32
    assert list(zip(rendered.owner.tolist(), pieces, strict=True)) == [
        (0, "<|im_start|>"), (0, "system"), (0, "\n"), (0, "Be"), (0, " brief"), (0, "."),
        (0, "<|im_end|>"), (0, "\n"), (1, "<|im_start|>"), (1, "user"), (1, "\n"), (1, "Hi"),
        (1, "<|im_end|>"), (1, "\n"), (2, "<|im_start|>"), (2, "ass"), (2, "istant"), (2, "\n"),
    ]


def test_qwen2_5_without_tools():
    render = chars(stored("qwen2.5")).render
    assert owned(render([SYSTEM, USER])) == [
        (0, "<|im_start|>system\nBe brief.<|im_end|>\n"),
        (1, "<|im_start|>user\nHi<|im_end|>\n"),
        (2, "<|im_start|>assistant\n"),
    ]
    default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert owned(render([USER], add_generation_prompt=False)) == [
        (NOBODY, f"<|im_start|>system\n{default}<|im_end|>\n"),
        (0, "<|im_start|>user\nHi<|im_end|>\n"),
    ]


def test_qwen2_5_tool_schema_keeps_the_frame_it_shares_with_the_system_message():
    rendered = chars(stored("qwen2.5")).render([SYSTEM, USER, CALL, RESULT, ANSWER], tools=[TOOL])
    assert owned(rendered) == [
        (NOBODY, "<|im_start|>system\n"),
        (0, "Be brief."),
        (NOBODY, QWEN_TOOLS),
        (1, "<|im_start|>user\nHi<|im_end|>\n"),
        (2, '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"n": 2}}\n'
            "</tool_call><|im_end|>\n"),
        (3, "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"),
        (4, "<|im_start|>assistant\nIt is 3.<|im_end|>\n"),
        (5, "<|im_start|>assistant\n"),
    ]
    assert rendered.monotonic
    assert rendered.warnings == ()


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_two_tool_results_in_one_block_own_a_piece_each(name):
    rendered = chars(stored(name)).render([USER, CALL, RESULT, RESULT])
    assert owned(rendered)[-3:] == [
        (2, "<|im_start|>user\n<tool_response>\n3\n</tool_response>"),
        (3, "\n<tool_response>\n3\n</tool_response><|im_end|>\n"),
        (4, "<|im_start|>assistant\n"),
    ]


def test_qwen3_schema_and_thinking():
    rendered = chars(stored("qwen3")).render(
        [SYSTEM, USER, {**ANSWER, "reasoning_content": "1+2"}], tools=[TOOL], enable_thinking=False)
    assert owned(rendered) == [
        (NOBODY, "<|im_start|>system\n"),
        (0, "Be brief.\n\n"),
        (NOBODY, QWEN_TOOLS.removeprefix("\n\n")),
        (1, "<|im_start|>user\nHi<|im_end|>\n"),
        (2, "<|im_start|>assistant\n<think>\n1+2\n</think>\n\nIt is 3.<|im_end|>\n"),
        (3, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ]


LLAMA_SYSTEM = (
    "<bos><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
LLAMA_REST = [
    (2, "<|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "add", "parameters": {"n": 2}}<|eot_id|>'),
    (3, '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'),
    (4, '<|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'),
    (5, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
]


def test_llama3_1_with_tools_in_the_user_message():
    rendered = chars(stored("llama3.1")).render([SYSTEM, USER, CALL, RESULT, RESULT], tools=[TOOL])
    assert owned(rendered) == [
        (NOBODY, LLAMA_SYSTEM),
        (0, "Be brief."),
        (NOBODY, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGiven the following "
                 "functions, please respond with a JSON for a function call with its proper "
                 "arguments that best answers the given prompt.\n\n" + LLAMA_TOOLS),
        (1, "Hi"),
        (NOBODY, "<|eot_id|>"),
        *LLAMA_REST,
    ]
    assert rendered.monotonic


def test_llama3_1_with_tools_in_the_system_message():
    rendered = chars(stored("llama3.1")).render(
        [SYSTEM, USER, CALL, RESULT, RESULT], tools=[TOOL], tools_in_user_message=False)
    assert owned(rendered) == [
        (NOBODY, LLAMA_SYSTEM + "You have access to the following functions. To call a function, "
                 "please respond with JSON for a function call." + LLAMA_TOOLS),
        (0, "Be brief."),
        (NOBODY, "<|eot_id|>"),
        (1, "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
        *LLAMA_REST,
    ]


def test_llama3_1_without_tools_and_system_message():
    rendered = chars(stored("llama3.1")).render([USER], date_string="1 Jan 2026")
    assert owned(rendered) == [
        (NOBODY, "<bos><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
                 "December 2023\nToday Date: 1 Jan 2026\n\n<|eot_id|>"),
        (0, "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"),
        (1, "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    ]


def test_llama3_1_builtin_tools_are_nobodys_and_their_calls_are_the_messages():
    call = {"role": "assistant", "tool_calls": [
        {"function": {"name": "add", "arguments": {"n": "2", "m": "3"}}}]}
    rendered = chars(stored("llama3.1")).render([USER, call], builtin_tools=["add"])
    assert owned(rendered)[0][1].endswith("Today Date: 26 Jul 2024\n\n<|eot_id|>")
    assert "Tools: add\n\n" in owned(rendered)[0][1]
    assert owned(rendered)[2] == (
        1, '<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>add.call(n="2", m="3")'
           "<|eom_id|>")


NAMED_CALL = {**CALL, "reasoning_content": "1+2",
              "tool_calls": [{**CALL["tool_calls"][0], "id": "123456789"}]}
NAMED_RESULT = {**RESULT, "tool_call_id": "123456789"}
TOOL_JSON = '{"type": "function", "function": {"name": "add", "parameters": {"n": "int"}}}'
AVAILABLE = (NOBODY, f"[AVAILABLE_TOOLS][{TOOL_JSON}][/AVAILABLE_TOOLS]")


@pytest.mark.parametrize(("name", "expected"), [
    ("mistral-v7", [
        (NOBODY, "<bos>"), (0, "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"), (1, "[INST]Hi[/INST]"),
        (2, '[TOOL_CALLS][{"name": "add", "arguments": {"n": 2}, "id": "123456789"}]<eos>'),
        (3, "[TOOL_RESULTS]123456789[TOOL_CONTENT]3[/TOOL_RESULTS]"), (4, "It is 3.<eos>"),
        AVAILABLE, (5, "[INST]Hi[/INST]")]),
    ("mistral-v13", [
        (NOBODY, "<bos>"), (0, "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"), AVAILABLE,
        (1, "[INST]Hi[/INST]"), (2, '[THINK]1+2[/THINK][TOOL_CALLS]add[ARGS]{"n": 2}<eos>'),
        (3, "[TOOL_RESULTS]3[/TOOL_RESULTS]"), (4, "It is 3.<eos>"), (5, "[INST]Hi[/INST]")]),
    ("gpt-oss", [
        (NOBODY, "<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, "
                 "commentary, final.\nCalls go to the commentary channel: functions.<|end|>"
                 "<|start|>developer<|message|>"),
        (0, "# Instructions\n\nBe brief.\n\n"),
        (NOBODY, "# Tools\n\n## functions\n\nnamespace functions {\n\n"
                 'type add = (_: {"n": "int"}) => any;\n\n} // namespace functions<|end|>'),
        (1, "<|start|>user<|message|>Hi<|end|>"),
        (2, "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
            '{"n": 2}<|call|>'),
        (3, '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'),
        (4, "<|start|>assistant<|channel|>final<|message|>It is 3.<|end|>"),
        (5, "<|start|>user<|message|>Hi<|end|>"), (6, "<|start|>assistant")]),
])
def test_tools_calls_and_results_of_other_families(name, expected):
    rendered = chars(stored(name)).render(
        [SYSTEM, USER, NAMED_CALL, NAMED_RESULT, ANSWER, USER], tools=[TOOL])
    assert owned(rendered) == expected
    assert rendered.monotonic
    assert rendered.warnings == ()


def test_gemma3_has_no_tools_and_says_so():
    template = chars(stored("gemma3"))
    rendered = template.render([SYSTEM, USER, ANSWER, USER], tools=[TOOL])
    assert owned(rendered) == [
        (NOBODY, "<bos>"), (0, "<start_of_turn>user\nBe brief.\n\n"), (1, "Hi<end_of_turn>\n"),
        (2, "<start_of_turn>model\nIt is 3.<end_of_turn>\n"),
        (3, "<start_of_turn>user\nHi<end_of_turn>\n"), (4, "<start_of_turn>model\n")]
    assert rendered.monotonic
    assert template.render([USER, CALL, USER]).warnings == (NO_TOOL_CALLS,)
    with pytest.raises(ValueError, match="must alternate"):
        template.render([USER, CALL, RESULT])


# --- the rules, on small templates


@pytest.mark.parametrize(("source", "expected"), [
    # A header that names another message's call, as of a tool's result.
    ("{% for m in messages %}{{ '<' + messages[0].tool_calls[0].name }}{{ '>' + m.content }}"
     "{% endfor %}", [(0, "<f>Be brief."), (1, "<f>Hi")]),
    ("{% for m in messages %}{{ messages[0].tool_calls[0].name + messages[0].role }}"
     "{{ m.content }}{% endfor %}", [(0, "fsystemBe brief.fsystem"), (1, "Hi")]),
    # A variable set from a message stays the message's, whatever is done to it on the way.
    ("{% set s = messages[0].content | trim %}{% set rest = messages[1:] %}[{{ s }}]"
     "{% for m in rest %}<{{ m.content.split('i')[0].lower() }}>{% endfor %}",
     [(NOBODY, "["), (0, "Be brief."), (NOBODY, "]"), (1, "<h>")]),
    ("{% set ns = namespace(s='') %}{% for m in messages %}"
     "{% if m.role == 'system' %}{% set ns.s = ns.s ~ m.content %}{% endif %}{% endfor %}{{ ns.s }}"
     "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}|{{ m.content }}"
     "{% endfor %}",
     [(0, "Be brief."), (1, "|Hi")]),
    ("{% macro show(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
     "{% for m in messages %}{{ show(m) }};{% endfor %}",
     [(0, "<system>Be brief.;"), (1, "<user>Hi;")]),
    ("{% for i in range(2) %}{% set m = messages[i] %}<{{ m.content }}>{% endfor %}",
     [(0, "<Be brief.>"), (1, "<Hi>")]),
    ("{% for m in messages %}{% generation %}{{ m.content }}.{% endgeneration %}"
     "{% if m.role == 'user' %}{% break %}{% endif %}{% endfor %}end",
     [(0, "Be brief.."), (1, "Hi."), (NOBODY, "end")]),
    ("{{ messages | map(attribute='content') | join(', ') }}", [(0, "Be brief., "), (1, "Hi")]),
    ("{% set x %}<{{ messages[1].content }}>{% endset %}{{ x }}", [(1, "<Hi>")]),
    # A branch that prints one message's text is that message's, with its frame.
    ("{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% else %}<none>{% endif %}",
     [(0, "<Be brief.>")]),
    ("{% if messages[0].role == 'user' %}<{{ messages[0].content }}>{% else %}<none>{% endif %}",
     [(NOBODY, "<none>")]),
    # Separators and loop-dependent pieces inside a round are the round's message's.
    ("{% for m in messages %}{% if not loop.first %}, {% endif %}{{ m.role }}{% endfor %}",
     [(0, "system"), (1, ", user")]),
    ("{% for m in messages %}{% if loop.first %}<s>{% endif %}{{ m.role }}{% endfor %}",
     [(NOBODY, "<s>"), (0, "system"), (1, "user")]),
    ("{% for m in messages %}{% for c in m.content %}{% if loop.first %}#{% endif %}{% endfor %}"
     "{{ m.role }}{% endfor %}",
     [(0, "#system"), (1, "#user")]),
    # A tool schema between a message's own header and footer, and a date beside its text.
    ("{% for m in messages %}{{ '<' + m.content }}{% if loop.first and tools %}T"
     "{{ tools | tojson }}{% endif %}{{ '>' }}{% endfor %}",
     [(0, "<Be brief."), (NOBODY, 'T[{"x": 1}]'), (0, ">"), (1, "<Hi>")]),
    ("{{ messages[0].content + ' ' + strftime_now('today') }}", [(0, "Be brief. "),
                                                                (NOBODY, "today")]),
    # BOS at the start is nobody's, though the first message's piece prints it.
    ("{% for m in messages %}{{ (bos_token if loop.first else '') + m.role }}{% endfor %}",
     [(NOBODY, "<bos>"), (0, "system"), (1, "user")]),
    ("{% if messages %}<{{ messages[0].role }}>{% if add_generation_prompt %}"
     "{{ strftime_now('now') }}{% endif %}{% endif %}",
     [(0, "<system>"), (2, "now")]),
    # The generation header, also inside the loop and inside an expression.
    ("{% for m in messages %}{{ m.role }}{% if loop.last and add_generation_prompt %}<a>{% endif %}"
     "{% endfor %}",
     [(0, "system"), (1, "user"), (2, "<a>")]),
    ("{{ messages[0].role }}{{ '<a>' if add_generation_prompt else '<b>' }}",
     [(0, "system"), (2, "<a>")]),
])
def test_rules_of_ownership(source, expected):
    system = {**SYSTEM, "tool_calls": [{"name": "f"}]}
    rendered = chars(source).render([system, USER], tools=[{"x": 1}])
    assert owned(rendered) == expected
    assert rendered.monotonic


def test_a_message_without_text_owns_its_frame():
    source = "{{ '<' + messages[0].content | trim + '>' }}{{ messages[1].content }}"
    rendered = chars(source).render([{"role": "system", "content": " \n"}, USER])
    assert owned(rendered) == [(0, "<>"), (1, "Hi")]


def test_a_template_that_moves_a_message_is_not_monotonic():
    source = "{{ messages[1].content }}{{ messages[0].content }}"
    rendered = chars(source).render([SYSTEM, USER])
    assert owned(rendered) == [(1, "Hi"), (0, "Be brief.")]
    assert not rendered.monotonic


def test_nobodys_text_between_messages_does_not_break_the_order():
    source = "{{ messages[0].content }} - {{ messages[1].content }}"
    assert chars(source).render([SYSTEM, USER]).monotonic


def test_a_token_across_a_border_is_the_first_characters_owners():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", Pieces(2))
    rendered = template.render([{"role": "user", "content": "abc"}, USER])
    assert rendered.text == "abcHi"
    assert rendered.owner.tolist() == [0, 0, 1]


def test_a_template_that_prints_nothing():
    rendered = chars("{% if false %}x{% endif %}").render([USER])
    assert (rendered.text, rendered.tokens.size, rendered.owner.size) == ("", 0, 0)


# --- where contents are printed


def contents_of(rendered, messages):
    """(message, what is printed), which must be what stands there in the content."""
    for run in rendered.printed:
        here = rendered.text[run.start:run.stop]
        assert here and here == messages[run.message]["content"][run.at:][:len(here)]
    return [(run.message, rendered.text[run.start:run.stop]) for run in rendered.printed]


def test_contents_are_known_by_their_places(sources):
    messages = [SYSTEM, {"role": "user", "content": " Hi, hi \n"}, {
        **ANSWER, "content": "<think>\n1+2\n</think>\n\n1+2 is 3."}, USER]
    for name, printed in [
            ("smollm2", [(i, m["content"]) for i, m in enumerate(messages)]),
            ("qwen3", [(0, SYSTEM["content"]), (1, " Hi, hi \n"), (2, "1+2 is 3."), (3, "Hi")]),
            ("llama3.1", [(0, SYSTEM["content"]), (1, "Hi, hi"), (2, messages[2]["content"]),
                          (3, "Hi")])]:
        assert contents_of(chars(sources[name]).render(messages), messages) == printed
    rendered = chars(sources["qwen3"]).render(messages[:3])
    assert contents_of(rendered, messages)[2:] == [(2, "1+2"), (2, "1+2 is 3.")]


def test_tokens_know_their_characters(smollm):
    rendered = smollm.render([USER])
    assert "".join(rendered.text[a:b] for a, b in rendered.offsets.tolist()) == rendered.text
    assert rendered.offsets.shape == (len(rendered.tokens), 2)


def test_the_tags_of_thinking_are_the_templates(sources):
    assert chars(sources["smollm2"]).thinking == ("<think>", "</think>")
    assert chars(sources["qwen3"]).thinking == ("<think>", "</think>")
    magistral = "{{ messages[0].content }}[THINK]{{ messages[0].content }}[/THINK]"
    assert chars(magistral).thinking == ("[THINK]", "[/THINK]")
    assert chars("{{ '</seed:think>' }}").thinking == ("<seed:think>", "</seed:think>")


# --- tracing never changes the text


def plainly(source, messages, **variables):
    """The template in an environment of its own, without owners."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    variables = {"bos_token": "<bos>", "eos_token": "<eos>", "tools": None, **variables}
    return environment.from_string(source).render(messages=normalised(messages), **variables)


contents = st.one_of(
    st.none(),
    st.text(max_size=12),
    st.lists(st.text(max_size=5).map(lambda t: {"type": "text", "text": t}), max_size=2),
    st.sampled_from(["<think>\nso\n</think>\n\nyes", "<tool_response>", " a\n", "<|im_end|>", "ü"]),
)
arguments = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)
calls = st.fixed_dictionaries({"function": st.fixed_dictionaries(
    {"name": st.text(max_size=4), "arguments": arguments | arguments.map(json.dumps)})})
others = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"]),
                           "content": contents}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": contents,
                           "tool_calls": st.lists(calls, min_size=1, max_size=1)}),
)
histories = st.lists(others, min_size=1, max_size=6)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5", "qwen3", "llama3.1", "mistral-v7",
                                  "mistral-v13", "gpt-oss", "gemma3"])
@settings(deadline=None, max_examples=20)
@given(messages=histories, tools=st.sampled_from([None, [TOOL]]), header=st.booleans(),
       in_user=st.booleans())
def test_tracing_leaves_the_text_alone(sources, name, messages, tools, header, in_user):
    variables = {"tools": tools, "add_generation_prompt": header, "tools_in_user_message": in_user}
    template = chars(sources[name])
    try:
        expected = plainly(sources[name], messages, **variables)
    except jinja2.TemplateError:
        with pytest.raises(ValueError, match="the chat template refuses"):
            template.render(messages, **variables)
        return
    rendered = template.render(messages, **variables)
    assert rendered.text == expected
    assert rendered.monotonic
    assert not any("cannot be traced" in warning for warning in rendered.warnings)
    assert set(rendered.owner.tolist()) <= {NOBODY, *range(len(messages) + header)}


def test_text_that_tracing_would_change_is_served_without_owners():
    source = "{{ messages[0].content.__class__ | string }}{{ [].__class__ }}-{{ messages }}"
    assert chars(source).render([USER]).monotonic
    template = chars("{{ messages[0] is sameas messages[0] }}{{ '%s' % now }}")
    values = iter(range(9))
    now = type("Clock", (), {"__str__": lambda self: str(next(values))})()
    rendered = template.render([USER], now=now)
    assert rendered.text == "True0"
    assert rendered.owner.tolist() == [NOBODY] * 5
    assert not rendered.monotonic
    assert "cannot be traced" in rendered.warnings[0]


# --- a turn extends the turn before it

spoken = st.text(max_size=8).filter(lambda text: not text[:1].isspace())
exchanges = st.lists(st.tuples(
    st.sampled_from([("user",), ("user", "user"), ("tool", "tool")]), spoken, st.booleans()),
    min_size=1, max_size=4)


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5"])
@settings(deadline=None, max_examples=25)
@given(system=st.booleans(), exchanges=exchanges, tools=st.sampled_from([None, [TOOL]]))
def test_each_turn_extends_the_prompt_before_it(
    templates, name, system, exchanges, tools
):
    template = templates[name]
    messages, previous = [SYSTEM] if system else [], np.zeros(0, np.int32)
    for roles, said, calls_tool in exchanges:
        messages += [{"role": role, "content": said} for role in roles]
        prompt = template.render(messages, tools=tools).tokens
        assert prefix_break(previous, prompt) is None
        previous = prompt
        messages += [{**CALL, "content": said} if calls_tool else {**ANSWER, "content": said}]


def test_an_answer_that_begins_with_space_breaks_the_headers_last_token(smollm):
    turn = smollm.render([USER]).tokens
    after = smollm.render([USER, {"role": "assistant", "content": "\n\nHi"}, USER]).tokens
    assert prefix_break(turn, after) == len(turn) - 1  # "\n" + "\n\n" is one token


def test_qwen2_5_closes_a_group_of_results_that_could_have_gone_on():
    template = chars(stored("qwen2.5"))
    turn, after = template.render([USER, RESULT]), template.render([USER, RESULT, RESULT])
    at = prefix_break(turn.tokens, after.tokens)
    assert turn.text[at:] == "<|im_end|>\n<|im_start|>assistant\n"


def test_qwen3_forgets_the_thinking_of_past_turns():
    template = chars(stored("qwen3"))
    thought = {**ANSWER, "content": "<think>\n1+2\n</think>\n\nIt is 3."}
    first = template.render([USER, thought], add_generation_prompt=False)
    second = template.render([USER, thought, USER])
    at = prefix_break(first.tokens, second.tokens)
    assert first.text[at:].startswith("<think>\n1+2")
    assert second.text[at:].startswith("It is 3.")


def test_prefix_break_finds_the_first_difference():
    previous = np.array([1, 2, 3])
    assert prefix_break(previous, np.array([1, 2, 3, 4])) is None
    assert prefix_break(previous, np.array([1, 2, 3])) is None
    assert prefix_break(previous, np.array([1, 9, 3, 4])) == 1
    assert prefix_break(previous, np.array([1, 2])) == 2


# --- messages as clients send them


def test_null_content_is_empty(sources):
    template = chars(sources["smollm2"])
    assert owned(template.render([USER, {**CALL, "tool_calls": None}]))[2] == (
        1, "<|im_start|>assistant\n<|im_end|>\n")
    assert normalised([{"role": "assistant"}]) == [{"role": "assistant", "content": ""}]


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalised([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]


def test_arguments_in_json_are_parsed():
    def arguments(text):
        call = {"type": "function", "function": {"name": "f", "arguments": text}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        (result,) = normalised([message])
        assert call["function"]["arguments"] == text  # the caller's message is left alone
        return result["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"n": [2]}') == {"n": [2]}
    assert arguments({"n": 2}) == {"n": 2}
    assert arguments('{"n": ') == '{"n": '
    assert arguments("[1]") == "[1]"
    assert arguments("[" * 100_000) == "[" * 100_000


def test_null_fields_and_empty_calls_are_absent():
    message = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}
    assert normalised([message]) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(("messages", "error"), [
    ([], "messages is empty"),
    ([USER, {"content": "x"}], r"messages\[1\] is .* string `role`"),
    (["x"], r"messages\[0\] is 'x'"),
    ([{"role": "user", "content": 3}], r"messages\[0\]\.content is 3"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
     r"messages\[0\]\.content\[1\] is a part of type 'image_url': only .*text.* is supported"),
    ([{"role": "user", "content": ["a"]}], r"messages\[0\]\.content\[0\] is a part of type 'a'"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]"),
    ([USER, {"role": "assistant", "tool_calls": {}}], r"messages\[1\]\.tool_calls is \{\}"),
])
def test_wrong_messages_are_named(messages, error):
    with pytest.raises(ValueError, match=error):
        normalised(messages)


def test_a_templates_own_refusal_is_a_value_error():
    with pytest.raises(ValueError, match=r"refuses these messages: .* single tool-calls"):
        chars(stored("llama3.1")).render([USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}])
    with pytest.raises(ValueError, match="fails on these messages"):
        chars("{{ messages[0].content + 1 }}").render([USER])
    with pytest.raises(ValueError, match="not valid Jinja"):
        chars("{% for %}")


def test_a_template_cannot_reach_python():
    with pytest.raises(ValueError, match="unsafe"):
        chars("{{ messages[0].content.__class__.__mro__ }}").render([USER])
    with pytest.raises(ValueError, match="refuses"):
        chars("{{ messages.append(1) }}").render([USER])


def test_json_is_printed_as_it_is():
    source = "{{ {'a': '<é>'} | tojson }}{{ messages[0].content | tojson }}"
    rendered = chars(source).render([{"role": "user", "content": "<ü>'"}])
    assert owned(rendered) == [(NOBODY, '{"a": "<é>"}'), (0, '"<ü>\'"')]


# --- warnings


def test_tool_calls_that_are_not_printed_are_reported(sources):
    # The name stands in the content, so looking for it in the text would not do.
    messages = [USER, {**CALL, "content": "I add."}, RESULT]
    assert chars(sources["smollm2"]).render(messages).warnings == (NO_TOOL_CALLS,)
    assert chars(stored("qwen2.5")).render(messages).warnings == ()


def test_a_message_printed_as_json_is_printed():
    rendered = chars("{{ messages[0] | tojson }}").render([CALL])
    assert {owner for owner, _ in owned(rendered)} == {0}
    assert rendered.warnings == ()


def test_roles_that_are_not_printed_are_reported():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    empty = {"role": "system", "content": " "}
    warnings = chars(source).render([empty, USER, RESULT, ANSWER, RESULT]).warnings
    assert warnings == (NOT_PRINTED.format(role="tool"), NOT_PRINTED.format(role="assistant"))


# --- where templates are found


def test_hf_folder_with_a_template_in_its_configuration(tmp_path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"},
              "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_hf(tmp_path, Pieces()).render([USER]).text == "<s>Hi</s>"
    config["chat_template"] = [{"name": "default", "template": "d"}, {"name": "x", "template": ""}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_hf(tmp_path, Pieces()).render([USER]).text == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.from_hf(tmp_path, Pieces()).render([USER]).text == "file"


def test_files_without_a_template_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate.from_hf(tmp_path, Pieces())
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"no tokenizer\.chat_template"):
        ChatTemplate.from_gguf(tmp_path / "m.gguf", Pieces())
