"""The command line: words to one Config, errors to a sentence and an exit code. Knows nothing of how serving works.

Commands other than launch import what they need themselves: a server would wait for it.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from minserve import __version__, flags, launch
from minserve.config import Config, local_model, model_directory
from minserve.errors import ExitCode, ServerError, UsageError
from minserve.roofline import GPUS

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
benches = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(benches, name="bench")
log = logging.getLogger("minserve.cli")

BaseUrl = Annotated[str, typer.Option(help="address of any OpenAI-style server")]
ServedModel = Annotated[str | None, typer.Option(help="default: the first that the server lists")]
ApiKey = Annotated[str | None, typer.Option(help="key that the server asks for", envvar="MINSERVE_API_KEY")]
Words = Annotated[list[str] | None, typer.Argument()]
HERE = "http://127.0.0.1:8000"

_FLAGS_ARE_READ_BY_US = {"ignore_unknown_options": True, "help_option_names": []}
"""For typer: hand every word over as it is; flags.py knows the aliases and the nearest match."""
LaunchFlags = Annotated[list[str] | None, typer.Argument(metavar="MODEL | FLAG OF LAUNCH", show_default=False)]
_LAUNCH_FLAGS = {"ignore_unknown_options": True}
_EITHER_DASH = {"token_normalize_func": lambda word: word.replace("_", "-")}


@app.command("launch", context_settings=_FLAGS_ARE_READ_BY_US, add_help_option=False)
def launch_command(arguments: Words = None) -> None:
    """Serve a checkpoint over HTTP (launch --help lists the flags)."""
    words = arguments or []
    if "--help" in words or "-h" in words:
        typer.echo(flags.usage())
        return
    resolved = flags.resolve(words, os.environ)
    level = resolved.config.log_level.upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logging.raiseExceptions = False  # a reader of our stderr that went away (`| head`) must not end the server
    for warning in resolved.warnings:
        log.warning("%s", warning)
    log.info("minserve %s with these settings:\n%s", __version__, flags.table(resolved))
    raise typer.Exit(launch.run(resolved.config))


@evaluations.command(context_settings=_EITHER_DASH)
def arithmetic(
    base_url: BaseUrl = HERE,
    concurrency: Annotated[int, typer.Option(help="questions at once in the second pass; the first asks one at a time")] = 16,
    limit: Annotated[int | None, typer.Option(help="ask the first N questions only")] = None,
    model: ServedModel = None,
    api_key: ApiKey = None,
) -> None:
    """Exact-match accuracy and log-probability drift of the embedded model; the last line is `accuracy 0.987`."""
    import asyncio

    from minserve.clients.eval import run_arithmetic

    raise typer.Exit(asyncio.run(run_arithmetic(base_url, concurrency, limit, model, api_key)))


@benches.command(context_settings=_FLAGS_ARE_READ_BY_US, add_help_option=False)
def step(arguments: Words = None) -> None:
    """Time of one decode step at fixed batch and context, random weights (bench step --help lists the flags)."""
    raise typer.Exit(launch.run_module("minserve.runtime.bench_step", arguments or []))


@app.command(context_settings=_FLAGS_ARE_READ_BY_US, add_help_option=False)
def tune(arguments: Words = None) -> None:
    """Measure which kernels are fastest for a model's experts on this GPU, and keep that for later starts (tune --help)."""
    raise typer.Exit(launch.run_module("minserve.kernels.tune", arguments or []))


@app.command(context_settings=_LAUNCH_FLAGS)
def plan(
    arguments: LaunchFlags = None,
    gpu: Annotated[str, typer.Option(help=f"one of: {', '.join(GPUS)}")] = "h200",
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of the table")] = False,
    plot: Annotated[Path | None, typer.Option(help="also draw each rank's memory to this file")] = None,
) -> None:
    """Say whether a model fits, before any GPU is rented: memory of each rank, KV tokens, floors; exit code 5 if it does not.

    MODEL is a directory with a config.json, that file, or a Hub name; no weights are needed. Of launch's flags these count:
    --ep-size, --redundant-experts, --max-model-len, --max-num-seqs, --chunked-prefill-size, --page-size and
    --gpu-memory-utilization.
    """
    from minserve import plan_picture
    from minserve.plan import describe, make_plan, read_config, to_json

    if gpu not in GPUS:
        raise UsageError(f"--gpu {gpu} is not known; known: {', '.join(GPUS)}")
    settings = flags.resolve(arguments or [], os.environ).config
    config, notes = read_config(local_model(settings.model, weights=False))
    made = make_plan(config, settings, notes, GPUS[gpu])
    typer.echo(to_json(made) if json else describe(made))
    if plot is not None:
        plan_picture.draw(made, plot)
    raise typer.Exit(ExitCode.OK if made.fits else ExitCode.MEMORY)


