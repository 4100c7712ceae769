"""``s3capture demo``: play a workload through real processes and a real bucket, and verify what is there.

The rule of this module: the result goes to stdout, whatever is said on the way goes to stderr, and the exit status
says which it was: 0 everything as it must be, 1 something differs or a worker was lost, 2 it could not be played.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from s3capture.cli.common import EXIT_BAD_DATA, EXIT_UNUSABLE, EndpointUrl, Region, out_json, say
from s3capture.demo.workload import DEFAULT_SEED


def demo(
    recording: Annotated[
        Path | None,
        typer.Argument(
            metavar="RECORDING",
            help="Play this recording (.jsonl, .jsonl.gz or .jsonl.zst) in place of the built-in workload.",
            show_default=False,
        ),
    ] = None,
    *,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Play on this bucket, s3://bucket/prefix. Without it: an embedded server, removed at the end.",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN", help="Play as this run, which must hold nothing yet. Without it: a new one."
        ),
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes that share the calls.")] = 4,
    seed: Annotated[int, typer.Option(help="Makes the built-in workload, and decides who plays what.")] = DEFAULT_SEED,
    rollouts: Annotated[
        int | None,
        typer.Option(
            min=8, help="Cut the built-in workload to so many rollouts; those with trouble stay. Not with RECORDING."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Drop nothing: leave every record in the bucket.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the table.")] = False,
) -> None:
    """Play agent rollouts and verify what comes back.

    Several worker processes play calls with tools, branches and failures; every record is read back and compared. Exit
    status 1 when anything differs from what must come of it.
    """
    from s3capture.cli.demo_view import Terminal, print_outcome  # noqa: PLC0415 - --help need not wait for boto3
    from s3capture.demo.crew import WorkerError  # noqa: PLC0415
    from s3capture.demo.recording import RecordingError  # noqa: PLC0415
    from s3capture.demo.report import to_json  # noqa: PLC0415
    from s3capture.demo.run import Options, Stopped, run_demo  # noqa: PLC0415

    if url is None and endpoint_url == os.environ.get("S3CAPTURE_ENDPOINT_URL"):
        endpoint_url = None  # not typed, and the embedded server has an address of its own
    options = Options(recording, url, run, endpoint_url, region, workers, seed, rollouts, keep)
    try:
        with Terminal() as terminal:
            outcome = run_demo(options, terminal)
    except Stopped as stopped:
        say(f"stopped by {stopped}; the workers and whatever else was started are gone")
        raise typer.Exit(128 + stopped.number) from None
    except RecordingError as error:
        # The faults of a recording are a list, one on each line, as compilers write them.
        first, *faults = str(error).splitlines()
        say(first)
        for fault in faults:
            typer.echo(fault, err=True)
        raise typer.Exit(EXIT_UNUSABLE) from None
    except WorkerError as error:
        say(f"the demo was broken off: {error}")
        raise typer.Exit(EXIT_BAD_DATA) from None
    if as_json:
        out_json(to_json(outcome))
    else:
        print_outcome(outcome)
    if not outcome.ok:
        say(f"{len(outcome.differences):,} things differ from what must come of this workload")
        raise typer.Exit(EXIT_BAD_DATA)
