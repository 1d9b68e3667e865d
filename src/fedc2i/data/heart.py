"""``heart``: heart disease at four hospitals, cut as FLamby's Fed-Heart-Disease.

The files of the UCI repository (Janosi, Steinbrunn, Pfisterer, Detrano 1988; CC BY 4.0) are part of the package. The
columns slope, ca and thal are dropped, then rows with missing values; cp and restecg become indicators; the label is
whether num > 0. 66 % of the patients of a hospital are for training, 34 % for test: ``split.json`` lists their rows, as
importing scikit-learn, which chose them, takes two seconds.
"""

from __future__ import annotations

import csv
import json
from importlib import resources

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, DataOptions, Federation, Split
from fedc2i.data.scaling import scale

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Hungary", "switzerland": "Switzerland", "va": "Long Beach"}
COLUMNS = (
    *("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak"),
    *("cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2"),
)
_NAMES = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")
_TARGET = 13  # column of num
NOTES = (
    "Four hospitals of the UCI Heart Disease data (CC BY 4.0), cut as FLamby's Fed-Heart-Disease. Switzerland has 16 "
    "test patients, 15 of them ill: look at balanced accuracy and AUROC beside accuracy.",
)


def load(argument: str, options: DataOptions) -> Federation:
    """All four hospitals, or those in a comma list such as ``cleveland,va`` or ``Cleveland,Long Beach``.

    Raises:
        UserError: for an unknown hospital.
    """
    named = {name.lower(): key for key, name in HOSPITALS.items()} | {key: key for key in HOSPITALS}
    wanted = argument.split(",") if argument else list(HOSPITALS)
    for name in wanted:
        if name.strip().lower() not in named:
            raise UserError(f"heart: no hospital '{name.strip()}', allowed are {', '.join(HOSPITALS)}")
    keys = [named[name.strip().lower()] for name in wanted]
    return Federation(
        name=f"heart:{argument}" if argument else "heart",
        clients=scale([_hospital(key) for key in keys], options.scale, COLUMNS),
        classes=("healthy", "ill"),
        notes=NOTES,
        preset={"model": "mlp", "rounds": 20},
    )


def _hospital(key: str) -> Client:
    rows = [row for row in csv.reader(_text(f"processed.{key}.data").splitlines()) if row]
    kept = [[*row[: len(_NAMES)], row[_TARGET]] for row in rows]
    table = np.array([row for row in kept if "?" not in row], dtype=np.float64)
    column = dict(zip((*_NAMES, "num"), table.T, strict=True))
    for indicator in COLUMNS[8:]:
        name, _, value = indicator.partition("=")
        column[indicator] = (column[name] == int(value)).astype(np.float64)
    x, y = np.stack([column[name] for name in COLUMNS], axis=1), (column["num"] > 0).astype(np.int64)
    split = json.loads(_text("split.json"))[key]
    train, test = (Split.from_numpy(x[split[part]], y[split[part]]) for part in ("train", "test"))
    return Client(HOSPITALS[key], train, train.take([]), test)


def _text(file: str) -> str:
    return resources.files("fedc2i.data").joinpath("heart_files", file).read_text(encoding="ascii")
