"""Servers side by side: ours in several configurations, and others that speak OpenAI's API.

They are asked in one run, on the same machine, from the same client, and one at a time: either one
after the other, or in turns, and then whoever is not asked is stopped (SIGSTOP), since some servers
spin while they wait and take the time of the one that works. A request names
the model, messages, greedy sampling, and `ignore_eos`, which all of them know, so that all answer
with the same number of tokens. Messages are a role and a text: what a template prints of tool calls
differs between servers, and prompts must not.

As a program it writes the embedded model for them: `python benchmarks/peers.py FOLDER` makes
FOLDER/hf (bfloat16, for vLLM and transformers) and FOLDER/q8_0.gguf (for llama.cpp), both from the
weights that ours dequantises.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import httpx
import numpy as np
from safetensors.numpy import save_file

from kvfunc import models
from kvfunc.models.load import embedded_path
from kvfunc.models.load_gguf import open_gguf
from kvfunc.models.tokenizer import Tokenizer, gguf_fields
from kvfunc.serve.client import serve_command

KV_TOKENS = 65536
START_SECONDS = 900
NOT_COMPUTED = ("cached_tokens", "repos_tokens", "drop_skipped_tokens", "approximate_tokens")
HF_NAMES = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}


@dataclass(frozen=True)
class System:
    """A server that runs. `ours` tells those that take the `cache` object and count their steps."""

    name: str
    url: str
    model: str
    ours: bool
    group: int | None = None  # its processes, if it was started here

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run; outside of this it is stopped."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        if self.group is not None:
            os.killpg(self.group, number)

    def counters(self) -> dict[str, float]:
        """What /health counts; nothing of other servers."""
        if not self.ours:
            return {}
        return httpx.get(f"{self.url}/health", trust_env=False).json()["engine"]


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are those of the client's clock, in seconds."""

    prompt: int
    cached: int | None  # prompt tokens that were not computed, where the server tells
    generated: int
    start: float
    texts: tuple[float, ...]  # when a piece of text came, which is a token, seldom several
    end: float

    @property
    def first(self) -> float:
        """Seconds to the first text."""
        return (self.texts or (self.end,))[0] - self.start


