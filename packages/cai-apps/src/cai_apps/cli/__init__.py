"""The command `cai`: finds a command's module, runs it, and shows errors as messages."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import cai_apps
from cai_apps import applications
from cai_apps.config.panics import is_panic
from cai_apps.config.terminal import printable_output
from cai_apps.run.exit_codes import FAILURE, USER_ERROR
from cai_apps.run.health import user_errors
from cai_apps.run.launch.agent import RankFailure
from cai_mesh.errors import ConfigError, did_you_mean

COMMANDS = {
    "train": "train a model from a recipe or a TOML file",
    "run": "start ranks on one or several machines with torch's launcher",
    "serve": "answer HTTP requests with a trained model, in OpenAI's form",
    "plan": "print what a run will need per rank",
    "doctor": "show what this machine offers",
    "verify": "check every file of a checkpoint",
    "report": "write one HTML file about a run",
    "recipes": "list the recipes",
}
"""The commands of every application, by name; those of one application are in its table entry."""


QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Environment of a command and its ranks: transformers and diffusers speak up only for errors."""


def main(arguments: list[str] | None = None) -> int:
    """Runs `cai <command> ...`; returns the exit code: 0, 1 for a failure, 2 for an error of the user."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    with printable_output():
        return _exit_code(arguments, debug=debug)


def _exit_code(arguments: list[str], *, debug: bool) -> int:
    """Run a command; show what it raises, unless that is to be seen whole."""
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read what is printed has gone, as in `cai recipes | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except RankFailure as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILURE
    except BaseException as error:
        if debug or not (isinstance(error, Exception) or is_panic(error)):
            raise
        user_errors.show(error, machine="--json" in arguments)
        return USER_ERROR if user_errors.user_error(error) else FAILURE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if arguments[0] == "--version":
        print(f"cai {cai_apps.__version__}")
        return 0
    command, *rest = arguments
    modules = modules_of_commands()
    if command not in modules:
        raise ConfigError(f"no command {command!r}", fix=did_you_mean(command, modules))
    return importlib.import_module(_choose(command, modules[command], rest)).run(rest)


def _choose(command: str, modules: dict[str, str], arguments: list[str]) -> str:
    """The module of the application whose run, or exported model, the command is given.

    Raises:
        ConfigError: a run of an application that does not have the command.
    """
    if command in COMMANDS:
        return modules[""]
    first = next((argument for argument in arguments if not argument.startswith("-")), "")
    directory = Path(first).expanduser() if first and "\0" not in first else None
    run = None if directory is None else applications.run_of(directory)
    if run is not None and (application := applications.of_directory(run)) not in modules:
        others = [name for name, by in applications.commands().items() if application in by]
        raise ConfigError(
            f"`cai {command}` is not for a run of {application}",
            got=str(run),
            expected=f"a run of {' or '.join(modules)}",
            cause=f"what it has trained is in {run / 'export'}" if (run / "export").is_dir() else "",
            fix=f"its commands are {', '.join(f'`cai {name}`' for name in [*others, 'report'])}",
        )
    application = applications.of_directory(run or directory) if directory else applications.DEFAULT
    return modules.get(application) or next(iter(modules.values()))


def modules_of_commands() -> dict[str, dict[str, str]]:
    """The modules of every command, by name: one, or one for each application that has it."""
    application_modules = {
        name: {of: module for of, (_, module) in by.items()} for name, by in applications.commands().items()
    }
    return {name: {"": f"cai_apps.cli.{name}"} for name in COMMANDS} | application_modules


def usage() -> str:
    """The text of `cai --help`."""
    application_commands = {
        name: "; ".join(dict.fromkeys(text for text, _ in by.values()))
        for name, by in applications.commands().items()
    }
    lines = [f"  {name:<10}{text}" for name, text in (COMMANDS | application_commands).items()]
    return "\n".join(
        [
            "usage: cai COMMAND [ARGUMENTS] [--debug]",
            "",
            *lines,
            "",
            "`cai COMMAND --help` explains a command; --debug shows the traceback of an error.",
        ]
    )
