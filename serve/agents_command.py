"""The command `kvfunc agents`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import topologies
from .commandline import ClientKey, Model, Url, client_key, fail, server

TopologyName = StrEnum("TopologyName", topologies.NAMES)


def agents(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="TASKS.jsonl",
            help="Tasks, one JSON object a line, as GSM8K (question, answer) or HumanEval "
            "(prompt, entry_point) has them.",
        ),
    ],
    roles: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE.yaml",
            help="Who the agents are: a list of name, prompt and, if wanted, reads, the sentence "
            "before the answers of others; or such a list for each of gsm8k and humaneval.",
        ),
    ],
    model: Model = None,
    url: Url = None,
    api_key: ClientKey = None,
    topology: Annotated[
        TopologyName,
        typer.Option(
            help="Who reads whom. full: all before; chain: the one before; star: the last reads "
            "all others; debate: everyone reads the round before; layered: the layer before; "
            "mesh: neighbours on a grid; random: by --seed.",
        ),
    ] = TopologyName.full,
    count: Annotated[int, typer.Option("--agents", min=2, max=16, help="How many agents.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of a debate.")] = 2,
    width: Annotated[int, typer.Option(min=1, help="Agents in a layer of layered.")] = 2,
    tasks: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many.", show_default="all")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Send strings and no `cache` field: for servers that know none."
        ),
    ] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Ask that no KV is estimated, to compare with.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Make every answer that long.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the requests, and of topology random.")] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests at once, where none needs another's answer.")
    ] = 1,
    salt: Annotated[
        str | None,
        typer.Option(
            help="A namespace of the server's cache: a new one begins with nothing cached.",
            show_default="the common one",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The model to ask for.", show_default="the first"),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False,
            help="Folder for agents.jsonl (the log, which a later run goes on from), agents.json "
            "and agents.png.",
        ),
    ] = Path("out"),
) -> None:
    """Let agents solve tasks together, and measure how much KV is reused between them.

    Any server with OpenAI's API can be asked. Prompts consist of static text and shared contents:
    the task, and answers of other agents. Answers to GSM8K are judged by their number; code is
    only parsed, never run.
    """
    from . import agents as running
    from . import agents_report

    if plain and exact:
        fail("--plain and --exact: a plain request has no field for exact; give one of them.")
    mode = running.Mode.plain if plain else running.Mode.exact if exact else running.Mode.share
    console = Console(highlight=False, markup=False)
    try:
        shape = topologies.build(topology.value, count, rounds=rounds, width=width, seed=seed)
        wanted = running.read_tasks(file, tasks)
        who = running.read_roles(roles, wanted[0].kind)
        with (
            server(console, model, url) as at,
            running.AgentClient(at, api_key=client_key(api_key)) as client,
            agents_report.progress(console, shape, len(wanted)) as tick,
        ):
            settings = running.Settings(
                name or client.first_model(),
                mode,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                seed=seed,
                salt=salt,
                concurrency=concurrency,
            )
            records = running.run(
                client, shape, who, wanted, settings, log=out / "agents.jsonl", tick=tick
            )
    except ValueError as error:  # not the server's refusals: server() ends with those
        fail(str(error))
    figures = agents_report.summary(shape, settings, records)
    agents_report.show(shape, figures, console)
    agents_report.save(shape, figures, records, out, console)
