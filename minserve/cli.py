"""The command line: words to one Config, errors to a sentence and an exit code. Knows nothing of how serving works."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Annotated

import typer

from minserve import __version__, flags, launch
from minserve.clients.eval import run_arithmetic
from minserve.errors import ExitCode, ServerError

app = typer.Typer(
    name="minserve",
    help="A minimal server for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
evaluations = typer.Typer(help="Measure a running server through HTTP.", no_args_is_help=True)
app.add_typer(evaluations, name="eval")
log = logging.getLogger("minserve.cli")

_FLAGS_ARE_READ_BY_US = {"ignore_unknown_options": True, "help_option_names": []}
"""For typer: hand every word over as it is; flags.py knows the aliases and the nearest match."""


def _with_dashes(word: str) -> str:
    return word.replace("_", "-")


@app.command("launch", context_settings=_FLAGS_ARE_READ_BY_US, add_help_option=False)
def launch_command(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Serve a checkpoint over HTTP (launch --help lists the flags)."""
    words = arguments or []
    if "--help" in words or "-h" in words:
        typer.echo(flags.usage())
        return
    resolved = flags.resolve(words, os.environ)
    _log_to_stderr(resolved.config.log_level)
    for warning in resolved.warnings:
        log.warning("%s", warning)
    log.info("minserve %s with these settings:\n%s", __version__, flags.table(resolved))
    raise typer.Exit(launch.run(resolved.config))


@evaluations.command(context_settings={"token_normalize_func": _with_dashes})
def arithmetic(
    base_url: Annotated[str, typer.Option(help="address of the server")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option(help="questions at once in the second pass; the first asks one at a time")] = 16,
    limit: Annotated[int | None, typer.Option(help="ask the first N questions only")] = None,
    model: Annotated[str | None, typer.Option(help="default: the first that the server lists")] = None,
    api_key: Annotated[str | None, typer.Option(help="key that the server asks for", envvar="MINSERVE_API_KEY")] = None,
) -> None:
    """Exact-match accuracy and log-probability drift of the embedded model; the last line is `accuracy 0.987`."""
    raise typer.Exit(asyncio.run(run_arithmetic(base_url, concurrency, limit, model, api_key)))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"minserve {__version__}")


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.raiseExceptions = False  # a reader of our stderr that went away (`| head`) must not end the server


def main() -> None:
    """The `minserve` script. A ServerError becomes its sentence and its exit code, never a traceback."""
    try:
        app()
    except ServerError as error:
        if sys.stderr is not None:
            sys.stderr.write(f"minserve: error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
