"""Text to tokens and back, from a GGUF file or from a Hugging Face folder.

A `Tokenizer` wraps a `tokenizers.Tokenizer`. It never adds a token that the text does not name:
whether a bare prompt starts with BOS is told by `adds_bos`, and is the caller's business.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from .load_gguf import open_gguf

# gguf.TokenType, by the roles that matter here.
_CONTROL, _USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED

# A GGUF file names one EOS; chat models also end a turn with these, where they have them.
_END_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>",
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is cut before merging, by tokenizer.ggml.pre: each pattern cuts the pieces of the last.
_CUTS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "qwen2": (_WORDS % 1,),
    "llama-bpe": (_WORDS % 3,),
}
_NORMALIZERS = {"qwen2": normalizers.NFC}

# Byte-level vocabularies write each byte as a character: itself if that can be seen, or else one of
# those from 256 on.
_SEEN = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTE_OF = {**{chr(byte): byte for byte in _SEEN},
            **{chr(256 + place): byte for place, byte in enumerate(_UNSEEN)}}
_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # in the vocabularies of SentencePiece


class TextStream:
    """Text from tokens as they come, never half a character.

    Args:
      backend: whose tokens they are.
      shown: control tokens whose text is given out; that of the others is left out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, shown: Iterable[str] = ()):
        self._backend = backend
        shown = frozenset(shown)
        self._skips = not shown  # leaving them out is the backend's business
        self._hidden = frozenset() if self._skips else frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special and token.content not in shown)
        self._stream = decoders.DecodeStream(skip_special_tokens=self._skips)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        self._held.append(token_id)
        text = self._stream.step(self._backend, token_id)
        if text is None:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """What was held back, at the stream's end: bytes that are no character become U+FFFD."""
        text = self._backend.decode(self._held, skip_special_tokens=self._skips)
        self._held.clear()
        return text


class Tokenizer:
    """A model's tokenizer.

    Attributes:
      vocab_size: number of token ids, control tokens included.
      bos_id: beginning-of-sequence token, None where the model names none.
      adds_bos: whether the model expects a bare prompt (not a rendered chat) to start with it.
      stop_ids: tokens that end a generation: EOS and the ends of a turn.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        adds_bos: bool = False,
        stop_ids: Iterable[int] = (),
    ):
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()
        self.bos_id = bos_id
        self.adds_bos = adds_bos
        self.stop_ids = frozenset(stop_ids)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that makes tokens of text."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    @classmethod
    def from_gguf(cls, file: str | pathlib.Path | gguf.GGUFReader) -> Tokenizer:
        """Read the tokenizer in a GGUF file's metadata.

        Args:
          file: path of the file, or a reader that is already open (opening takes seconds).

        Raises:
          ValueError: the file holds another kind of tokenizer than byte-level BPE, or one whose
            pre-tokenizer is not known here.
        """
        fields = gguf_fields(file)
        kind, pre = fields("tokenizer.ggml.model"), fields("tokenizer.ggml.pre", "default")
        if kind != "gpt2":
            raise ValueError(
                f"tokenizer.ggml.model is {kind!r}; supported is 'gpt2' (byte-level BPE). "
                "Load the model from its Hugging Face folder (tokenizer.json) instead"
            )
        if pre not in _CUTS:
            raise ValueError(
                f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(sorted(_CUTS))}. "
                "Load the model from its Hugging Face folder (tokenizer.json) instead"
            )
        tokens, types = fields("tokenizer.ggml.tokens"), fields("tokenizer.ggml.token_type")
        ids = {token: i for i, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in fields("tokenizer.ggml.merges", ())]
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=ids, merges=merges, ignore_merges=pre == "llama-bpe")
        )
        if pre in _NORMALIZERS:
            backend.normalizer = _NORMALIZERS[pre]()
        cuts = [pre_tokenizers.Split(tokenizers.Regex(cut), "isolated") for cut in _CUTS[pre]]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(_added(tokens, types, _CONTROL))
        backend.add_tokens(_added(tokens, types, _USER_DEFINED))
        named = (fields(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        ends = (ids[token] for token in _END_OF_TURN if token in ids)
        return cls(
            backend,
            bos_id=fields("tokenizer.ggml.bos_token_id"),
            adds_bos=bool(fields("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
            stop_ids={*(i for i in named if i is not None), *ends},
        )

    @classmethod
    def from_hf(cls, directory: str | pathlib.Path) -> Tokenizer:
        """Read tokenizer.json and the configuration files beside it.

        Raises:
          ValueError: the folder has no tokenizer.json.
        """
        directory = pathlib.Path(directory)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"no tokenizer.json in {str(directory)!r}: save the model's fast tokenizer there"
            )
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        added = backend.encode("", add_special_tokens=True).ids
        config = read_json(directory / "tokenizer_config.json")
        bos, eos = (special_text(config.get(f"{name}_token")) for name in ("bos", "eos"))
        bos_id = backend.token_to_id(bos) if bos else None
        stops = {backend.token_to_id(eos)} if eos else set()
        for name in ("generation_config.json", "config.json"):
            ids = read_json(directory / name).get("eos_token_id")
            stops.update(ids if isinstance(ids, list) else [ids])
        # It would add tokens and trim the spaces off the offsets that ownership needs.
        backend.post_processor = None
        return cls(
            backend,
            bos_id=bos_id,
            adds_bos=bos_id is not None and added[:1] == [bos_id],
            stop_ids=stops - {None},
        )

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`, nothing added.

        Args:
          text: what to tokenise.
          special: whether the text of a control token ("<|im_end|>") becomes that token; if not,
            it is spelled out like any other text.
        """
        backend = self._backend if special else self._literal
        return backend.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, and for each the half-open range of characters it stands for."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of some tokens; control tokens are left out unless `skip_special` is False."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def piece(self, token_id: int) -> bytes:
        """The bytes of a token, whole characters or not; of a control token those of its text.

        Empty for an id that the vocabulary does not name.
        """
        added = self._added_text.get(token_id)
        if added is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id) or ""
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in token)
        byte = _ONE_BYTE.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace("\u2581", " ").encode()

    def stream(self, shown: Iterable[str] = ()) -> TextStream:
        """A decoder for tokens that come one by one.

        Args:
          shown: control tokens whose text is not left out.
        """
        return TextStream(self._backend, shown)

    @functools.cached_property
    def _added_text(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        # A switch on the tokenizer itself would be seen by other threads.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


def gguf_fields(file: str | pathlib.Path | gguf.GGUFReader):
    """A lookup `(name, default=None) -> value` over a GGUF file's metadata."""
    reader = file if isinstance(file, gguf.GGUFReader) else open_gguf(file)

    def look_up(name: str, default: Any = None) -> Any:
        field = reader.get_field(name)
        return default if field is None else field.contents()

    return look_up


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def special_text(token: str | dict[str, Any] | None) -> str:
    """Text of a special token in tokenizer_config.json: a string, null or an object."""
    return token["content"] if isinstance(token, dict) else token or ""


def _added(tokens: Sequence[str], types: Sequence[int], kind: int) -> list[tokenizers.AddedToken]:
    special = kind == _CONTROL
    return [
        tokenizers.AddedToken(token, special=special, normalized=False)
        for token, its in zip(tokens, types, strict=True)
        if its == kind
    ]
