"""The benchmark domains: what each is, who publishes it, and where its files lie on this machine.

A domain is read from the first of these: an npz in the data folder, the cache of converted data, and published
files anywhere in the data folder, which are converted into the cache once. Published files with other names or sizes
than those that the cache was made from get another file in the cache.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedc2i.core.errors import UserError
from fedc2i.data import converted_files
from fedc2i.data.formats import Labelled, read_npz

OFFICE_CLASSES = (
    "back_pack", "bike", "calculator", "headphones", "keyboard",
    "laptop_computer", "monitor", "mouse", "mug", "projector",
)  # fmt: skip
DIGIT_CLASSES = tuple("0123456789")
CLASSES: Mapping[str, tuple[str, ...]] = {"digit5": DIGIT_CLASSES, "office10": OFFICE_CLASSES}

State = Literal["ready", "cached", "raw", "missing"]

_MAX_DEPTH = 4
_MAX_ENTRIES = 500_000  # a bound for a data folder that was set to something like the root of the disk
# folders whose files have MNIST's names, or are copies without content
_FOREIGN = frozenset(
    {"fashionmnist", "fashion-mnist", "fashion_mnist", "fashion", "kmnist", "emnist", "qmnist", "__macosx"}
)
_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_FEDBN = "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization"
_OFFICE = "Saenko et al. 2010, packed by the authors of FedBN"
_FOLDER = "a folder {0} of ten class folders"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Domain:
    """One domain of a benchmark.

    Attributes:
        source: the benchmark, e.g. ``digit5``.
        key: the name on the command line.
        client: the name in tables.
        what: a description in a few words.
        publisher: who publishes the files.
        page: the title of their page.
        accepts: its published files, for people.
        recipes: sets of file or folder names; one set, complete in one folder, is enough to convert. Without any, the
            first word of ``accepts`` names the file or folder that is read unchanged.
    """

    source: str
    key: str
    client: str
    what: str
    publisher: str
    page: str
    accepts: str
    recipes: tuple[tuple[str, ...], ...]


DOMAINS = (
    Domain(
        "digit5", "mnist", "MNIST", "handwritten digits, grey, 28x28",
        "LeCun, Cortes, Burges", "THE MNIST DATABASE of handwritten digits",
        f"{', '.join(_IDX)}, all plain or all .gz",
        (_IDX, tuple(f"{name}.gz" for name in _IDX), tuple(name.replace("-idx", ".idx") for name in _IDX)),
    ),
    Domain(
        "digit5", "svhn", "SVHN", "house numbers in photos, cropped digits, 32x32",
        "Netzer et al. 2011", "The Street View House Numbers (SVHN) Dataset",
        "train_32x32.mat, test_32x32.mat", (("train_32x32.mat", "test_32x32.mat"),),
    ),
    Domain(
        "digit5", "usps", "USPS", "digits of scanned envelopes, grey, 16x16",
        "Hull 1994, packed by the authors of LIBSVM", "LIBSVM Data: Classification (Multi-class)",
        "usps.bz2, usps.t.bz2", (("usps.bz2", "usps.t.bz2"),),
    ),
    Domain(
        "digit5", "synth", "SynthDigits", "rendered digits in many fonts and colours, 32x32",
        "Ganin, Lempitsky 2015, packed by the authors of FedBN", _FEDBN,
        "synth_train_32x32.mat, synth_test_32x32.mat", (("synth_train_32x32.mat", "synth_test_32x32.mat"),),
    ),
    Domain(
        "digit5", "mnistm", "MNIST-M", "MNIST digits blended with patches of photos",
        "Ganin, Lempitsky 2015", "Unsupervised Domain Adaptation by Backpropagation",
        "folders mnist_m_train, mnist_m_test with mnist_m_train_labels.txt, mnist_m_test_labels.txt, or mnist_m.npz",
        (
            ("mnist_m_train", "mnist_m_train_labels.txt", "mnist_m_test", "mnist_m_test_labels.txt"),
            ("mnist_m.npz",),
        ),
    ),
    Domain(
        "office10", "amazon", "Amazon", "product photos of an online shop",
        _OFFICE, _FEDBN, _FOLDER.format("amazon"), (("amazon",),),
    ),
    Domain(
        "office10", "caltech", "Caltech", "the same ten classes in Caltech-256",
        "Griffin et al. 2007, packed by the authors of FedBN", _FEDBN, _FOLDER.format("caltech"), (("caltech",),),
    ),
    Domain(
        "office10", "dslr", "DSLR", "photos by an SLR camera in an office",
        _OFFICE, _FEDBN, _FOLDER.format("dslr"), (("dslr",),),
    ),
    Domain(
        "office10", "webcam", "WebCam", "photos by a webcam in an office",
        _OFFICE, _FEDBN, _FOLDER.format("webcam"), (("webcam",),),
    ),
    Domain(
        "hapt", "hapt", "HAPT", "30 people, signals of a phone, six activities",
        "Reyes-Ortiz et al. 2015", "Smartphone-Based Recognition of Human Activities and Postural Transitions",
        "windows.npz in a folder hapt: x (N, 6, 128), y 0..5, user 1..30", (),
    ),
    *(
        Domain(
            "amazon", key, name, f"reviews of {what}, counts of words",
            "Blitzer, Dredze, Pereira 2007", "Multi-Domain Sentiment Dataset",
            f"{key}.npz in a folder amazon: indptr, indices, counts of 5,000 words, and y 0 or 1", (),
        )
        for key, name, what in (
            ("books", "Books", "books"), ("dvd", "DVD", "films"),
            ("electronics", "Electronics", "electronics"), ("kitchen", "Kitchen", "kitchen goods"),
        )
    ),
    *(
        Domain(
            "ham10000", key, key, "dermatoscopic images, seven diagnoses",
            "Tschandl, Rosendahl, Kittler 2018", "The HAM10000 dataset",
            f"{key} in a folder ham10000, with <train|test>/<diagnosis>/*.jpg", (),
        )
        for key in ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")
    ),
)  # fmt: skip


@dataclass(frozen=True)
class DomainStatus:
    """The state of a domain: ``paths`` holds the npz or the published files, nothing if it is missing."""

    domain: Domain
    state: State
    paths: tuple[Path, ...]

    @property
    def stand_in(self) -> bool:
        """Whether this is SynthDigits, and no manifest shows that it was made from the published files."""
        return self.domain.key == "synth" and self.state == "ready" and converted_files.manifest(self.paths[0]) is None


@dataclass(frozen=True)
class Prepared:
    """A domain's arrays, and whether a manifest shows that they were made from the published files."""

    train: Labelled
    test: Labelled
    notes: tuple[str, ...]
    from_published: bool


