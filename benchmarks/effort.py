"""How long the benchmark takes: what is measured, how often, and how large."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Blocks:
    """Rounds of one contender: ``blocks`` times ``warmup`` untimed and ``timed`` timed ones, in turn with others."""

    blocks: int
    warmup: int
    timed: int


@dataclass(frozen=True)
class Effort:
    """One size of the whole benchmark.

    Attributes:
        name: for the report.
        images: training images of a client.
        tests: test images of a client.
        rounds: by number of clients, how rounds are timed.
        cells: clients and classes at which the influence step is timed.
        naive_seconds: time given to each level of the naive form in a cell; what is left is extrapolated.
        repeats: least number of times our form is timed in a cell.
        memory: by number of clients, after how many rounds peak memory is taken.
        scale_clients: clients of the scale check, a tenth of which takes part in a round.
        scale_marks: rounds after which memory is noted; the check ends with the last.
        scale_seconds: after this time the check ends early, and says so.
        many_classes: numbers of classes that are run once.
        command_rounds: rounds of a whole command.
        table_rows: rows of the table that a whole command reads.
    """

    name: str
    images: int
    tests: int
    rounds: dict[int, Blocks]
    cells: tuple[tuple[int, int], ...]
    naive_seconds: float
    repeats: int
    memory: dict[int, int]
    scale_clients: int
    scale_marks: tuple[int, ...]
    scale_seconds: float
    many_classes: tuple[int, ...]
    command_rounds: int = 20
    table_rows: int = 100_000


_GRID = tuple((clients, classes) for classes in (10, 100) for clients in (5, 20, 50, 200))

# A round of 50 clients is as much work as ten of 5, hence fewer of them; `full` spares nothing.
NORMAL = Effort(
    name="normal",
    images=743,
    tests=1000,
    rounds={5: Blocks(3, 2, 3), 50: Blocks(3, 1, 1)},
    cells=(*_GRID, (50, 1000)),
    naive_seconds=1.5,
    repeats=3,
    memory={5: 2, 50: 1},
    scale_clients=1000,
    scale_marks=(2, 6, 10),
    scale_seconds=180.0,
    many_classes=(100, 1000),
)
QUICK = Effort(
    name="quick",
    images=743,
    tests=1000,
    rounds={5: Blocks(2, 1, 1)},
    cells=((5, 10), (50, 10), (5, 100), (50, 100)),
    naive_seconds=0.3,
    repeats=2,
    memory={5: 1},
    scale_clients=100,
    scale_marks=(2, 4),
    scale_seconds=10.0,
    many_classes=(100,),
    table_rows=20_000,
)
FULL = replace(
    NORMAL,
    name="full",
    rounds={5: Blocks(5, 2, 5), 50: Blocks(3, 2, 3)},
    naive_seconds=9.0,
    repeats=7,
    memory={5: 3, 50: 2},
    scale_seconds=600.0,
)
