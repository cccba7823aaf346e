import json

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors

from kvfunc.models.tokenizer import Tokenizer

# The bytes of all other characters are in SmolLM2's vocabulary.
WRITABLE = st.characters(
    max_codepoint=0x3FFFF, codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d"
)


@pytest.fixture(scope="module")
def smollm(embedded_gguf):
    return Tokenizer.from_gguf(embedded_gguf)


def write_gguf(path, *, model="gpt2", pre="default", merges=(), more=(), **ids):
    """A GGUF file whose vocabulary is the 256 bytes, the merges, and `more` (text, type)."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *(text for text, _ in more)])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [kind for _, kind in more])
    writer.add_token_merges(list(merges))
    for name, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    return [text[start:stop] for start, stop in offsets]


def test_smollm_encodes_to_known_ids(smollm):
    assert smollm.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]


def test_smollm_cuts_every_digit(smollm):
    assert pieces(smollm, "in 2018, v12") == ["in", " ", "2", "0", "1", "8", ",", " v", "1", "2"]


def test_smollm_knows_its_special_ids(smollm):
    assert smollm.vocab_size == 49152
    assert smollm.bos_id == 1
    assert not smollm.adds_bos
    assert smollm.stop_ids == {0, 2}  # <|endoftext|>, <|im_end|>


def test_control_tokens_are_spelled_out_on_request(smollm):
    assert smollm.encode("a<|im_end|>") == [81, 2]
    literal = smollm.encode("a<|im_end|>", special=False)
    assert 2 not in literal
    assert smollm.decode(literal) == "a<|im_end|>"
    assert smollm.encode("a<|im_end|>") == [81, 2]


def test_decode_leaves_out_control_tokens_unless_told(smollm):
    assert smollm.decode([81, 2]) == "a"
    assert smollm.decode([81, 2], skip_special=False) == "a<|im_end|>"


def test_real_agent_runs_survive_the_round_trip(smollm, agent_runs):
    texts = [
        message["content"]
        for line in agent_runs.read_text(encoding="utf-8").splitlines()
        for message in json.loads(line)["messages"]
    ]
    assert len(texts) == 93
    for text in texts:
        ids, offsets = smollm.encode_with_offsets(text or "")
        assert smollm.decode(ids, skip_special=False) == (text or "")
        assert "".join(text[a:b] for a, b in offsets) == (text or "") or not text.isascii()


def test_offsets_of_a_character_in_several_tokens_start_at_it(smollm):
    ids, offsets = smollm.encode_with_offsets("né 😀!")
    assert offsets == [(0, 1), (1, 2), (2, 4), (3, 4), (4, 5)]
    assert len(ids) == 5


def test_stream_holds_half_a_character_back(smollm):
    stream = smollm.stream()
    assert [stream.push(i) for i in smollm.encode("né 😀!")] == ["n", "é", "", " 😀", "!"]
    assert stream.flush() == ""


def test_stream_flushes_what_never_became_a_character(smollm):
    stream = smollm.stream()
    held = [stream.push(i) for i in smollm.encode("a 😀")[:-1]]
    assert held == ["a", ""]
    assert stream.flush() == " \ufffd"
    assert stream.flush() == ""


def test_stream_shows_the_control_tokens_that_are_asked_for(smollm):
    ids = smollm.encode("a<|im_start|>é<|im_end|> 😀")
    for cut, text in [(len(ids), "a<|im_start|>é 😀"), (len(ids) - 1, "a<|im_start|>é \ufffd")]:
        stream = smollm.stream(["<|im_start|>", "[NO SUCH TOKEN]"])
        said = [stream.push(i) for i in ids[:cut]]
        assert said[:2] == ["a", "<|im_start|>"]
        assert "".join(said) + stream.flush() == text


def test_stream_says_nothing_for_control_tokens(smollm):
    stream = smollm.stream()
    assert [stream.push(i) for i in smollm.encode("a<|im_end|> b")] == ["a", "", " b"]


@settings(deadline=None)
@given(st.text(WRITABLE, max_size=40))
def test_stream_says_what_decode_says(smollm, text):
    stream = smollm.stream()
    said = [stream.push(i) for i in smollm.encode(text, special=False)]
    assert "".join(said) + stream.flush() == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in said)


@settings(deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30))
def test_stream_of_any_tokens_says_what_decode_says(smollm, ids):
    stream = smollm.stream()
    assert "".join([stream.push(i) for i in ids]) + stream.flush() == smollm.decode(ids)


@settings(deadline=None)
@given(st.text(WRITABLE, max_size=20))
def test_pieces_are_the_bytes_of_the_text(smollm, text):
    text = f"<|im_start|>{text}<|im_end|>"
    assert b"".join(map(smollm.piece, smollm.encode(text))) == text.encode()


def test_every_token_has_a_piece(smollm):
    alone = [smollm.piece(token) for token in range(smollm.vocab_size)]
    assert all(alone) and {bytes([byte]) for byte in b"a \n\x80\xf0"} <= {*alone}
    assert smollm.piece(smollm.vocab_size) == b""


def test_pieces_of_a_sentencepiece_vocabulary():
    vocabulary = {"<unk>": 0, "▁so": 1, "<0xE2>": 2, "<0x0A>": 3, "é": 4, "</s>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    assert [Tokenizer(backend).piece(token) for token in range(1, 6)] == [
        b" so", b"\xe2", b"\n", "é".encode(), b"</s>"]


@pytest.mark.parametrize(("pre", "expected"), [
    ("smollm", ["1", "2", "3", "4", "5", "!="]),
    ("qwen2", ["1", "2", "3", "4", "5", "!="]),
    ("llama-bpe", ["123", "45", "!="]),
    ("gpt-2", ["12345", "!="]),
    ("default", ["123", "45", "!="]),
])
def test_each_pre_tokenizer_cuts_digits_its_way(tmp_path, pre, expected):
    merges = ["1 2", "12 3", "4 5", "123 45", "! ="]
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", pre=pre, merges=merges))
    assert pieces(tokenizer, "12345!=") == expected


@pytest.mark.parametrize(("pre", "expected"), [
    ("smollm", ["DON", "'", "T", "\n", "\n", "x"]),
    ("llama-bpe", ["DON", "'T", "\n\n", "x"]),
    ("qwen2", ["DON", "'T", "\n\n", "x"]),
])
def test_each_pre_tokenizer_cuts_words_its_way(tmp_path, pre, expected):
    merges = ["D O", "DO N", "' T", "Ċ Ċ"]
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", pre=pre, merges=merges))
    assert pieces(tokenizer, "DON'T\n\nx") == expected


def test_gguf_token_types_decide_what_is_special(tmp_path):
    more = [("<|eot_id|>", gguf.TokenType.CONTROL), ("<tool_call>", gguf.TokenType.USER_DEFINED),
            ("<|stop|>", gguf.TokenType.CONTROL)]
    path = write_gguf(tmp_path / "m.gguf", pre="llama-bpe", more=more, eos=258, bos=256)
    tokenizer = Tokenizer.from_gguf(path)
    ids = tokenizer.encode("<tool_call><|eot_id|>")
    assert ids == [257, 256]
    assert tokenizer.decode(ids) == "<tool_call>"
    assert tokenizer.stop_ids == {256, 258}
    assert tokenizer.adds_bos  # llama-bpe's default


def test_sentencepiece_in_gguf_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", model="llama")
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model is 'llama'; supported is 'gpt2'"):
        Tokenizer.from_gguf(path)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", pre="tekken")
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre is 'tekken'; .*qwen2"):
        Tokenizer.from_gguf(path)


@pytest.fixture
def hf_directory(tmp_path, smollm):
    backend = tokenizers.Tokenizer.from_str(smollm._backend.to_str())
    backend.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]),
    ])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_hf_files_give_the_same_tokens_as_gguf(hf_directory, smollm):
    tokenizer = Tokenizer.from_hf(hf_directory)
    text = "<|im_start|>user\nThe  capital, in 2018?<|im_end|>\n"
    assert tokenizer.encode_with_offsets(text) == smollm.encode_with_offsets(text)
    assert pieces(tokenizer, "The capital") == ["The", " capital"]  # spaces are in the offsets


def test_hf_configuration_names_bos_and_the_stops(hf_directory):
    tokenizer = Tokenizer.from_hf(hf_directory)
    assert (tokenizer.bos_id, tokenizer.adds_bos, tokenizer.stop_ids) == (1, True, {2})
    (hf_directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (hf_directory / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_hf(hf_directory).stop_ids == {0, 2, 7}


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        Tokenizer.from_hf(tmp_path)
