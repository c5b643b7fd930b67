"""`holdfast view`: the page of `holdfast report`, served to this machine's browser, which may ask for more of each tensor."""

from __future__ import annotations

import argparse

from holdfast.cli import values
from holdfast.extras.reports.commands.report import add_report_arguments, report_request_of

DESCRIPTION = """\
Start a local web server that shows the report of a checkpoint, and open it in a browser. Unlike the
file that 'holdfast report' writes, the page can load the histogram or image of any tensor on
demand. The server listens on 127.0.0.1 only, and the address contains a secret token. Press
Ctrl-C to stop the server."""

EXAMPLES = """\
examples:
  holdfast view model.safetensors

  # Compare two checkpoints.
  holdfast view base.safetensors tuned.safetensors

  # Print the address instead of opening a browser.
  holdfast view model.pt --no-browser --port 8080
"""


def add_arguments(verb: argparse.ArgumentParser) -> None:
    add_report_arguments(verb)
    verb.add_argument(
        "--port",
        metavar="N",
        type=_port,
        default=0,
        help="port to listen on (default: any free port)",
    )
    verb.add_argument(
        "--no-browser", action="store_true", help="print the address, and do not open a browser"
    )
    verb.add_argument("-q", "--quiet", action="store_true", help=values.QUIET_HELP)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def run(options: argparse.Namespace) -> int:
    import webbrowser

    from holdfast.cli.progress import bar
    from holdfast.cli.text import print_lines
    from holdfast.core.group import ALONE
    from holdfast.extras.reports.live import Live
    from holdfast.extras.reports.report import prepared

    with prepared(options.path, options.other, report_request_of(options, ALONE)) as ready:
        with bar("Reading", ready.nbytes, quiet=options.quiet or not ready.nbytes) as progress:
            made = ready.make(progress)
        live = Live(made.document, made.tensors, counterparts=made.counterparts, port=options.port)
        try:
            print_lines([[("serving ", "clean"), (live.url, "title"), ("  Ctrl-C ends it", "dim")]])
            if not options.no_browser:
                webbrowser.open(live.url)
            live.serve()
        except KeyboardInterrupt:
            print_lines([[("ended", "dim")]])
        finally:
            live.close()
    return 0