Convert = Callable[[Domain, Sequence[Path]], tuple[Labelled, Labelled, tuple[str, ...]]]


def select(name: str | None) -> tuple[Domain, ...]:
    """The domains of a benchmark, the one domain of that name or ``benchmark/domain``, or all for None.

    The name of a benchmark comes first: ``amazon`` is that of reviews, ``office10/amazon`` a domain of images.

    Raises:
        UserError: for a name that is neither.
    """
    chosen = tuple(domain for domain in DOMAINS if name in (None, domain.source))
    chosen = chosen or tuple(own for own in DOMAINS if name in (own.key, f"{own.source}/{own.key}"))
    if not chosen:
        sources = dict.fromkeys(domain.source for domain in DOMAINS)
        allowed = ", ".join([*sources, *(domain.key for domain in DOMAINS)])
        raise UserError(f"no benchmark data '{name}', allowed are {allowed}")
    return chosen


def choose(source: str, argument: str) -> tuple[Domain, ...]:
    """The domains of ``source`` named in a comma list, in that order; all for an empty list.

    Raises:
        UserError: for a name that is not there or comes twice.
    """
    domains = {domain.key: domain for domain in DOMAINS if domain.source == source}
    if not argument:
        return tuple(domains.values())
    keys = [key.strip() for key in argument.split(",")]
    for key in keys:
        if key not in domains or keys.count(key) > 1:
            what = "is named twice" if key in domains else "is not a domain"
            raise UserError(f"{source}: '{key}' {what}, allowed are {', '.join(domains)}, each once")
    return tuple(domains[key] for key in keys)


def data_root(data_dir: Path | None) -> Path:
    """The data folder: the argument, else ``FEDC2I_DATA``, else ``./data``.

    Raises:
        UserError: if one was named and is not a folder.
    """
    named = data_dir or os.environ.get("FEDC2I_DATA")
    folder = Path(named or "data").expanduser()
    if named and not folder.is_dir():
        raise UserError(f"{folder}: no such folder, the data folder is set by --data-dir or FEDC2I_DATA")
    return folder


