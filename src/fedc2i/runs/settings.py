"""The settings of a run as one flat record that is checked, saved and read back.

Each layer declares the settings that it reads: `TrainingSettings`, `EngineSettings` on top of it, and `RunSettings` on
top of that. Values come, in rising order of precedence, from the defaults, the data set's preset, a TOML file, and the
command line or keyword arguments. Unknown keys are refused.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tomli_w

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.options import convert, names, options_of, setting, type_hints
from fedc2i.core.settings import EngineSettings, Trained

if TYPE_CHECKING:
    import torch

    from fedc2i.data.federation import Federation
    from fedc2i.methods.base import Method

MOST_SEEDS = 1000
MOST_DIGITS = 18  # of a seed
MOST_BYTES = 2**20  # of a file of settings; the longest has some thousand


@dataclass(frozen=True, kw_only=True)
class RunSettings(EngineSettings):
    """All settings of a run; its method's own options are in ``options``."""

    method: str = setting("fedc2i", "the method")
    data: str = setting(
        "heart",
        "the data set: heart, digits, digit5, office10, hapt, amazon, ham10000, table:FILE, table:DIR, signals:FILE, "
        "signals:DIR, folder:DIR or arrays:DIR",
        scope="data",
        flags=("run", "flower-local"),
    )
    target: str | None = setting(None, "table: the column to predict", scope="data", flags=("run", "flower-local"))
    clients: str | None = setting(
        None, "table: the column that names each row's client", scope="data", flags=("run", "flower-local")
    )
    split: str | None = setting(
        None, "table: the column that says train, validation or test; none: 70/10/20, stratified", scope="data"
    )
    drop: str | None = setting(None, "table: columns that are no inputs, separated by commas", scope="data")
    scale: Literal["client", "federated", "none"] = setting(
        "client",
        "standardise inputs other than images: by each client's training data, by that of all clients, or not",
        scope="data",
    )
    data_dir: str | None = setting(
        None,
        "the folder of the data; or the variable FEDC2I_DATA",
        numbers=False,
        resume="free",
        scope="data",
        flags=("run", "paper", "flower-local"),
    )
    image_size: int | None = setting(None, "side of the square images; none: the data set's preset", scope="data")
    partition: str | None = setting(
        None, "split every client further, e.g. dirichlet:10:0.5", scope="data", flags=("run",)
    )
    data_seed: int = setting(
        0, "seed of the partition and of a table's split, the same for all seeds of a run", scope="data"
    )
    model: str = setting(
        "auto",
        "the model: logistic, mlp, cnn1d, lenet5, lenet5-bn, lenet-wide, lenet-wide-bn, efficientnet-lite0, timm:NAME "
        "or FILE.py:FUNCTION; auto: the data's preset, or mlp for tables, cnn1d for signals, lenet5 for images",
        preset=True,
        flags=("run", "flower-local", "coordinator"),
    )
    train: Trained = setting(  # noqa: RUF009
        Trained("auto"),
        "what of the model trains and travels: its head, its last N blocks, all, or adapters of rank R; auto: the head "
        "of a pretrained network, all of other models",
        flags=("run", "flower-local", "coordinator"),
    )
    weights: str | None = setting(
        None,
        "a safetensors file that the model starts from; none: random, or the published ones of a pretrained network",
        flags=("run", "flower-local", "coordinator"),
    )
    batch_statistics: Literal["auto", "frozen", "trained"] = setting(
        "auto",
        "BatchNorm's running statistics: constant, or of the batches; auto: constant in pretrained networks",
    )
    metric: Literal["accuracy", "balanced_accuracy", "auroc", "f1", "loss", "calibration_error"] = setting(
        "accuracy",
        "the score that tables, figures and reports show: accuracy, balanced_accuracy, auroc, f1, loss or "
        "calibration_error; every run computes all of them",
        numbers=False,
        resume="free",
        preset=True,
        flags=("run",),
    )
    engine: Literal["inprocess", "flower-sim", "flower"] = setting(
        "inprocess",
        "this process, Flower's simulation on Ray, or real sites (fedc2i coordinator, fedc2i flower-local)",
        flags=("run",),
        flag_help="inprocess, or flower-sim: Flower's simulation on Ray.",
    )
    ray_address: str | None = setting(
        None,
        "flower-sim: a running Ray cluster, e.g. auto or HOST:6379; none: one is started here",
        numbers=False,
        scope="machine",
        engine="flower",
        flags=("run",),
    )
    wire: Literal["float32", "float16"] = setting(
        "float32",
        "on Flower: how models travel, float32 or float16",
        engine="flower",
        flags=("flower-local", "coordinator"),
    )
    deadline: float = setting(
        600.0,
        "on Flower: seconds after which a round ends with the sites that answered",
        above=0,
        below=1e7,
        engine="flower",
        flags=("flower-local", "coordinator"),
    )
    min_sites: int = setting(
        1,
        "on Flower: answers without which a round does not end",
        low=1,
        engine="flower",
        flags=("flower-local", "coordinator"),
    )
    secure_aggregation: bool = setting(
        False,
        "at real sites: masks on uploads, so that the coordinator sees only their mean; for methods that need no more",
        engine="flower",
        flags=("flower-local", "coordinator"),
    )
    secure_range: float = setting(
        64.0,
        "with secure aggregation: the largest number in an upload; with a larger range the mean is less precise",
        above=0,
        below=1e9,
        engine="flower",
    )
    checkpoint_seconds: float = setting(
        30.0,
        "seconds between checkpoints, which `fedc2i resume` continues from: at most so much computing is lost, and the "
        "round that was interrupted; 0: a checkpoint after every round",
        low=0,
        numbers=False,
        resume="free",
        scope="machine",
        engine="inprocess",
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto",
        "where to compute; auto: cuda if there is a GPU, cpu with executor=workers",
        numbers=False,
        resume="free",
        scope="machine",
        flags=("run", "paper"),
        flag_help="auto, cpu or cuda.",
    )
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"about": "the method's own options"})

    def __post_init__(self) -> None:
        super().__post_init__()
        here = self.engine == "inprocess"
        defaults = {own.name: own.default for own in fields(self)}
        for name in names(RunSettings, engine="flower" if here else "inprocess"):
            if getattr(self, name) != defaults[name]:
                allowed = "flower-sim and real sites" if here else "inprocess"
                raise UserError(f"{name}={getattr(self, name)} is for engine={allowed}")
        if self.secure_aggregation:
            self._check_secure(defaults)
        if self.executor == "workers" and self.device == "cuda":
            raise UserError("executor=workers computes on a CPU; use device=cpu, or executor=stacked or looped")

    def _check_secure(self, defaults: Mapping[str, Any]) -> None:
        """Raises a `UserError` for what a coordinator that sees no single upload cannot do."""
        if self.engine != "flower":
            raise UserError("secure_aggregation is for real sites; virtual ones share a machine, and hide nothing")
        needed = {"topology": "full", "wire": "float32"}
        for name, only in needed.items():
            if getattr(self, name) != only:
                raise UserError(f"{name}={getattr(self, name)}: with secure aggregation only {only} is allowed")
        if self.norm_bound not in (0, defaults["norm_bound"]):
            raise UserError(f"norm_bound={self.norm_bound:g} cannot be checked under secure aggregation; use 0")

    def with_preset(self, federation: Federation, given: Collection[str]) -> RunSettings:
        """With the data set's preset for settings that are not ``given``."""
        preset = federation.preset
        wanted = [name for name in names(RunSettings, preset=True) if name in preset and name not in given]
        return replace(self, **{name: preset[name] for name in wanted})

    def torch_device(self) -> torch.device:
        """The device to compute on.

        Raises:
            UserError: if it is not there.
        """
        import torch  # settings are read where torch is not imported

        if self.device == "auto":
            use_gpu = self.executor != "workers" and torch.cuda.is_available()
            return torch.device("cuda" if use_gpu else "cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device=cuda: torch sees no CUDA device here; use cpu or auto")
        return torch.device(self.device)

    def to_toml(self) -> str:
        """As a file that ``fedc2i run --config`` reads back; settings that are none are not written."""
        own = {name: getattr(self, name) for name in names(RunSettings)}
        values = {name: list(value) if name == "seeds" else value for name, value in own.items() if value is not None}
        options = {name: value for name, value in self.options.items() if value is not None}
        return tomli_w.dumps({**values, "options": options})

    def decisive(self) -> dict[str, Any]:
        """What decides the numbers of a single seed, for a cache key."""
        return self._except(names(RunSettings, numbers=False))

    def fixed(self) -> dict[str, Any]:
        """What a resumed run must have as well."""
        return self._except(names(RunSettings, resume="free"))

    def _except(self, ignored: Collection[str]) -> dict[str, Any]:
        """All other settings; files of a topology and of weights by the checksum of their content."""
        values = {name: value for name, value in asdict(self).items() if name not in ignored}
        if self.weights is not None:
            from fedc2i.models.weights import checksum

            values["weights"] = checksum(self.weights)
        with suppress(OSError):  # no file's name
            if Path(self.topology).is_file():
                values["topology"] = hashlib.sha256(Path(self.topology).read_bytes()).hexdigest()
        return values


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


