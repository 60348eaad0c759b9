"""The command line of ``python -m compiled_autograd``: programs to run, and verbs."""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from pathlib import Path

import rich_click as click

from ..api import enable
from ..backends import UnknownBackendError
from ..errors import CompiledAutogradError, nearest
from ..settings import FORMER, FROM_ENVIRONMENT, allowed, switch
from ..shadow_cache.safe_text import harmless
from .launch import Run, environment, launch

_SECONDS = 240.0
"""The default limit of a comparison, in seconds from the first step."""
_COMPARE = (
    "Run some steps on eager, and say whether compiling saves time. The default of --on-miss is then 'background'."
)
_PROGRAM = "program"
_USAGE = 2
"""The exit status of a wrong option, as click and Python have it."""


class Programs(click.RichGroup):
    """A group of verbs. A first argument that is no verb, but a path, ``-`` or behind ``-m``, is a program to run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``-mMODULE`` too, as python does."""
        values = {name for param in self.params if not getattr(param, "is_flag", True) for name in param.opts}
        at = 0
        while at < len(args) and re.match("-[^m-]|--.", args[at]):
            at += 1 + (args[at] in values)
        if at < len(args) and (module := args[at].removeprefix("-m")) and module != args[at]:
            args[at : at + 1] = ["-m", module]
        lacks_program = bool(args) and args[at:] in ([], ["-m"])
        rest = super().parse_args(ctx, args)
        if lacks_program:
            ctx.fail("Please name a program: SCRIPT.py, or -m MODULE.")
        return rest

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb or the program, with its arguments."""
        name, given = args[0], _given(ctx)
        if not ctx.params["module"] and name in self.commands:
            if given:
                ctx.fail(f"{given[0]} is an option for programs, and {name!r} is a command of this one.")
            return super().resolve_command(ctx, args)
        if not (ctx.params["module"] or name == "-" or name.endswith(".py") or Path(name).exists()):
            verbs = sorted(self.commands)
            ctx.fail(f"{name!r} is neither a file nor a command.{nearest(name, verbs)} A module is run by -m {name}.")
        program = click.Command(
            _PROGRAM,
            callback=_run,
            params=[click.Argument(["args"], nargs=-1, type=click.UNPROCESSED)],
            context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
            add_help_option=False,
        )
        return _PROGRAM, program, args


def with_settings(group: click.RichGroup) -> click.RichGroup:
    """Add the options of the runner, one for each setting among them."""
    options = [
        click.option("-m", "module", is_flag=True, help="Run a module, like python: -m MODULE ARGS."),
        click.option("--compare", is_flag=True, help=_COMPARE),
        click.option("--seconds", type=float, help=f"Time limit of --compare (default {_SECONDS:.0f})."),
        click.option("--go-on", is_flag=True, help="With --compare, run the program to its end."),
        click.option("--report", metavar="FILE", help="At the end, write a report to FILE instead of a summary line."),
    ]
    options += [
        click.option(f"--{name.replace('_', '-')}", name, metavar="VALUE", help=_help(name))
        for name in FROM_ENVIRONMENT
    ]
    options += [click.option(f"--{name.replace('_', '-')}", name, hidden=True) for name in FORMER]
    for option in options:  # of a command that is there already, which has its options in this order
        group = option(group)
    return group


def _help(name: str) -> str:
    """Return the first sentence about a setting in the help of ``enable``, its valid values, and its default."""
    found = re.search(rf"^    {name}: (.+?\.)\s", inspect.getdoc(enable) or "", re.MULTILINE | re.DOTALL)
    text = re.sub(r":\w+:|`", "", " ".join(found[1].split())) if found else ""  # without docstrings under python -OO
    takes = f"Takes {allowed(name)}; default {inspect.signature(enable).parameters[name].default!r}."
    return f"{text[:1].upper()}{text[1:]} {takes}".lstrip()


def _given(ctx: click.Context) -> list[str]:
    """The runner's own options that were given."""
    return ["--" + name.replace("_", "-") for name, value in ctx.params.items() if value not in (None, False)]


@click.pass_context
def _run(ctx: click.Context, args: tuple[str, ...]) -> None:
    assert ctx.parent is not None
    asked = ctx.parent.params
    compare, seconds, report = asked["compare"], asked["seconds"], asked["report"]
    if not compare and (seconds is not None or asked["go_on"]):
        ctx.parent.fail("--seconds and --go-on are options of --compare.")
    if seconds is not None and not seconds > 0:
        ctx.parent.fail(f"--seconds {seconds:g} is not possible: it is the time limit, a number above 0.")
    if report and (os.path.isdir(report) or not os.path.isdir(Path(report).parent)):  # noqa: PTH112  is_dir may raise
        ctx.parent.fail(f"--report {report} is not possible: it is a file in a folder that exists, such as page.html.")
    if compare and os.environ.get("WORLD_SIZE", "1") != "1":
        ctx.parent.fail("--compare takes one process: ranks would not take their turns at the same steps.")
    texts = {name: asked[name] for name in (*FROM_ENVIRONMENT, *FORMER) if asked[name] is not None}
    if not sys.warnoptions:  # else they decide; Python's default shows such a warning only for a line of __main__
        warnings.filterwarnings("default", "compiled_autograd: ", DeprecationWarning)
    if compare and not os.environ.get("COMPILED_AUTOGRAD_ON_MISS"):  # empty: as if not set
        texts.setdefault("on_miss", "background")
    report = str(Path(report).absolute()) if report else ""
    run = Run(report, compare, min(seconds or _SECONDS, sys.float_info.max), asked["go_on"])  # JSON has no infinity
    try:
        if switch(os.environ) is False:
            if compare:
                ctx.parent.fail("COMPILED_AUTOGRAD=0 is set, and --compare would have nothing to compare.")
            off = "COMPILED_AUTOGRAD=0 is set: all backwards run on PyTorch's own engine"
            click.echo(f"compiled_autograd: {off}", err=True)
        launch((["-m"] if asked["module"] else []) + list(args), environment(texts), run)
    except (CompiledAutogradError, UnknownBackendError) as error:
        click.echo(harmless(str(error)), err=True)
        sys.exit(_USAGE)
