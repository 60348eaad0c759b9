"""The command line ``shadow-cache``: lists compiled entries, their hits and costs, and the reasons of misses.

Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
import rich_click

from ..errors import StoreError
from . import explain, keep, look, report, system
from .base import Fault, Verbs, View, with_format

VERBS = (
    *(look.ls, look.show, look.tree, look.stats),
    *(explain.why, explain.diff, explain.graph),
    report.report,
    *(keep.rm, keep.prune, keep.verify, keep.export, keep.import_),
    *(system.dir_, system.env, system.completion),
)


@rich_click.group(
    cls=Verbs,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "rich_help_config": {"text_paragraph_linebreaks": "\n\n", "style_helptext": ""},
    },
)
@with_format
@rich_click.version_option(package_name="compiled-autograd", message="%(version)s")
def cli(view: View) -> None:
    """Look into the cache of compiled backwards.

    Lists compiled entries, their hits and their cost, and explains misses. An id may be shortened as long as it is
    unique. Exit codes: 0 success, 1 nothing found or a problem found, 2 wrong usage.

    \b
    Examples:
      shadow-cache ls                    compiled entries
      shadow-cache why                   the reason of the last miss
      shadow-cache tree                  how the tapes differ
      shadow-cache report -o cache.html  everything in a browser
      shadow-cache ls --format json      for scripts
    """


for _verb in VERBS:
    cli.add_command(_verb)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit; ``args`` are by default the arguments of the process."""
    try:
        code = cli.main(args, prog_name="shadow-cache", standalone_mode=False)
    except click.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except StoreError as error:
        Fault(str(error)).show()
        sys.exit(Fault.exit_code)
    except OSError as error:
        Fault(f"{error.filename or 'input or output'}: {error.strerror or error}").show()
        sys.exit(Fault.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