def locate(domains: Sequence[Domain], data_dir: Path | None, *, raw_only: bool = False) -> list[DomainStatus]:
    """Where each domain would be read from; with ``raw_only``, only published files are looked for."""
    folder = data_root(data_dir)
    inside: list[Mapping[str, Path]] | None = None
    found: list[DomainStatus] = []
    for domain in domains:
        ready = [folder / domain.source / f"{domain.key}.npz", folder / f"{domain.key}.npz"]
        if domain.source not in CLASSES:
            ready = [folder / domain.source / domain.accepts.partition(" ")[0]]
        if not raw_only and (files := [file for file in ready if file.exists()]):
            found.append(DomainStatus(domain, "ready", (files[0],)))
            continue
        inside = list(_folders(folder)) if inside is None else inside
        raw = _match(domain, inside)
        cached = converted_files.file_for(domain.source, domain.key, raw)
        if not raw_only and cached.is_file():
            found.append(DomainStatus(domain, "cached", (cached,)))
        else:
            found.append(DomainStatus(domain, "raw" if raw else "missing", raw))
    return found


def files(source: str, data_dir: Path | None, argument: str = "") -> list[Path]:
    """The file or folder of each chosen domain of a benchmark that is read as it lies there.

    Raises:
        UserError: if one is missing.
    """
    found = locate(choose(source, argument), data_dir)
    require(found, data_dir)
    return [entry.paths[0] for entry in found]


def require(found: Sequence[DomainStatus], data_dir: Path | None) -> None:
    """Raises a `UserError` that names all missing domains, if there are any."""
    missing = [entry.domain for entry in found if entry.state == "missing"]
    if missing:
        names = ", ".join(domain.client for domain in missing)
        raise UserError(
            f"{missing[0].source}: no data for {names} in '{data_root(data_dir)}' or the cache; "
            "name its folder with --data-dir or FEDC2I_DATA; `fedc2i data ls` shows which files are accepted"
        )


def obtain(entry: DomainStatus, convert: Convert) -> Prepared:
    """Reads a domain that was located; published files are converted into the cache first.

    Raises:
        UserError: if a file is damaged, or differs from its checksum.
    """
    if entry.state == "raw":
        return prepare(entry, convert, converted_files.file_for(entry.domain.source, entry.domain.key, entry.paths))
    (path,) = entry.paths
    manifest = converted_files.verify(path)
    if manifest is None and entry.state == "cached":
        raise UserError(f"{path}: no manifest beside it, run `fedc2i data prepare {entry.domain.key}` again")
    train, test = read_npz(path, CLASSES[entry.domain.source])
    return Prepared(train, test, manifest.notes if manifest else (), manifest is not None)


def prepare(entry: DomainStatus, convert: Convert, target: Path | None = None) -> Prepared:
    """Converts a domain's published files into the cache, at `converted_files.file_of` for None."""
    domain = entry.domain
    target = target or converted_files.file_of(domain.source, domain.key)
    logger.info("%s: converting %s into %s, once", domain.client, entry.paths[0].name, target)
    train, test, notes = convert(domain, entry.paths)
    arrays: dict[str, np.ndarray[Any, Any]] = {"x_train": train[0], "y_train": train[1]}
    arrays |= {"x_test": test[0], "y_test": test[1]}
    converted_files.write(target, arrays, entry.paths, notes)
    return Prepared(train, test, notes, True)


def _folders(root: Path) -> Iterator[Mapping[str, Path]]:
    """Every folder down to a limited depth, nearest first: the paths in it by the names that recipes need."""
    wanted = {name for domain in DOMAINS for recipe in domain.recipes for name in recipe}
    queue, left = deque([(root, 0)]), _MAX_ENTRIES
    while queue and left > 0:
        folder, depth = queue.popleft()
        known: dict[str, Path] = {}
        try:
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    name, left = entry.name.lower(), left - 1
                    if name in wanted:
                        known[name] = Path(entry.path)
                    if depth < _MAX_DEPTH and not name.startswith(".") and name not in _FOREIGN and entry.is_dir():
                        queue.append((Path(entry.path), depth + 1))
        except OSError:
            continue
        yield known


def _match(domain: Domain, folders: Sequence[Mapping[str, Path]]) -> tuple[Path, ...]:
    """The files of the first recipe that is complete in one folder."""
    for known in folders:
        for recipe in domain.recipes:
            if not all(name in known for name in recipe):
                continue
            paths = tuple(known[name] for name in recipe)
            if domain.source != "office10" or any((paths[0] / name).is_dir() for name in OFFICE_CLASSES):
                return paths
    return ()