@app.command(context_settings=_EITHER_DASH)
def check(
    model: Annotated[str, typer.Argument(help="checkpoint directory or Hub name")],
    manifest: Annotated[Path | None, typer.Option(help="compare every tensor's checksum with this file")] = None,
    write_manifest: Annotated[Path | None, typer.Option(help="write every tensor's checksum to this file")] = None,
) -> None:
    """Prove a checkpoint whole without loading it: files, index, names and shapes, checksums; exit code 4 on any gap."""
    words = [str(model_directory(Config(model=model)))]
    for flag, path in (("--manifest", manifest), ("--write-manifest", write_manifest)):
        words += [] if path is None else [flag, str(path)]
    raise typer.Exit(launch.run_module("minserve.models.check", words))


@benches.command("serve", context_settings=_EITHER_DASH)
def bench_serve(
    base_url: BaseUrl = HERE,
    num_prompts: Annotated[int, typer.Option(help="requests in all", min=1)] = 200,
    concurrency: Annotated[int | None, typer.Option(help="requests under way at once, at most", min=1)] = None,
    rate: Annotated[float | None, typer.Option(help="requests a second, at random distances; default: all at once")] = None,
    input_len: Annotated[int, typer.Option(help="random tokens of each prompt", min=1)] = 1024,
    output_len: Annotated[int, typer.Option(help="tokens of each answer", min=1)] = 128,
    prompts: Annotated[Path | None, typer.Option(help="file of prompts: a line is text, or JSON with prompt or messages")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="random ids are below this; default: the server's", min=2)] = None,
    temperature: Annotated[float, typer.Option(help="of every request")] = 0.0,
    seed: Annotated[int, typer.Option(help="of prompts and distances")] = 0,
    model: ServedModel = None,
    api_key: ApiKey = None,
    plot: Annotated[Path | None, typer.Option(help="also draw to this file")] = None,
) -> None:
    """Load on a running server: times to first token and between tokens, throughput; the last line is JSON."""
    import asyncio

    from minserve.clients.bench_serve import Load, run

    load = Load(num_prompts, concurrency, rate, input_len, output_len, prompts, vocab_size, temperature, seed)
    raise typer.Exit(asyncio.run(run(base_url, load, model, api_key, plot)))


@app.command(context_settings=_EITHER_DASH)
def chat(
    base_url: BaseUrl = HERE,
    model: ServedModel = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option(help="first message of the conversation")] = None,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="of each answer", min=1)] = 1024,
) -> None:
    """Talk to a running server; through a pipe, each line is a turn."""
    from minserve.clients.chat import Chat

    one = Chat(base_url, model, api_key, system, temperature=temperature, max_tokens=max_tokens)
    raise typer.Exit(one.run(sys.stdin, sys.stdout))


@app.command("doctor", context_settings=_LAUNCH_FLAGS)
def doctor_command(
    arguments: LaunchFlags = None, json: Annotated[bool, typer.Option("--json", help="print JSON instead of the table")] = False
) -> None:
    """Say what on this machine would stop `minserve launch` with these flags, before any weight is read; exit code 3."""
    from minserve import doctor

    config = flags.resolve(arguments or [], os.environ).config
    sound = doctor.report(doctor.examine(config), as_json=json, write=typer.echo)
    raise typer.Exit(ExitCode.OK if sound else ExitCode.ENVIRONMENT)


@app.command("prebuild", context_settings=_EITHER_DASH)
def prebuild_command(
    models: Annotated[list[str] | None, typer.Argument(help="with a GPU: start each once with random weights")] = None,
    arch: Annotated[str, typer.Option(help="GPU architectures of FlashInfer's modules, comma-separated")] = "9.0a",
    ep_size: Annotated[int, typer.Option(help="ranks of those starts", min=1)] = 1,
) -> None:
    """Compile kernels ahead of the first start: FlashInfer's modules (no GPU needed), and what each MODEL needs."""
    from minserve import prebuild

    raise typer.Exit(prebuild.run(models or [], arch, ["--ep-size", str(ep_size)]))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"minserve {__version__}")


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
