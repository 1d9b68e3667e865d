"""``fedc2i robustness``: every method against dishonest and broken clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedc2i.core.files import to_json
from fedc2i.report import study_robustness as study
from fedc2i.report import study_robustness_tables as tables
from fedc2i.report.progress import ProgressView
from fedc2i.report.study_robustness_verdict import Attacked, verdict
from fedc2i.runs.cache import Store

SEEDS_NOTE = "Seeds change initial models and batches, not the data or a named attacker."


def robustness(
    data: Annotated[str, typer.Option(help="One or more, with commas: embedded, digit5, office10, ...")] = "embedded",
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies; or the variable FEDC2I_DATA.")] = None,
    seeds: Annotated[str, typer.Option(help="For example 0,1,2 or 0-9.")] = "0,1,2",
    methods: Annotated[str, typer.Option(help="With commas, or with semicolons where options have commas.")] = ",".join(
        study.METHODS
    ),
    attacks: Annotated[str, typer.Option(help="With commas, KIND or KIND:STRENGTH; none is always run.")] = ",".join(
        study.ATTACKS
    ),
    attackers: Annotated[
        str | None, typer.Option(help="Clients, a number or a share such as 20%; by default the second client.")
    ] = None,
    rounds: Annotated[
        str | None, typer.Option(help="A trial with other rounds than the protocol's, in a folder of its own.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The tables; the runs lie in runs/ below it.")] = Path("results"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
) -> None:
    """Methods against attackers: honest clients' accuracy under each attack, and the weight attackers are given.

    What is computed already is kept. Each list may be cut; the tables then show that part.
    """
    settings = {"data_dir": None if data_dir is None else str(data_dir), "rounds": rounds}
    chosen = {"seeds": seeds, "device": device} | {name: own for name, own in settings.items() if own is not None}
    work = study.Robustness(chosen, Store(out / "runs", models=False), data, methods, attacks, attackers)
    folder = out if rounds is None else out / f"trial-{rounds}-rounds"  # a trial must not replace real tables
    left = work.left()
    found = {}
    with ProgressView(Console(stderr=True), len(left)) as view:
        view.say(f"Writing to {folder}; {sum(len(plan.config.seeds) for plan in left)} runs to go")
        for name in work.data:
            rows = {}
            for attack in work.attacks:
                view.heading(f"{name}, attack {attack}")
                rows[attack] = work.compute(name, attack, view)
            found[name] = Attacked(rows, work.attackers[name])
    said = verdict(found, work.trial)
    notes = [SEEDS_NOTE, *work.notes]
    files = tables.write(folder, found, said, notes)
    if json:
        answer = {"targets": dict(said.targets), "verdict": list(said.sentences)}
        print(to_json({"folder": str(folder), "files": files, "attackers": work.attackers, **answer}), end="")
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file or a pipe has no width of its own
    for table in tables.shown(found, notes):
        console.print(table.to_rich(console.width))
    for line in (*said.sentences, "", *(str(folder / file) for file in files)):
        print(line)
