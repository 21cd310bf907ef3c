"""The `deepinfer` command: one file per subcommand, argument parsing only.

A subcommand's module is imported when it is called: `deepinfer --help` must not wait seconds for torch.
"""

import sys
from importlib import import_module
from typing import Annotated, NamedTuple

import typer


class Command(NamedTuple):
    module: str
    function: str
    help: str


COMMANDS = {
    "generate": Command("deepinfer.cli.generate", "generate", "Complete prompts offline, as one batch."),
    "chat": Command("deepinfer.cli.chat", "chat", "Talk with the model in the terminal."),
    "serve": Command("deepinfer.cli.serve", "serve", "Serve a model over HTTP."),
    "bench": Command("deepinfer.cli.bench", "bench", "Measure a server under load, or one rank of a deployment."),
    "keys": Command("deepinfer.cli.keys", "keys", "API keys of a server: add, list, revoke."),
    "inspect": Command("deepinfer.cli.inspect", "inspect", "What a checkpoint holds and what it needs."),
    "make-checkpoint": Command(
        "deepinfer.cli.make_checkpoint", "make_checkpoint", "Write a random checkpoint in the official layout."
    ),
    "doctor": Command("deepinfer.cli.doctor", "doctor", "What this machine can run, and why not."),
}


def build_app(wanted: str | None = None) -> typer.Typer:
    """The command line with `wanted` loaded; the other subcommands appear with their help line only."""
    app = typer.Typer(
        name="deepinfer",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Inference engine for DeepSeek-V4.1-Flash.",
    )

    @app.callback(invoke_without_command=True)
    def common(
        version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
    ) -> None:
        if version:
            from deepinfer import __version__

            typer.echo(__version__)
            raise typer.Exit

    for name, command in COMMANDS.items():
        if name == wanted:
            app.command(name, help=command.help)(getattr(import_module(command.module), command.function))
        else:
            app.command(name, help=command.help)(_not_loaded)
    return app


def _not_loaded() -> None:
    """Stands for a subcommand that was not asked for."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point. A foreseeable error is one line on stderr and exit code 2; --debug shows its traceback."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    given = [argument for argument in hyphenated(given) if argument != "--debug"]
    wanted = next((argument for argument in given if not argument.startswith("-")), None)
    try:
        build_app(wanted)(given)
    except (ValueError, OSError, RuntimeError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT


def hyphenated(arguments: list[str]) -> list[str]:
    """Option names with underscores (the vendor's spelling) turned into ours: --model_name=x -> --model-name=x."""
    out = []
    options_end = False
    for argument in arguments:
        options_end = options_end or argument == "--"
        name, equals, value = argument.partition("=")
        if name.startswith("--") and not options_end:
            argument = "--" + name[2:].replace("_", "-") + equals + value
        out.append(argument)
    return out
