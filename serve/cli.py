"""The `kvfunc` command. Heavy imports stand inside its functions: `--help` answers at once."""

import contextlib
import dataclasses
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .agents_command import agents
from .commandline import (
    ClientKey,
    Dtype,
    KvDtype,
    Model,
    Quantization,
    Url,
    check_model,
    client_key,
    fail,
    read_keys,
    server,
)
from .models_command import models

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from kvfunc.models.load import LoadedModel

    from .poolkeeper import PoolKeeper
    from .sharing import Sharing

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="markdown",
    help="Serve a language model whose KV cache can be edited: messages are dropped from a "
    "conversation and the gap is closed without computing anything again.\n\n"
    "Start with `kvfunc chat`: it needs no model file and no network.",
)

LAST_WORDS_SECONDS = 5  # for sending what is left when the server ends


class Attention(StrEnum):
    """Implementations of attention; auto is the one that is made for the device."""

    auto = "auto"
    xla = "xla"
    cpu = "cpu"
    pallas = "pallas"
    triton = "triton"


class Share(StrEnum):
    """Which texts of prompts may have estimated KV."""

    named = "named"
    auto = "auto"
    off = "off"


class EvictionPolicy(StrEnum):
    """What loses its KV first when memory is short."""

    worth = "worth"
    lru = "lru"
    dropped_first = "dropped_first"


class PolicyName(StrEnum):
    """Ways to keep a growing history short."""

    none = "none"
    rolling_tool_outputs = "rolling_tool_outputs"


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.bfloat16,
    quantization: Annotated[
        Quantization | None,
        typer.Option(
            help="int8: matrices as int8, with activations rounded to int8 token by token. Half "
            "the memory of bfloat16 and faster; answers differ a little.",
            show_default="none",
        ),
    ] = None,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option(help="Number format of the KV cache.", show_default="as --dtype"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest context in tokens; what is dropped and closed does not count.",
            show_default="the model's",
        ),
    ] = None,
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens the KV cache holds, all conversations together.")
    ] = 32768,
    page_size: Annotated[
        int, typer.Option(min=1, max=128, help="Tokens of KV that are allocated at a time.")
    ] = 16,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests that run at once; others wait.")
    ] = 16,
    max_queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="Requests that may be there beyond those that run at once, each answer of n "
            "counted; more get a 503 with Retry-After.",
        ),
    ] = 256,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tokens computed in one step: the longer, the sooner prompts are through, and "
            "the longer running answers wait for one.",
        ),
    ] = 512,
    eviction_policy: Annotated[
        EvictionPolicy,
        typer.Option(
            help="What loses its KV first when memory is short: what is expected to save the "
            "least work; the least recently used; or what was dropped, then the least recently "
            "used."
        ),
    ] = EvictionPolicy.worth,
    attention: Annotated[
        Attention,
        typer.Option(
            help="What computes attention. auto takes what is made for the machine's device: cpu "
            "(C code) on CPUs, pallas on TPUs, triton on NVIDIA GPUs; and xla, which runs "
            "everywhere, where that cannot be used. Away from TPUs pallas is interpreted, for "
            "tests: very slow."
        ),
    ] = Attention.auto,
    share: Annotated[
        Share,
        typer.Option(
            help="Which texts may have their KV estimated from the same text in another prompt: "
            'those named with `"cache": {"share": NAME}`; whole messages too (auto); '
            "or none. While a prompt is new, it is computed exactly and teaches."
        ),
    ] = Share.named,
    share_texts: Annotated[
        int,
        typer.Option(min=1, help="Texts computed exactly in a prompt before others are estimated."),
    ] = 8,
    share_recompute: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="Part of an estimated text that is computed: its first 8 tokens always, and those "
            "that the estimate moves most up to this part.",
        ),
    ] = 0.0,
    share_readers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Prompts of which is remembered what they do to shared texts, the latest used; "
            "each takes memory, 20 MB with the embedded model; /metrics has the sum.",
        ),
    ] = 64,
    anchor_pool: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Keep what was learned for estimates there, a folder or an object store's URL, "
            "and begin with it.",
            show_default="forgotten at the end",
        ),
    ] = None,
    anchor_pool_interval: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="How often --anchor-pool is written, if new."),
    ] = 300,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in the API.", show_default="the file's")
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="The longest that a request may wait and run together, then it gets a 504. A "
            "request's own `timeout` can only be shorter.",
            show_default="no end",
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long a server that is stopped waits for the requests it has; a second "
            "signal ends it at once.",
        ),
    ] = 30,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="KVFUNC_API_KEY",
            help="Answer only who sends this key as a bearer token; several times, or with commas "
            "between, for several keys. /health, /health/live, /health/ready and /metrics need "
            "none. Other users of this machine can see a command line, but not the environment.",
            show_default="no key",
        ),
    ] = None,
    request_log: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Write one JSON line a request to this file, or to standard output for -: times "
            "and counters, and no text of any prompt.",
            show_default="no log",
        ),
    ] = None,
) -> None:
    """Serve a model over OpenAI's HTTP API.

    `/v1/chat/completions` takes one more field, `cache`, which drops messages and closes gaps.
    """
    check_model(model)
    if request_timeout is not None and not 0 < request_timeout < float("inf"):
        fail(f"--request-timeout {request_timeout:g}: give seconds above 0, or leave it out")
    keys = read_keys(api_key or [])
    listener = _bind(host, port)
    console = Console(highlight=False, markup=False, soft_wrap=True)

    with _step(console, "importing JAX"):
        import jax

        from kvfunc import models

        from . import requestlog
        from .app import create_app
        from .engine import Engine
        from .sharing import Settings, Sharing
    if request_log is not None:
        try:
            requestlog.open_log(request_log)
        except OSError as error:
            listener.close()
            fail(f"--request-log {request_log!r}: {error.strerror}. Give a file to write to, or -")
    _keep_compilations(jax)
    try:
        as_what = dtype if quantization is None else quantization
        with _step(console, f"loading {model or 'the embedded model'} as {as_what}") as progress:
            loaded = models.load(model, dtype.value, progress, quantization)
    except (ValueError, OSError) as error:
        fail(f"MODEL {model or 'embedded'!r} cannot be served: {error}")
    if served_model_name is not None:
        loaded = dataclasses.replace(loaded, name=served_model_name)
    try:
        sharing = None if share is Share.off else Sharing(
            loaded.config, loaded.fingerprint,
            Settings(share is Share.auto, share_texts, share_recompute,
                     readers=share_readers))
        engine = Engine(
            loaded,
            sharing=sharing,
            kv_dtype=None if kv_dtype is None else kv_dtype.stored,
            context_length=max_model_len,
            kv_tokens=kv_tokens,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            chunk=max_num_batched_tokens,
            policy=eviction_policy.value,
            max_queue=max_queue,
            attention=attention.value,
        )
    except ValueError as error:
        fail(str(error))
    except NotImplementedError as error:
        fail(f"--attention {attention}: {error}")
    keeper = None
    if sharing is not None and anchor_pool is not None:
        keeper = _restored(sharing, anchor_pool, anchor_pool_interval, loaded, console)
    with _step(console, "compiling") as progress:
        engine.warm_up(progress)

    shapes = ", ".join(f"{tokens:,} x {rows:,}" for tokens, rows in engine.shapes)
    console.print(f"compiled steps (tokens x rows): {shapes}")

    web = create_app(engine, loaded.chat, api_keys=keys, request_timeout=request_timeout)
    size = decimal(engine.kv_tokens * engine.kv_bytes_per_token)
    console.print(
        f"{engine.name}: context {engine.context_length:,} tokens; {max_num_seqs} requests at "
        f"once; KV cache {engine.kv_tokens:,} tokens of {kv_dtype or dtype} in pages of "
        f"{page_size}, {size}; attention on {engine.attention}"
    )
    console.print("OpenAI's API under /v1, Ctrl-C stops")
    if keeper is not None:
        keeper.start()
    try:
        run(web, listener, drain_timeout=drain_timeout)
    finally:
        if keeper is not None:
            keeper.close()
    console.print("stopped")


