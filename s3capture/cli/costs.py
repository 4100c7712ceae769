"""``s3capture costs``: what a run costs on S3, step by step and kept in each way.

The rule of this module: it asks no bucket and sends nothing; every figure comes from ``run_costs`` and from the
prices given, which are printed with the result, since a sum without its prices is worth nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from s3capture.cli.common import AsJson, out, out_json, say, size

if TYPE_CHECKING:
    from s3capture.costs import StorageClass
    from s3capture.run_costs import Estimate

_MB = 10**6


def costs(
    *,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts of the run.")] = 5000,
    calls_per_rollout: Annotated[int, typer.Option(min=1, help="Model calls of each rollout.")] = 20,
    bytes_per_call: Annotated[
        int, typer.Option(min=1, help="Bytes of a record as stored, compressed: 's3capture ls' shows sums of them.")
    ] = 20_000,
    cold_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Part of the resolves whose parent is not in memory.")
    ] = 0.0,
    pack_size: Annotated[int, typer.Option(min=1, metavar="MB", help="Megabytes of an archive's packs.")] = 64,
    price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=DOLLARS",
            help="A price of yours: CLASS=... for a GB and month; CLASS.put_1000, CLASS.get_1000 and "
            "CLASS.retrieval_gb for requests and reading. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Work out what a run costs on S3.

    Asks no bucket. Prices are examples (AWS, us-east-1), each replaced by --price; data transfer, KMS and the requests
    of a ledger are not in it. Requests are those of a run without faults.
    """
    from s3capture.costs import CLASSES, prices, storage_class  # noqa: PLC0415 - --help answers at once
    from s3capture.run_costs import Scenario, estimate  # noqa: PLC0415

    overrides = prices(price or ())
    run = Scenario(rollouts, calls_per_rollout, bytes_per_call, cold_share, pack_size * _MB)
    found = estimate(run, overrides)
    classes = [storage_class(name, overrides) for name in CLASSES]
    if as_json:
        out_json({"run": run, "prices": classes, "estimate": found})
        return
    _print_prices(classes)
    _print_requests(found)
    _print_storage(found)
    if not overrides:
        say("these prices are examples; give yours with --price")


def _print_prices(classes: list[StorageClass]) -> None:
    out("PRICES, dollars       GB, MONTH  1,000 PUT  1,000 GET  GB READ  LEAST SIZE  LEAST TIME")
    for one in classes:
        least = f"{one.minimum_bytes // 1024} KB" if one.minimum_bytes else "-"
        if one.overhead_bytes or one.standard_overhead_bytes:
            least = f"+{one.overhead_bytes // 1024}+{one.standard_overhead_bytes // 1024} KB"
        days = f"{one.minimum_days} days" if one.minimum_days else "-"
        out(
            f"{one.name:<20} {one.gb_month:>10.5g} {one.put_1000:>10.5g} {one.get_1000:>10.5g} "
            f"{one.retrieval_gb:>8.5g}  {least:>10}  {days:>10}"
        )


def _print_requests(found: Estimate) -> None:
    out("")
    out("REQUESTS OF THE RUN       TIMES        PUT        GET       LIST    DOLLARS")
    for row in found.requests:
        if row.times:
            out(f"{row.step:<20} {row.times:>10,} {row.put:>10,} {row.get:>10,} {row.list:>10,} {_money(row.dollars)}")
    out(f"{'in all':<20} {'':>10} {'':>10} {'':>10} {'':>10} {_money(found.total_dollars)}")


def _print_storage(found: Estimate) -> None:
    out("")
    out("KEPT AS        CLASS             OBJECTS   STORED   BILLED  A MONTH     ONCE  TO READ")
    for row in found.storage:
        out(
            f"{row.kept_as:<14} {row.storage_class:<14} {row.objects:>10,} {size(row.bytes):>8} "
            f"{size(row.billed_bytes):>8} {_money(row.monthly_dollars, 8)} {_money(row.once_dollars, 8)} "
            f"{_money(row.read_dollars, 8)}{' *' if row.restore else ''}"
        )
    out("A MONTH, ONCE (to get there) and TO READ (all of it, once) are dollars; * must be restored before it is read")


def _money(dollars: float, width: int = 10) -> str:
    return f"{dollars:>{width},.2f}" if dollars >= 100 else f"{dollars:>{width}.4f}"
