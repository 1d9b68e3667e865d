"""``hapt``: thirty people, each a client, and six activities seen by the sensors of a phone at the waist.

Windows of 128 samples (50 Hz) of three axes of acceleration and of rotation, cut from the raw signals of HAPT
(Reyes-Ortiz et al. 2015). They are split in time order within each activity, because neighbouring windows overlap.
"""

from __future__ import annotations

from dataclasses import replace

from fedc2i.core.errors import UserError
from fedc2i.data import catalog, npz, signals
from fedc2i.data.federation import DataOptions, Federation

ACTIVITIES = ("walking", "upstairs", "downstairs", "sitting", "standing", "lying")
PRESET = {"model": "cnn1d", "rounds": 20}


def load(argument: str, options: DataOptions) -> Federation:
    """All thirty people, or those in a comma list of numbers such as ``1,2,3``.

    Raises:
        UserError: if the data is missing or damaged, or there is no such person.
    """
    (path,) = catalog.files("hapt", options.data_dir)
    with npz.opened(path) as archive:
        found = archive.read(("x", "y", "user"))
    people = {str(number): found["user"] == number for number in sorted({*found["user"].tolist()})}
    chosen = [name.strip() for name in argument.split(",")] if argument else list(people)
    for name in chosen:
        if name not in people:
            raise UserError(f"hapt: no person '{name}', allowed are 1 to {len(people)}")
    clients = {f"Person {name}": (found["x"][people[name]], found["y"][people[name]]) for name in chosen}
    name = f"hapt:{argument}" if argument else "hapt"
    return replace(signals.build(name, clients, ACTIVITIES, options), preset=PRESET)
