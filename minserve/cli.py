"""The command line: words to one Config, errors to a sentence and an exit code. Knows nothing of how serving works."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from minserve import __version__, flags, launch
from minserve.errors import ExitCode, ServerError

app = typer.Typer(
    name="minserve",
    help="A minimal server for Mixture-of-Experts language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
log = logging.getLogger("minserve.cli")

_FLAGS_ARE_READ_BY_US = {"ignore_unknown_options": True, "help_option_names": []}
"""For typer: hand every word over as it is; flags.py knows the aliases and the nearest match."""


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
