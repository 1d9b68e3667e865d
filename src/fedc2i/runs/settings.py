"""Everything that decides the numbers of a run, as one flat record that is checked, saved and read back.

Settings come, in rising order of precedence, from the defaults here, the data set's preset, a TOML file, and the
command line or keyword arguments. Unknown keys are refused.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.options import check_at_least, check_choice, convert, option, options_of
from fedc2i.data.federation import Federation
from fedc2i.engine.settings import Settings
from fedc2i.methods.base import Method
from fedc2i.training.local import Training

MOST_SEEDS = 1000
MOST_DIGITS = 18  # of a seed
MOST_SECONDS = 1e7  # of a deadline
MOST_BYTES = 2**20  # of a file of settings; the longest has some thousand


@dataclass(frozen=True)
class Config:
    """A run, but for its method's own options, which lie in ``options``."""

    method: str = option("fedc2i", "the method")
    data: str = option("embedded", "the data set")
    data_dir: str | None = option(None, "where the data lies")
    image_size: int | None = option(None, "side of the square images; none: the data set's preset")
    partition: str | None = option(None, "split every client further, e.g. dirichlet:10:0.5")
    data_seed: int = option(0, "seed of the partition, the same for all seeds of a run")
    model: str | None = option(None, "the model; none: the data set's preset")
    rounds: int | None = option(None, "communication rounds; none: the data set's preset")
    seeds: tuple[int, ...] = option((0,), "one run for each")
    epochs: int = option(2, "local epochs a round")
    batch_size: int = option(32, "samples a step")
    optimizer: Literal["adam", "sgd"] = option("adam", "local optimiser, fresh every round")
    lr: float = option(1e-3, "learning rate")
    weight_decay: float = option(0.0, "L2 penalty")
    momentum: float = option(0.0, "momentum of sgd")
    drop_last: bool = option(False, "leave out an epoch's last batch if it is not full")
    clients_per_round: int | str = option("100%", "a number of clients, or a share such as 20%")
    evaluate_every: int = option(1, "rounds between evaluations; 0: only after the last round")
    patience: int = option(0, "stop after this many evaluations without a better validation accuracy; 0: never")
    init: Literal["common", "independent"] = option("common", "one initial model for all clients, or one for each")
    topology: str = option("full", "whose models a client receives: full, ring, random:K or FILE")
    attack: str = option("", "dishonest clients, KIND[:STRENGTH]@CLIENT[,CLIENT...], several joined by ;")
    norm_bound: float = option(100.0, "leave out uploads of more than this many times the median norm; 0: none")
    clip: float = option(0.0, "the largest norm of an upload's difference from what the server knows; 0: not clipped")
    noise: float = option(0.0, "Gaussian noise on uploads: its standard deviation in units of clip; 0: none")
    delta: float = option(1e-5, "δ at which a run with noise states its ε")
    engine: Literal["inprocess", "flower-sim", "flower"] = option(
        "inprocess", "this process, Flower's simulation on Ray, or real sites (fedc2i coordinator, fedc2i flower-local)"
    )
    ray_address: str | None = option(None, "flower-sim: a running Ray cluster, or auto; none: one is started here")
    wire: Literal["float32", "float16"] = option("float32", "on Flower: how models travel")
    deadline: float = option(600.0, "on Flower: seconds after which a round goes on with the sites that answered")
    min_sites: int = option(1, "on Flower: answers without which a round does not end")
    executor: Literal["auto", "looped", "workers", "stacked"] = option(
        "auto", "clients one by one, over processes, or all at once; auto: what is fastest"
    )
    workers: int = option(0, "processes on a CPU; 0: one per core")
    clients_at_once: int = option(0, "the most clients of all seeds that are stacked together; 0: as many as fit")
    threads: int = option(1, "CPU threads inside one operation; more than one pays for large models only")
    checkpoint_every: int = option(1, "rounds between checkpoints, from which `fedc2i resume` goes on; 0: none")
    device: str = option("auto", "auto, cpu or cuda")
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"about": "the method's own options"})

    def __post_init__(self) -> None:
        check_choice(self, "engine", "wire")
        check_at_least(self, 1, "min_sites")
        check_at_least(self, 0, "checkpoint_every")
        if not 0 < self.deadline < MOST_SECONDS:
            raise UserError(f"deadline must be a number of seconds above 0, got {self.deadline}")
        if not 0 < self.delta < 1:
            raise UserError(f"delta must be above 0 and below 1, got {self.delta}")
        for name in ("executor", "workers", "clients_at_once", "checkpoint_every"):
            if self.engine != "inprocess" and getattr(self, name) != options_of(Config)[name].default:
                raise UserError(f"{name}={getattr(self, name)} is for engine=inprocess")
        for name in ("ray_address", "wire", "deadline", "min_sites"):
            if self.engine == "inprocess" and getattr(self, name) != options_of(Config)[name].default:
                raise UserError(f"{name}={getattr(self, name)} is for engine=flower-sim and real sites")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds must be different whole numbers, at least one, got {list(self.seeds)}")

    def fitted(self, federation: Federation) -> Config:
        """With the data set's preset where nothing was said."""
        preset = {"model": "lenet5", "rounds": 20, **federation.preset}
        return replace(self, **{name: preset[name] for name in ("model", "rounds") if getattr(self, name) is None})

    def settings(self) -> Settings:
        """As the engine reads it."""
        training = Training(**{part.name: getattr(self, part.name) for part in fields(Training)})
        names = [part.name for part in fields(Settings) if part.name != "training"]
        return Settings(**{name: getattr(self, name) for name in names}, training=training)

    def torch_device(self) -> torch.device:
        """The device to compute on.

        Raises:
            UserError: if it is not there.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device not in ("cpu", "cuda"):
            raise UserError(f"device must be auto, cpu or cuda, got '{self.device}'")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device=cuda: torch sees no CUDA device here; use cpu or auto")
        return torch.device(self.device)

    def to_toml(self) -> str:
        """As a file that ``fedc2i run --config`` reads back; settings that are none are left out."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        values["options"] = {name: value for name, value in self.options.items() if value is not None}
        return tomli_w.dumps(values)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's settings, unchecked.

    Raises:
        UserError: if it cannot be read or is not TOML.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would never end
            raise UserError(f"{path}: not a file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{path}: too large, allowed are {MOST_BYTES:,} bytes of settings")
        return tomllib.loads(content.decode("utf-8").replace("\r\n", "\n"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # not TOML, not text, a number of too many digits, nested too deep
        raise UserError(f"{path}: not a TOML file ({one_line(error) or type(error).__name__})") from None


def make(method: type[Method], values: Mapping[str, Any], where: str = "setting") -> Config:
    """A checked configuration from loose values; method options may stand among them or under ``options``.

    Args:
        method: whose options are allowed.
        values: by name, as text or typed.
        where: how messages call an entry.

    Raises:
        UserError: for an unknown name, listing those allowed, or a value that does not fit.
    """
    hints = typing.get_type_hints(Config)
    own_hints = typing.get_type_hints(method)
    own = options_of(method)
    nested = values.get("options", {})
    if not isinstance(nested, Mapping):
        raise UserError(f"{where} 'options' must be a table of the method's options, got '{one_line(nested)}'")
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in {**{k: v for k, v in values.items() if k != "options"}, **nested}.items():
        if name in own:
            options[name] = convert(value, own_hints[name], f"{where} '{name}'")
        elif name == "seeds" and name not in nested:
            settings[name] = parse_seeds(value)
        elif name in hints and name not in nested:
            settings[name] = convert(value, hints[name], f"{where} '{name}'")
        else:
            allowed = f"{method.name or method.__name__} has {', '.join(own) or 'no options'}"
            hint = nearest(name, ("method", *own, *run_settings()))
            everywhere = ", ".join(run_settings())
            raise UserError(f"unknown {where} '{one_line(name)}'{hint}; {allowed}; every run has {everywhere}")
    return Config(**settings, options=options)


def run_settings() -> tuple[str, ...]:
    """Names of the settings every run has."""
    return tuple(part.name for part in fields(Config) if part.name not in ("method", "options"))


def parse_seeds(value: Any) -> tuple[int, ...]:
    """``"0,1,2"``, ``"0-9"``, ``3`` or a list to a tuple of whole numbers, at least 0."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    elif not isinstance(value, Sequence):
        value = [value]
    seeds: list[int] = []
    for part in value:
        first, dash, last = one_line(part).partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isdecimal() and len(end) <= MOST_DIGITS for end in ends):
            raise UserError(f"seeds must be whole numbers such as 0,1,2 or 0-9, got '{one_line(part)}'")
        span = range(int(ends[0]), int(ends[1]) + 1)
        if not span:
            raise UserError(f"seeds: '{part}' counts down; write the smaller one first")
        if len(seeds) + len(span) > MOST_SEEDS:
            raise UserError(f"seeds: '{part}' makes more than {MOST_SEEDS} of them, which is surely a slip")
        seeds.extend(span)
    return tuple(seeds)