@app.command()
def chat(
    model: Model = None,
    url: Url = None,
    api_key: ClientKey = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is deterministic.")] = 0.7,
) -> None:
    """Chat in the terminal, and see what each turn costs.

    After each answer: how many tokens are live, cached, repositioned, dropped and computed.
    `/drop` and `/repos` edit the conversation's KV cache; `/help` lists the commands.
    """
    from .client import Client
    from .terminal import Conversation, converse

    console = Console(highlight=False, markup=False)
    with server(console, model, url) as at, Client(at, api_key=client_key(api_key)) as client:
        conversation = Conversation(client, system, max_tokens, temperature)
        converse(conversation, client.card(), console)


@app.command()
def replay(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="FILE.jsonl",
            help='Agent runs, one JSON object a line: {"id", "source", "messages"}.',
        ),
    ],
    model: Model = None,
    url: Url = None,
    api_key: ClientKey = None,
    policy: Annotated[
        list[PolicyName] | None,
        typer.Option(
            metavar="POLICY",
            help="How the history is kept short: `none`, or `rolling_tool_outputs`, which drops "
            "all but the newest --keep tool results. Give it several times to compare.",
            show_default="both",
        ),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Tool results that stay.")] = 12,
    reposition_above_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="T",
            help="Close the gaps when positions pass this many tokens.",
            show_default="never",
        ),
    ] = None,
    run_id: Annotated[
        list[str] | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="A run's id, or its place in FILE counted from 0. May be given several times.",
            show_default="all",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens generated, and thrown away, in each round.")
    ] = 16,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many rounds.", show_default="all")
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the results.")] = Path(
        "out"
    ),
) -> None:
    """Replay recorded agent runs and measure what a policy saves.

    Every round sends the history up to the next recorded assistant message, as an agent would,
    and then goes on with the recorded message. Writes a table (JSON) and a picture (PNG) a run.
    A round that the server refuses, as one longer than the model's context, ends that policy
    and stands in the table.
    """
    from . import replay as replaying
    from . import report
    from .client import Client

    policies = [
        replaying.Policy(name, keep, reposition_above_tokens)
        for name in dict.fromkeys(policy or PolicyName)
    ]
    try:
        runs = replaying.select_runs(replaying.read_runs(file), run_id or [])
    except ValueError as error:
        fail(str(error))
    console = Console(highlight=False, markup=False)
    with server(console, model, url) as at, Client(at, api_key=client_key(api_key)) as client:
        card = client.card()
        for run in runs:
            replayed = replaying.replay(
                client,
                run,
                policies,
                console,
                rounds=rounds,
                max_tokens=max_tokens,
                kv_bytes_per_token=card.kv_bytes_per_token,
            )
            report.show(run, card, replayed, console)
            report.save(run, card, replayed, max_tokens, out, console)


