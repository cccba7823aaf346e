"""What the commands of `kvfunc` have in common: the model, the server that is asked, refusals."""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

MODEL_HELP = (
    "A GGUF file, or a folder with Hugging Face's config.json and *.safetensors. "
    "Left out: SmolLM2-135M-Instruct, which comes with kvfunc."
)
Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP)]
Url = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="A running server, such as http://127.0.0.1:8000. Left out: one is started for "
        "MODEL on a free port, and ended with this command.",
    ),
]
ClientKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", envvar="KVFUNC_API_KEY", help="The server's key; of several, the first."
    ),
]


class Dtype(StrEnum):
    """Number formats of weights and KV."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Quantization(StrEnum):
    """Number formats of quantised matrices."""

    int8 = "int8"


class KvDtype(StrEnum):
    """Number formats of KV alone; the last two have a scale for each token and head."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    int8 = "int8"
    fp8 = "fp8"

    @property
    def stored(self) -> str:
        """As JAX calls it."""
        return "float8_e4m3fn" if self is KvDtype.fp8 else self.value


def read_keys(given: list[str]) -> list[str]:
    """The keys of all options, each of which may have several with commas between."""
    keys = [key.strip() for value in given for key in value.split(",")]
    if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
        fail("--api-key (or KVFUNC_API_KEY): a key is empty or has characters that no header "
             "takes. Give printable ASCII without spaces and commas.")
    return keys


def client_key(given: str | None) -> str | None:
    """The key to send, of those given the first."""
    return read_keys([given])[0] if given else None


def check_model(model: str | None) -> None:
    """Refuse a model file that is not there."""
    if model is not None and not Path(model).exists():
        fail(
            f"MODEL {model!r}: there is no such file or folder. Give a GGUF file or a folder with "
            "config.json and *.safetensors, or leave MODEL out for the embedded model."
        )


@contextlib.contextmanager
def server(console: Console, model: str | None, url: str | None) -> Iterator[str]:
    """The URL of the server to talk to, started here if none is given; its faults end all."""
    from .client import Refused, ServerBroke, serve_command, started_server

    if model is not None and url is not None:
        fail(f"MODEL {model!r} and --url {url!r}: the server has its model; give one of them.")
    check_model(model)
    try:
        if url is not None:
            yield url
            return
        with contextlib.ExitStack() as stack:
            with console.status(f"Starting a server with {model or 'the embedded model'} …"):
                at = stack.enter_context(started_server(serve_command(model)))
            yield at
    except (ServerBroke, Refused) as error:
        fail(str(error), code=1)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with one sentence."""
    typer.echo(f"kvfunc: {message}", err=True)
    raise typer.Exit(code)
