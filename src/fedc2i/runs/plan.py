"""From what a user asked for to runs that are ready to start, every setting checked before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.options import names
from fedc2i.data import sources
from fedc2i.data.federation import Federation
from fedc2i.engine.checks import check
from fedc2i.engine.records import Round
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.runs.fingerprint import Fingerprint
from fedc2i.runs.folder import slug
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings, make, run_settings
from fedc2i.runs.specs import build, is_listed, key_of, option_names, parse, said


class Observer(Protocol):
    """Something that watches runs, such as a progress bar."""

    def begin(self, result: Result) -> None:
        """A run starts, with all its seeds."""
        ...

    def client(self, done: int, of: int) -> None:
        """Some of a round's clients have finished their local run."""
        ...

    def round(self, report: Round) -> None:
        """A round of one seed ended."""
        ...


@dataclass(frozen=True)
class Plan:
    """A run that is ready to start.

    Attributes:
        method: what to run.
        model: what is trained.
        federation: on whose data.
        config: the complete settings.
        label: the method's title with the options that differ from its defaults, for tables.
        key: the same as typed on a command line, e.g. ``fedc2i:gamma=2.0``.
        given: what came as an object of Python, which no file can name: data, model or method.
        notes: what a reader of the result must know of its interruptions.
    """

    method: Method
    model: Model
    federation: Federation
    config: RunSettings
    label: str
    key: str
    given: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> Fingerprint:
        """What must be the same when the run is resumed."""
        return Fingerprint.of(self.config, self.federation, self.given, self.notes)

    def noting(self, notes: Sequence[str]) -> Plan:
        """The same with what a reader of its result must know of its interruptions."""
        federation = replace(self.federation, notes=(*self.federation.notes, *notes)) if notes else self.federation
        return replace(self, federation=federation, notes=tuple(notes))

    def require_engine(self) -> None:
        """Refuses an engine that cannot run here.

        Raises:
            UserError: for real sites, which other commands run, or where Flower or Ray is not installed.
        """
        if self.config.engine == "flower":
            raise UserError("engine=flower: real sites are run by `fedc2i flower-local` or `fedc2i coordinator start`")
        if self.config.engine == "flower-sim" and not (find_spec("flwr") and find_spec("ray")):
            raise UserError("engine=flower-sim needs Flower and Ray: pip install 'fedc2i[flower-sim]'")


def prepare(
    wanted: Sequence[str | Method],
    settings: Mapping[str, Any],
    data: str | Federation | None = None,
    model: str | Model | None = None,
) -> list[Plan]:
    """Plans for several methods that share data, model, seeds and settings.

    Args:
        wanted: each a name or ``FILE.py:CLASS``, with or without options of its own behind a colon
            (``fedc2i:gamma=2,influence_samples=all``), or a `Method`.
        settings: run settings and method options by name. A method option goes to every method that has it.
        data: a data set's name or a `Federation`; ``settings["data"]`` by default.
        model: a name, ``FILE.py:FUNCTION`` or a `Model`; ``settings["model"]`` or the data's preset by default.

    Raises:
        UserError: for anything that is unknown or does not fit.
    """
    if not wanted:
        raise UserError("name at least one method; `fedc2i methods` lists them")
    nested = settings.get("options", {})
    if not isinstance(nested, Mapping):
        raise UserError(f"'options' must be a table of the method's options, got '{nested}'")
    for name in nested:
        if name in run_settings():
            raise UserError(f"'{name}' is a setting of the run, not an option of a method: write it above [options]")
    values = {**{name: value for name, value in settings.items() if name != "options"}, **nested}
    for name in names(RunSettings, preset=True):
        if str(values.get(name)).lower() == "none":
            values.pop(name, None)
    if not isinstance(data, str | Federation | None):
        raise UserError(f"data must be a data set's name or a fedc2i.Federation, got {type(data).__name__}")
    if not isinstance(model, str | Model | None):
        raise UserError(f"model must be a name or fedc2i.split(module, head=...), got {type(model).__name__}")
    for name in names(RunSettings, scope="data") if isinstance(data, Federation) else ():
        if name != "data" and values.get(name) is not None:
            raise UserError(f"{name}={values[name]} is for data loaded by name; here it is loaded already")
    values |= {"data": data} if isinstance(data, str) else {}
    values |= {"model": model} if isinstance(model, str) else {}
    parsed = [parse(method) for method in wanted]
    _refuse_unknown(values, [kind for kind, _, _ in parsed])

    drafts: list[tuple[Method, RunSettings]] = []
    for kind, name, own in parsed:
        allowed = {*run_settings(), *option_names(kind)}
        config = make(kind, {**{key: value for key, value in values.items() if key in allowed}, **own, "method": name})
        drafts.append((kind(**config.options), config))

    first = drafts[0][1]
    federation = data if isinstance(data, Federation) else _load(first)
    fitted = first.with_preset(federation, values)
    built = model if isinstance(model, Model) else build(fitted.model, federation.classes, federation.image_shape)
    for method, _ in drafts:
        check(method, built, federation, fitted)
    fitted.torch_device()

    plans = []
    for named, (method, draft) in zip(wanted, drafts, strict=True):
        config = replace(draft.with_preset(federation, values), options=asdict(method), model=fitted.model)
        config = replace(config, data=federation.name) if isinstance(data, Federation) else config
        config = replace(config, model=model.name) if isinstance(model, Model) else config
        differs = said(method)
        label = f"{method.title} ({', '.join(differs)})" if differs else method.title
        objects = {
            "data": isinstance(data, Federation),
            "model": isinstance(model, Model),
            "method": isinstance(named, Method) and not is_listed(named),
        }
        given = tuple(name for name, is_object in objects.items() if is_object)
        plans.append(Plan(method, built, federation, config, label, key_of(method), given))
    for used in ([plan.label for plan in plans], [slug(plan.key) for plan in plans]):  # tables; folders
        for name in used:
            if used.count(name) > 1:
                raise UserError(f"{name} is named {used.count(name)} times; methods need different names and titles")
    return plans


def _refuse_unknown(values: Mapping[str, Any], kinds: Sequence[type[Method]]) -> None:
    options = sorted({name for kind in kinds for name in option_names(kind)})
    for name in values:
        if name not in run_settings() and name not in options:
            owner = kinds[0].name if len(kinds) == 1 else "these methods"
            hint = nearest(name, (*options, *run_settings()))
            raise UserError(
                f"unknown setting '{one_line(name)}'{hint}; {owner}: {', '.join(options) or 'no options'}; "
                f"every run: {', '.join(run_settings())}"
            )


def _load(config: RunSettings) -> Federation:
    return sources.load(
        config.data,
        data_dir=None if config.data_dir is None else Path(config.data_dir),
        image_size=config.image_size,
        partition=config.partition,
        seed=config.data_seed,
    )