app.command()(agents)
app.command()(models)


def main() -> None:
    """The `kvfunc` command."""
    # An ordinary exit on SIGTERM too, so that a server started by this command ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()


def run(
    web: "Starlette",
    listener: socket.socket,
    say: Callable[[str], None] = typer.echo,
    drain_timeout: float = 30,
) -> None:
    """Serve `web` on a bound socket until a signal, and then let its requests come to an end.

    Args:
      web: as `create_app` makes it.
      listener: the socket.
      say: called with the line that names the URL, and with what the end waits for.
      drain_timeout: seconds that requests have after the signal; a second one ends them at once.
    """
    import uvicorn

    from .client import READY

    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    drain = web.state.drain

    class Server(uvicorn.Server):
        stops_at: float | None = None  # once it drains

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                say(READY + url)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if drain.begun:
                super().handle_exit(sig, frame)
                self.force_exit, self.config.timeout_graceful_shutdown = True, 0
                # What is cut off now is no fault.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            drain.begin()

        async def on_tick(self, counter: int) -> bool:
            stops = await super().on_tick(counter)
            if stops or not drain.begun:
                return stops
            if self.stops_at is None:
                self.stops_at = time.monotonic() + drain_timeout
                if drain.open:
                    say(f"draining: {_requests(drain.open)}, up to {drain_timeout:g} s")
            if drain.open and time.monotonic() < self.stops_at:
                return False
            if drain.open:
                say(f"ending what is left: {_requests(drain.open)}")
            await drain.end()
            return True

    # What has been ended is still sent, but not to a client that does not read.
    config = uvicorn.Config(web, log_level="warning", timeout_graceful_shutdown=LAST_WORDS_SECONDS)
    Server(config).run([listener])


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are told so until the model is ready."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        fail(f"--host {host!r}: {error.strerror}. Give an address of this machine.")
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        fail(
            f"--host {host} --port {port}: {error.strerror}. "
            "Give an address of this machine and a free port (0 takes one)."
        )
    return listener


@contextlib.contextmanager
def _step(console: Console, doing: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar while the step runs, then say how long it took.

    Yields what to call as it goes on: with what was done, how many are done, and of how many.
    """
    start = time.perf_counter()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(doing, total=None)

        def tell(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"{doing}: {what}", completed=done, total=total)

        yield tell
    console.print(f"{doing}: {time.perf_counter() - start:.1f} s")


def _restored(
    sharing: "Sharing", directory: str, interval: float, model: "LoadedModel", console: Console
) -> "PoolKeeper":
    """What writes the Anchor Pool to a directory, begun with what is there."""
    from kvfunc.checkpoint import Checkpoints

    from .poolkeeper import PoolKeeper

    features = {"projection": sharing.settings.projection}
    try:
        checkpoints = Checkpoints(directory, {**model.fingerprint, **features})
        keeper = PoolKeeper(sharing, checkpoints, interval)
        readers = keeper.restore()
    except (ValueError, OSError, ImportError) as error:
        fail(f"--anchor-pool {directory!r}: {error}")
    console.print(f"Anchor Pool in {keeper.where}: {readers} readers known")
    return keeper


def _keep_compilations(jax: ModuleType) -> None:
    """Let later starts find what this one compiles, unless the environment says where already."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "kvfunc"))



if __name__ == "__main__":
    main()