def make(method: type[Method], values: Mapping[str, Any]) -> RunSettings:
    """Checked settings from loose values; options of the method may stand among them or under ``options``.

    Raises:
        UserError: for an unknown name, listing those allowed, or a value that does not fit.
    """
    own, everywhere = options_of(method), type_hints(RunSettings)
    nested = values.get("options", {})
    if not isinstance(nested, Mapping):
        raise UserError(f"setting 'options' must be a table of the method's options, got '{one_line(nested)}'")
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in {**{k: v for k, v in values.items() if k != "options"}, **nested}.items():
        if name in own:
            options[name] = convert(value, method, name)
        elif name == "seeds" and name not in nested:
            settings[name] = parse_seeds(value)
        elif name in everywhere and name not in nested:
            settings[name] = convert(value, RunSettings, name)
        else:
            allowed = f"{method.name or method.__name__} has {', '.join(own) or 'no options'}"
            hint = nearest(name, ("method", *own, *run_settings()))
            shared = ", ".join(run_settings())
            raise UserError(f"unknown setting '{one_line(name)}'{hint}; {allowed}; every run has {shared}")
    if method.pools_data and settings.get("engine", "inprocess") != "inprocess":
        raise UserError(f"{method.name} trains on the data of all sites, which do not share it; use it in simulation")
    if settings.get("secure_aggregation") and not method.needs_only_mean:
        raise UserError(_needs_uploads(method))
    return RunSettings(**settings, options=options)


def _needs_uploads(method: type[Method]) -> str:
    from fedc2i.methods.base import Method, method_names

    allowed = [name for name in method_names() if Method.registry[name].needs_only_mean]
    return (
        f"{method.name or method.__name__}: its server needs each site's upload, and secure aggregation shows only the "
        f"mean of all; allowed are {', '.join(allowed)}"
    )


def run_settings() -> tuple[str, ...]:
    """Names of the settings every run has."""
    return tuple(name for name in names(RunSettings) if name != "method")


def parse_seeds(value: Any) -> tuple[int, ...]:
    """``"0,1,2"``, ``"0-9"`` or a list to a tuple of whole numbers, at least 0.

    A single number of Python or TOML is refused: it reads as the number of seeds.
    """
    if type(value) is int and value >= 0:
        several = f" or '0-{value - 1}' for {value} seeds" if value > 1 else ""
        raise UserError(
            f"seeds lists each seed, not their number, got {value}: write [{value}] for seed {value}{several}"
        )
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
