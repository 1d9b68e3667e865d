"""``ham10000``: dermatoscopic images of four clinics, seven diagnoses (Tschandl, Rosendahl, Kittler 2018).

The images of a clinic lie in ``ham10000/<clinic>/<train|test>/<diagnosis>/``. Diagnoses are very unbalanced and not all
clinics have all of them, so balanced accuracy is the headline.
"""

from __future__ import annotations

from dataclasses import replace

from fedc2i.data import catalog, folder
from fedc2i.data.federation import DataOptions, Federation

PRESET = {"model": "lenet5", "rounds": 20, "metric": "balanced_accuracy"}


def load(argument: str, options: DataOptions) -> Federation:
    """All four clinics, or those in a comma list such as ``rosendahl,vidir_modern``.

    Raises:
        UserError: if the data is missing or damaged, or there is no such clinic.
    """
    clinics = catalog.files("ham10000", options.data_dir, argument)
    found = folder.read_clients(clinics, options.image_size or folder.SIZE)
    return replace(found, name=f"ham10000:{argument}" if argument else "ham10000", preset=PRESET)