async def ask(http: httpx.AsyncClient, system: System, messages: Sequence[Mapping[str, Any]],
              max_tokens: int, cache: Mapping[str, Any] | None = None) -> Answer:
    """Send a request and follow its stream.

    Raises:
      RuntimeError: if the server refuses it, breaks off or answers with another number of tokens.
    """
    body = {"model": system.model, "messages": messages, "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **({"cache": cache} if cache else {})}
    texts, usage = [], None
    start = time.perf_counter()
    async with http.stream("POST", f"{system.url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{system.name}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk, now = json.loads(line.removeprefix("data: ")), time.perf_counter()
            if "error" in chunk:
                raise RuntimeError(f"{system.name}: {chunk['error']}")
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                texts.append(now)
            usage = chunk.get("usage") or usage
    end = time.perf_counter()
    if usage is None or usage["completion_tokens"] != max_tokens:
        raise RuntimeError(f"{system.name}: asked for {max_tokens} tokens, the stream ended with "
                           f"usage {usage}")
    details = usage.get("prompt_tokens_details")
    cached = None if details is None else sum(details.get(name) or 0 for name in NOT_COMPUTED)
    return Answer(usage["prompt_tokens"], cached, max_tokens, start, tuple(texts), end)


def client() -> httpx.AsyncClient:
    """A client with no limit on time or connections that ignores the environment's proxies.

    Each request has a connection of its own: some servers close one just when it is used again.
    """
    return httpx.AsyncClient(timeout=None, trust_env=False, limits=httpx.Limits(
        max_connections=None, max_keepalive_connections=0))


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Role and text of each message, without tool calls."""
    return [{"role": message["role"], "content": message["content"] or ""} for message in messages]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which systems run."""
    parser.add_argument(
        "--ours-args", action="append", metavar="ARGS",
        help="flags of a `kvfunc serve`, in one string; each makes a system of its own, and ratios "
        f"are to the first. Default: one with none. All have --kv-tokens {KV_TOKENS} before them")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL[,MODEL]",
        help="a server that runs, freshly started: its cache is to hold nothing of this work")
    parser.add_argument(
        "--peer-command", action="append", default=[], metavar="NAME=COMMAND",
        help="a server to start and to end: its command line, with {port} for the port")


Launch = Callable[[], contextlib.AbstractContextManager[System]]


def launches(args: argparse.Namespace) -> list[Launch]:
    """How each system is started, ours first; what is started here ends with its context."""
    made: list[Launch] = []
    for flags in args.ours_args or [""]:
        command = [*serve_command(None), "--kv-tokens", str(KV_TOKENS), *shlex.split(flags),
                   "--port", "{port}"]
        made.append(functools.partial(_launched, f"kvfunc {flags}".strip(), shlex.join(command),
                                      ours=True))
    for name, command in map(_named, args.peer_command):
        made.append(functools.partial(_launched, name, command))
    for name, address in map(_named, args.peer):
        url, _, model = address.partition(",")
        system = _system(name, url.rstrip("/").removesuffix("/v1"), model)
        made.append(functools.partial(contextlib.nullcontext, system))
    return made


@contextlib.contextmanager
def systems(args: argparse.Namespace) -> Iterator[list[System]]:
    """All systems at once, each asleep until it is `awake`."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(launch()) for launch in launches(args)]
        for system in found:
            with system.awake():
                pass
        yield found


@contextlib.contextmanager
def _launched(name: str, command: str, ours: bool = False) -> Iterator[System]:
    with _started(name, command) as (url, group):
        yield _system(name, url, ours=ours, group=group)


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"{text!r} names no peer: write NAME=URL or NAME=COMMAND")
    return name, value


def _system(name: str, url: str, model: str = "", *, ours: bool = False,
            group: int | None = None) -> System:
    if not model:
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    return System(name, url, model, ours, group)


@contextlib.contextmanager
def _started(name: str, command: str) -> Iterator[tuple[str, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(shlex.split(command.replace("{port}", str(port))), stdout=log,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if not _ready(process, url):
                log.seek(0)
                raise SystemExit(f"{name} did not start. It printed:\n{log.read()[-4000:]}")
            yield url, process.pid
        finally:
            # Its workers too: they are of its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _ready(process: subprocess.Popen, url: str) -> bool:
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return True
        time.sleep(0.5)
    return False


def write_hf(folder: pathlib.Path) -> None:
    """The embedded model as a Hugging Face folder, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    path = embedded_path()
    model, fields = models.load(), gguf_fields(path)
    config = model.config
    ends = fields("tokenizer.ggml.eos_token_id")
    tokens = fields("tokenizer.ggml.tokens")
    weights = {}
    for name, part in model.params.items():
        if name.startswith("layer_"):
            prefix = f"model.layers.{name.removeprefix('layer_')}"
            for module, weight in part.items():
                weights[f"{prefix}.{HF_NAMES[module]}.weight"] = np.asarray(weight["weight"])
        else:
            module = {"embed": "embed_tokens", "norm": "norm"}[name]
            weights[f"model.{module}.weight"] = np.asarray(part["weight"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    Tokenizer.from_gguf(path)._backend.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size, "hidden_size": config.width,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width, "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied,
        "rope_theta": fields("llama.rope.freq_base"), "attention_bias": False, "mlp_bias": False,
        "max_position_embeddings": config.context_length, "eos_token_id": ends})
    _write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[ends],
        "bos_token": tokens[fields("tokenizer.ggml.bos_token_id")],
        "model_max_length": config.context_length, "clean_up_tokenization_spaces": False,
        "chat_template": fields("tokenizer.chat_template")})


def write_q8_0(path: pathlib.Path) -> None:
    """The embedded model as a GGUF file with every matrix in Q8_0."""
    kind = gguf.GGMLQuantizationType
    reader = open_gguf(embedded_path())
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture",
                                                         "general.file_type"):
            part = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], part)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for tensor in reader.tensors:
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        stored = kind.F32 if weight.ndim == 1 else kind.Q8_0
        writer.add_tensor(tensor.name, gguf.quants.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the embedded model for other servers.")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    write_hf(args.folder / "hf")
    write_q8_0(args.folder / "q8_0.gguf")


if __name__ == "__main__":
    main()
