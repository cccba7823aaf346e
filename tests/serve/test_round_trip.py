"""What a model writes, read and sent back, is printed as it was written: its KV is of use again."""

import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.models.chat import ChatTemplate, prefix_break
from kvfunc.serve.answer import Step
from kvfunc.serve.dialects import reading
from kvfunc.serve.interface import Usage
from kvfunc.serve.responses import ChatReply
from kvfunc.serve.text import Piece

from .fake import byte_tokenizer

TEMPLATES = pathlib.Path(__file__).parents[1] / "models" / "templates"
TOKENIZER = byte_tokenizer()
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"n": "int"}}}]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
NAMES = [path.stem for path in sorted(TEMPLATES.glob("*.jinja"))]
ENDS = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3.1": "<|eot_id|>",
        "mistral-v7": "</s>", "mistral-v13": "</s>", "gemma3": "<end_of_turn>",
        "gpt-oss": "<|call|>"}


def template_of(name):
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), TOKENIZER, bos_token="<s>",
                        eos_token="</s>")


def written(name, said, thought, calls):
    """The text in which a model of this family answers, without the token that ends it."""
    if name == "gpt-oss":
        made = [f"<|channel|>analysis<|message|>{thought}<|end|>"] * bool(thought)
        made += [f"<|channel|>commentary<|message|>{said}<|end|>"] * bool(said and calls)
        made += [f"<|channel|>final<|message|>{said}"] * (not calls)
        made += [f"<|channel|>commentary to=functions.{function} <|constrain|>json<|message|>"
                 f"{arguments}" for function, arguments in calls]
        return "<|start|>assistant".join(made)
    if name == "llama3.1":
        return said + "".join(f'{{"name": "{function}", "parameters": {arguments}}}'
                              for function, arguments in calls)
    if name == "mistral-v7":
        listed = ", ".join(f'{{"name": "{function}", "arguments": {arguments}, "id": "{i:09}"}}'
                           for i, (function, arguments) in enumerate(calls))
        return said + f"[TOOL_CALLS][{listed}]" * bool(calls)
    if name == "mistral-v13":
        return f"[THINK]{thought}[/THINK]" * bool(thought) + said + "".join(
            f"[TOOL_CALLS]{function}[ARGS]{arguments}" for function, arguments in calls)
    blocks = [f'<tool_call>\n{{"name": "{function}", "arguments": {arguments}}}\n</tool_call>'
              for function, arguments in calls]
    return f"<think>\n{thought}\n</think>\n\n" * bool(thought) + "\n".join(
        [said] * bool(said) + blocks)


def answered(template, history, text, tools=TOOLS):
    """The prompt with the answer's tokens, and the message that the server makes of the answer."""
    prompt = template.render(history, tools=tools)
    reply = ChatReply("m", TOKENIZER, False, 1, reading(template, prompt.text, bool(tools)))
    step = Step(0, Piece(text), "stop", Usage(0, 0, 0, 0, 0), 1)
    message = reply.whole([step], [])["choices"][0]["message"]
    return np.concatenate([prompt.tokens, np.array(TOKENIZER.encode(text), np.int32)]), message


def results(message):
    return [{"role": "tool", "tool_call_id": call["id"], "content": "3"}
            for call in message["tool_calls"]]


def printed_on(template, before, history, tools=TOOLS):
    """What follows the tokens of the turn before; None and the rest where they are not repeated."""
    after = template.render(history, tools=tools)
    at = prefix_break(before, after.tokens)
    decode = TOKENIZER.decode
    if at is None:
        return decode(after.tokens[len(before):].tolist(), skip_special=False)
    return None, decode(after.tokens[at:].tolist(), skip_special=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_extends_the_last_prompt_and_answer(name):
    template, history = template_of(name), [SYSTEM, USER]
    for _ in range(3):
        before, message = answered(template, history, written(name, "It is 3.", "", []), None)
        assert message == {"role": "assistant", "content": "It is 3.", "refusal": None}
        history = [*history, message, USER]
        end = "<|end|>" if name == "gpt-oss" else ENDS[name]  # where it wrote <|return|>
        assert printed_on(template, before, history, None).startswith(end)


ARGUMENTS = ['{"n": 2, "a": "é\\n\\"</tool_call>}"}', "{}", '{"z": [1.5, null], "b": {"a": true}}']


@pytest.mark.parametrize("said, thought, count", [
    ("", "", 1), ("I add.", "", 1), ("", "1+2", 1), ("I add.", "1+2", 1), ("", "", 3),
    ("I add.", "1+2", 3)])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma3"])
def test_calls_are_printed_as_they_were_written(name, said, thought, count):
    template = template_of(name)
    if name == "qwen3":
        thought = thought or "so"  # it prints the tags also around nothing
    if name in ("qwen2.5", "llama3.1", "mistral-v7"):
        thought = ""
    if name in ("llama3.1", "gpt-oss"):
        count = 1
    if name == "llama3.1":
        said = ""  # a call is the whole answer
    calls = [("add", arguments) for arguments in ARGUMENTS[:count]]
    history = [SYSTEM, USER]
    for _ in range(2):
        before, message = answered(template, history, written(name, said, thought, calls))
        assert message["content"] == (said or None)
        assert message.get("reasoning_content", "") == thought
        assert [(call["function"]["name"], call["function"]["arguments"])
                for call in message["tool_calls"]] == calls
        history = [*history, message, *results(message)]
        assert printed_on(template, before, history).startswith(ENDS[name])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner,
                                                                max_size=3), max_leaves=6)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma3"])
