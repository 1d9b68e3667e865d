"""The cost of runs: traffic of a client, and time."""

from __future__ import annotations

from collections.abc import Sequence

from fedc2i.report.comparison import reconstructions
from fedc2i.report.table import Row, Table, counted, size
from fedc2i.runs.results import Result


def cost_table(results: Sequence[Result]) -> Table:
    """Bytes of one client and seconds of a round and of the whole run, for each run."""
    spans = [f"{way} {span}" for span in ("a round", "in all") for way in ("up", "down", "seconds")]
    table = Table("Traffic of one client, and time", ("Method", "Length", *spans))
    for result in results:
        rounds = max(report.round for report in result.rounds)
        up, down, seconds = result.bytes_up, result.bytes_down, result.seconds
        once = size(up), size(down), f"{seconds / len(result.rounds):.2f}"
        in_all = size(up * rounds), size(down * rounds), f"{seconds:.1f}"
        table.rows.append(Row((result.label, counted(rounds, "round"), *once, *in_all)))
    table.notes = [
        "Bytes of the tensors that one client sends and receives, on average over rounds; in all: if it takes part in "
        "every round. Seconds: local training of all clients, exchange and evaluation, on the machine of the run; "
        "seeds are computed side by side, a round's seconds are the share of one seed.",
        *reconstructions(results),
    ]
    return table
