"""``python -m compiled_autograd SCRIPT.py`` and ``python -m compiled_autograd COMMAND``."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import rich_click as click

from compiled_autograd.errors import CompiledAutogradError, import_failed
from compiled_autograd.settings import resolve
from compiled_autograd.shadow_cache.safe_text import harmless

try:
    from compiled_autograd.backends import UnknownBackendError
    from compiled_autograd.runner.command import Programs, with_settings
    from compiled_autograd.selftest import NAMES, as_json, as_they_come, heading, is_fine, line, sentence
except (ImportError, AttributeError) as error:
    sys.exit(harmless(import_failed(error)))

_INTERRUPTED = 130
"""The exit status of a program ended by Ctrl-C, by the convention of shells."""


@with_settings
@click.group(cls=Programs, options_metavar="[OPTIONS]", subcommand_metavar="SCRIPT.py|COMMAND [ARGS]...")
def main(**options: Any) -> None:
    """Run a program as python does, with every backward in a session.

    The program is SCRIPT.py ARGS, or -m MODULE ARGS. A name from the list of commands runs that command instead.
    The options from --backend on are the settings of compiled_autograd.enable: its help says more.
    """


@main.command()
@click.option("--json", "in_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--only", multiple=True, metavar="PART", type=click.Choice(NAMES), help="Run only this part; may be repeated."
)
def selftest(in_json: bool, only: tuple[str, ...]) -> None:
    """Run some twenty small backwards, compiled and on eager, and compare the gradients.

    Exit codes: 0 no part failed (optional parts may be missing), 1 a part failed, 2 an environment variable or an
    argument is wrong.
    """
    found = []
    try:
        resolve({}).require_backend()
        say = (lambda text: None) if in_json else click.echo
        say(heading())
        with contextlib.closing(as_they_come(only or None)) as results:
            for result in results:
                found.append(result)
                say(harmless(line(result)))
    except (CompiledAutogradError, UnknownBackendError) as error:
        click.echo(harmless(str(error)), err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    click.echo(as_json(found) if in_json else sentence(found))
    sys.exit(0 if is_fine(found) else 1)


if __name__ == "__main__":
    main(prog_name="python -m compiled_autograd")
