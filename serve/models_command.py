"""The command `kvfunc models`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .commandline import Dtype, KvDtype, Quantization, fail


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A GGUF file, or a folder with Hugging Face's config.json and *.safetensors: can "
            "it be run, why not, and how much memory does it take? Left out: what can be run.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a context.", show_default="the model's own"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many contexts at once.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.bfloat16,
    quantization: Annotated[
        Quantization | None, typer.Option(help="Number format of the matrices.")
    ] = None,
    kv_dtype: Annotated[
        KvDtype | None, typer.Option(help="Number format of KV.", show_default="that of --dtype")
    ] = None,
) -> None:
    """Say which models can be run, or whether one can, and in how much memory."""
    console = Console()
    if model is None:
        _list(console)
        return
    from kvfunc.models.load import inspect
    from kvfunc.models.params import size
    from kvfunc.storage import KV

    try:
        config = inspect(model)
    except (ValueError, OSError) as error:
        fail(f"MODEL {model!r} cannot be run: {error}")
    stored = KvDtype(dtype.value) if kv_dtype is None else kv_dtype
    per_token = KV.zeros(config.layers, 1, config.kv_heads, config.head_dim,
                         stored.stored).bytes_per_token
    tokens = batch * (context or config.context_length)
    weights = size(config, dtype.value, quantization and quantization.value)
    console.print(f"{model} can be run: {config.layers} layers of width {config.width:,}, "
                  f"{config.heads} heads, {config.kv_heads} KV heads of {config.head_dim}, "
                  f"vocabulary {config.vocab_size:,}, context {config.context_length:,}",
                  highlight=False, soft_wrap=True)
    table = Table("memory", "as", "GB", box=None)
    table.columns[2].justify = "right"
    table.add_row("weights", (quantization or dtype).value, _gigabytes(weights))
    table.add_row(f"KV of {tokens:,} tokens, {per_token:,} bytes each", stored.value,
                  _gigabytes(tokens * per_token))
    table.add_row("together", "", _gigabytes(weights + tokens * per_token))
    console.print(table)
    if context is not None and context > config.context_length:
        console.print(f"--context {context:,} is more than the model's {config.context_length:,}: "
                      "later positions are refused, unless a reposition lowers them",
                      highlight=False, soft_wrap=True)


def _list(console: Console) -> None:
    from kvfunc.models.config_hf import FAMILIES

    table = Table("models", "model_type", box=None)
    for kind, family in FAMILIES.items():
        table.add_row(family.models, kind)
    console.print(table)
    console.print("as folders with config.json and *.safetensors, and as GGUF files",
                  highlight=False)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f}"
