"""From what a user asked for to runs that are ready to start, every setting checked before anything is computed.

Methods and models are named ``fedc2i:gamma=2`` or ``FILE.py:CLASS``, or come as objects of Python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from typing import Any, Protocol

import cloudpickle

from fedc2i.core.errors import UserError, how_to_install, nearest, one_line
from fedc2i.core.files import is_plugin, own_code, plugin_checksums
from fedc2i.core.options import convert, names, options_of
from fedc2i.data import sources
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import check
from fedc2i.methods.base import Method, get_method
from fedc2i.models import networks
from fedc2i.models.model import Model
from fedc2i.runs.fingerprint import Fingerprint
from fedc2i.runs.folder import slug
from fedc2i.runs.results import Result, versions
from fedc2i.runs.settings import RunSettings, make, run_settings


class Observer(Protocol):
    """Something that watches runs, such as a progress bar; one with ``say(line)`` receives lines of a log as well."""

    def begin(self, result: Result) -> None:
        """A run starts, with all its seeds."""
        ...

    def client(self, done: int, of: int) -> None:
        """Some of a round's clients have finished their local run."""
        ...

    def round(self, report: Round) -> None:
        """A round of one seed ended."""
        ...


def sayer(observer: Observer | None) -> Callable[[str], None]:
    """What takes lines of a log: the observer's own, or nothing."""
    found: Callable[[str], None] = getattr(observer, "say", lambda line: None)
    return found


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
        config = self.config
        return Fingerprint(
            json.dumps(config.fixed(), default=str),
            self.federation.checksums,
            versions(),
            config.torch_device().type,
            self.given,
            self.notes,
            plugin_checksums(config.method, config.model),
        )

    @property
    def parts(self) -> tuple[Method, Model, Federation, RunSettings, tuple[int, ...]]:
        """The arguments that engines take."""
        return self.method, self.model, self.federation, self.config, self.config.seeds

    def with_seeds(self, seeds: Sequence[int]) -> Plan:
        """The same run with other seeds."""
        return replace(self, config=replace(self.config, seeds=tuple(seeds)))

    def on_features(self, observer: Observer | None = None) -> Plan:
        """The same computation where only a head trains: features in place of images, and the head as the model."""
        if not self.model.has_constant_body or not self.federation.has_samples:
            return self
        from fedc2i.models import features

        bar: features.Report | None = getattr(observer, "preparing", None)
        report = bar or features.timed(sayer(observer))
        found = features.of_federation(self.federation, self.model, self.config.torch_device(), report)
        return replace(self, federation=found, model=self.model.on_features())

    def empty_result(self) -> Result:
        """The run's result before its first round."""
        name = "" if self.model.name == "custom" else self.model.name  # the default says less than FILE.py:FUNCTION
        return Result(
            self.method, self.config, self.federation, self.label, self.key, model_name=name, given=self.given
        )

    def require_engine(self) -> None:
        """Refuses an engine that cannot run here.

        Raises:
            UserError: for real sites, which other commands run, or where Flower or Ray is not installed.
        """
        if self.config.engine == "flower":
            raise UserError("engine=flower: real sites are run by `fedc2i flower-local` or `fedc2i coordinator start`")
        if self.config.engine == "flower-sim" and not (find_spec("flwr") and find_spec("ray")):
            raise UserError(f"engine=flower-sim needs Flower and Ray: {how_to_install('flower-sim')}")


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
    if not isinstance(data, str | Federation | None):
        raise UserError(f"data must be a data set's name or a fedc2i.Federation, got {type(data).__name__}")
    if not isinstance(model, str | Model | None):
        raise UserError(f"model must be a name or fedc2i.split(module, head=...), got {type(model).__name__}")
    values = _flat(settings)
    defaults = {own.name: own.default for own in fields(RunSettings)}
    for name in names(RunSettings, scope="data") if isinstance(data, Federation) else ():
        if name != "data" and values.get(name, defaults[name]) not in (None, defaults[name]):
            raise UserError(f"{name}={values[name]} is for data loaded by name; here it is loaded already")
    values |= {"data": data} if isinstance(data, str) else {}
    values |= {"model": model} if isinstance(model, str) else {}
    parsed = [parse_method(method) for method in wanted]
    _refuse_unknown(values, [kind for kind, _, _ in parsed])

    drafts: list[tuple[Method, RunSettings]] = []
    for kind, name, own in parsed:
        allowed = {*run_settings(), *options_of(kind)}
        config = make(kind, {**{key: value for key, value in values.items() if key in allowed}, **own, "method": name})
        with own_code(name):
            drafts.append((kind(**config.options), config))

    if not isinstance(data, Federation) and not isinstance(model, Model):
        drafts = [(method, _with_image_size(draft)) for method, draft in drafts]
    first = drafts[0][1]
    federation = data if isinstance(data, Federation) else load_data(first)
    fitted = first.with_preset(federation, values)
    built = build_model(fitted, federation.classes, federation.input, model if isinstance(model, Model) else None)
    for method, draft in drafts:
        with own_code(draft.method, fitted.model):
            check(method, built, federation, fitted)
    fitted.torch_device()

    plans = []
    for wish, (method, draft) in zip(wanted, drafts, strict=True):
        config = replace(draft.with_preset(federation, values), options=asdict(method), model=fitted.model)
        config = replace(config, data=federation.name) if isinstance(data, Federation) else config
        config = replace(config, model=model.name) if isinstance(model, Model) else config
        differs = _set_options(method)
        label = f"{method.title} ({', '.join(differs)})" if differs else method.title
        is_own = isinstance(wish, Method) and not type(wish).__module__.startswith("fedc2i.methods.")
        objects = {"data": isinstance(data, Federation), "model": isinstance(model, Model), "method": is_own}
        given = tuple(name for name, is_object in objects.items() if is_object)
        plans.append(Plan(method, built, federation, config, label, key_of(method), given))
    for used in ([plan.label for plan in plans], [slug(plan.key) for plan in plans]):  # tables; folders
        for name in used:
            if used.count(name) > 1:
                raise UserError(f"{name} is named {used.count(name)} times; methods need different names and titles")
    return plans


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and options by name; a preset is used where one of its settings is none."""
    nested = settings.get("options", {})
    if not isinstance(nested, Mapping):
        raise UserError(f"'options' must be a table of the method's options, got '{nested}'")
    for name in nested:
        if name in run_settings():
            raise UserError(f"'{name}' is a setting of the run, not an option of a method: write it above [options]")
    values = {**{name: value for name, value in settings.items() if name != "options"}, **nested}
    unset = [name for name in names(RunSettings, preset=True) if str(values.get(name)).lower() == "none"]
    return {name: value for name, value in values.items() if name not in unset}


def _refuse_unknown(values: Mapping[str, Any], kinds: Sequence[type[Method]]) -> None:
    options = sorted({name for kind in kinds for name in options_of(kind)})
    for name in values:
        if name not in run_settings() and name not in options:
            owner = kinds[0].name if len(kinds) == 1 else "these methods"
            hint = nearest(name, (*options, *run_settings()))
            raise UserError(
                f"unknown setting '{one_line(name)}'{hint}; {owner}: {', '.join(options) or 'no options'}; "
                f"every run: {', '.join(run_settings())}"
            )


def _with_image_size(config: RunSettings) -> RunSettings:
    """With images of the size that a pretrained network reads, where they come from files; smaller ones are enlarged
    when they are read."""
    side = sources.FILE_SIZES.get(config.data.partition(":")[0])
    if side is None or config.image_size is not None or not networks.is_pretrained(config.model):
        return config
    from fedc2i.models import backbones

    return replace(config, image_size=min(side, backbones.preprocessing_of(config.model).size))


def load_data(config: RunSettings) -> Federation:
    """The data that settings name."""
    read = {name: getattr(config, name) for name in names(RunSettings, scope="data")}
    place = None if config.data_dir is None else Path(config.data_dir)
    return sources.load(read.pop("data"), seed=read.pop("data_seed"), **{**read, "data_dir": place})


def key_of(method: Method) -> str:
    """The method with the options that differ from its defaults, as typed on a command line."""
    differs = _set_options(method)
    return f"{method.name}:{','.join(differs)}" if differs else method.name


def _set_options(method: Method) -> list[str]:
    """The options that differ from the defaults, each as ``name=value``."""
    options = options_of(type(method)).items()
    return [f"{name}={value}" for name, own in options if (value := getattr(method, name)) != own.default]


def parse_method(wanted: str | Method) -> tuple[type[Method], str, dict[str, Any]]:
    """The method's class, its name or ``FILE.py:CLASS``, and the options that came with it.

    Raises:
        UserError: if there is no such method, or it has no such option.
    """
    if isinstance(wanted, Method):
        _require_name(type(wanted), type(wanted).__name__)
        return type(wanted), wanted.name, asdict(wanted)
    if not isinstance(wanted, str):
        raise UserError(f"a method is a name such as fedc2i or a fedc2i.Method, got '{wanted}'")
    if is_plugin(wanted):
        file, _, rest = wanted.partition(".py:")
        attribute, _, options = rest.partition(":")
        name = f"{file}.py:{attribute}"
        kind = _load_object(name, _is_method)
        if not _is_method(kind):
            raise UserError(f"{name} is not a subclass of fedc2i.Method")
    else:
        name, _, options = wanted.partition(":")
        if name.endswith(".toml"):
            raise UserError(f"'{name}' is no method; a file of settings is given as --config {name}")
        if name.endswith(".py"):
            raise UserError(f"{one_line(name)}: add :CLASS, the class of the method in that file")
        kind = get_method(name)
        name = kind.name
    _require_name(kind, name)
    own = {}
    for entry in filter(None, options.split(",")):
        key, equals, value = entry.partition("=")
        if not equals or key not in options_of(kind):
            allowed = ", ".join(options_of(kind)) or "none"
            hint = nearest(key, options_of(kind))
            raise UserError(f"'{wanted}': no option '{key}'{hint}, allowed are {allowed}, written name=value")
        own[key] = convert(value, kind, key, f"'{wanted}': ")
    return kind, name, own


def _is_method(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, Method)


def _require_name(kind: type[Method], where: str) -> None:
    if not (vars(kind).get("name") and vars(kind).get("title")):  # inherited ones would pass it off as its parent
        raise UserError(f"{where} needs its own class attributes name and title")
    typed = [name for name, hint in get_annotations(kind).items() if "ClassVar" not in str(hint)]
    if typed and "__dataclass_fields__" not in vars(kind):
        raise UserError(
            f"{where}: {', '.join(typed)} would be no option; write @dataclass(frozen=True) above the class"
        )


def build_model(config: RunSettings, classes: Sequence[str], sample: InputSpec, given: Model | None = None) -> Model:
    """The model that settings name, or the one ``given``, with their weights and what of it trains.

    Raises:
        UserError: if there is no such model, its weights do not fit, or it has no such part.
    """
    pretrained = given is None and networks.is_pretrained(config.model)
    if pretrained:
        from fedc2i.models import backbones

        model = backbones.build(config.model, len(classes), sample, config.weights)
    else:
        model = given or _build_own(config.model, classes, sample)
    if not pretrained and config.weights is not None:
        from fedc2i.models import weights

        model = weights.given_to(model, config.weights)
    frozen = config.batch_statistics == "frozen" or (config.batch_statistics == "auto" and pretrained)
    wanted = str(config.train) if config.train != "auto" else "head" if pretrained else "all"
    if wanted == "all" and not frozen and not pretrained:
        return model
    return model.restricted(wanted, statistics=not frozen)


def _build_own(name: str, classes: Sequence[str], sample: InputSpec) -> Model:
    """A model that is not pretrained, by its name or ``FILE.py:FUNCTION``."""
    if name.endswith(".py"):
        raise UserError(f"{one_line(name)}: add :FUNCTION, the function in that file that makes the model")
    if not is_plugin(name):
        return networks.build(name, len(classes), sample)
    try:
        built = _load_object(name, lambda found: callable(found) and not _is_method(found))(len(classes), sample.shape)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}(classes, shape): {type(error).__name__}: {error}") from error
    if not isinstance(built, Model):
        raise UserError(f"{name} must return fedc2i.split(module, head=...), got {type(built).__name__}")
    return built


def _load_object(name: str, fits: Callable[[Any], bool]) -> Any:
    """What FILE.py:NAME names, sent to worker processes by value: they cannot import it."""
    from fedc2i.core.plugins import load_plugin  # for own files only

    found, module = load_plugin(name, fits)
    cloudpickle.register_pickle_by_value(module)
    return found