@settings(max_examples=25, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=4), values, max_size=4))
def test_arguments_spaced_as_json_dumps_does_are_printed_as_they_were_written(name, arguments):
    template = template_of(name)
    text = json.dumps(arguments, ensure_ascii=False)
    thought = "so" if name == "qwen3" else ""
    before, message = answered(template, [USER], written(name, "", thought, [("add", text)]))
    assert message["tool_calls"][0]["function"]["arguments"] == text
    assert printed_on(template, before, [USER, message, *results(message)]).startswith(ENDS[name])


# Where templates print it otherwise


@pytest.mark.parametrize("arguments, kept, printed", [
    ('{"n":2}', '{"n":', " 2}"),
    ('{ "n": 2}', "{", '"n": 2}'),
    ('{"a": "\\u00e9"}', '{"a": "', 'é"}'),
    ('{"n": 1.50}', '{"n": 1.5', "}"),
    ('{"n": 1, "n": 2}', '{"n": ', "2}"),
])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma3"])
def test_arguments_of_another_spelling_are_the_clients_but_not_the_next_prompts(
        name, arguments, kept, printed):
    """Templates print parsed arguments in one spelling of their own."""
    template = template_of(name)
    thought = "so" if name == "qwen3" else ""
    before, message = answered(template, [USER], written(name, "", thought, [("add", arguments)]))
    assert message["tool_calls"][0]["function"]["arguments"] == arguments
    none, rest = printed_on(template, before, [USER, message, *results(message)])
    assert none is None and rest.startswith(printed)
    text = TOKENIZER.decode(template.render([USER, message], tools=TOOLS).tokens.tolist())
    assert kept + printed in text


def test_qwen3_forgets_its_reasoning_when_the_user_speaks_again():
    template = template_of("qwen3")
    before, message = answered(template, [USER], written("qwen3", "Yes.", "so", []))
    assert message["reasoning_content"] == "so" and message["content"] == "Yes."
    assert printed_on(template, before, [USER, message, USER]) == (
        None, "Yes.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_gpt_oss_forgets_its_reasoning_with_the_final_answer():
    template, history = template_of("gpt-oss"), [USER]
    call = written("gpt-oss", "", "so", [("add", "{}")])
    _, message = answered(template, history, call)
    history += [message, *results(message)]
    before, final = answered(template, history, written("gpt-oss", "Yes.", "thus", []))
    assert final["reasoning_content"] == "thus"
    none, rest = printed_on(template, before, [*history, final, USER])
    assert none is None and rest.startswith("commentary to=functions.add")  # not "analysis"
    assert "thus" not in rest


def test_mistral_v7_moves_its_tools_to_the_last_user_message():
    template = template_of("mistral-v7")
    before, message = answered(template, [USER], "Yes.")
    none, rest = printed_on(template, before, [USER, message, USER])
    assert none is None and rest.startswith("INST]Hi[/INST]Yes.</s>[AVAILABLE_TOOLS]")


def test_mistral_v7_prints_the_id_of_a_call_that_had_none():
    template = template_of("mistral-v7")
    before, message = answered(
        template, [USER], '[TOOL_CALLS][{"name": "add", "arguments": {}}]')
    (made,) = (call["id"] for call in message["tool_calls"])
    none, rest = printed_on(template, before, [USER, message, *results(message)])
    assert none is None and rest.startswith(f', "id": "{made}"}}]</s>')


def test_llama_prints_no_python_tag_before_a_call():
    template = template_of("llama3.1")
    before, message = answered(
        template, [USER], '<|python_tag|>{"name": "add", "parameters": {}}')
    assert message["content"] is None
    assert printed_on(template, before, [USER, message, *results(message)])[1].startswith('{"name"')


def test_gemma3_calls_in_a_fence_are_content():
    fence = "```tool_code\nadd(n=2)\n```"
    before, message = answered(template_of("gemma3"), [USER], fence)
    assert message == {"role": "assistant", "content": fence, "refusal": None}
    assert printed_on(template_of("gemma3"), before, [USER, message, USER]).startswith(
        "<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>")
