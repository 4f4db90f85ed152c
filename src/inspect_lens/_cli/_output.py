"""Text for people, or one JSON object for programs."""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
import typer.core

from inspect_lens._base.artifact import with_interval
from inspect_lens.errors import ArtifactError, SpecError
from inspect_lens.probe import AnyProbe, Evaluation, Transfer, Validity, format_p_value
from inspect_lens.vector import Vector

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Layers = Annotated[str, typer.Option(help="'all', or numbers such as 8,10-14.")]
BaseUrl = Annotated[
    str, typer.Option(help="Address of a running server, such as http://localhost:8000.")
]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Accept a store of another model, to measure transfer.")
]
AllowSeen = Annotated[
    bool,
    typer.Option("--allow-seen", help="Accept samples that took part in making it; says how many."),
]


def writable(param: typer.CallbackParam, out: str) -> str:
    """Judge where a result goes, before it costs anything."""
    named = max(param.opts, key=len) if param.opts[0].startswith("-") else "FILE"
    if not out and param.required:
        raise SpecError(f"{named}: is empty; allowed is a path; say where the result goes")
    out, said = out.removeprefix("file://"), getattr(param, "help", None) or ""
    if "://" in out:
        if "URL" not in said:
            raise SpecError(f"{named}={out}: is an address; allowed is a path on this machine")
        with reaching(f"{named}={out}"):
            there_already(out)
    elif out:
        place = Path(out).absolute()
        is_file = "folder" not in said.lower()
        if is_file and place.is_dir():
            raise ArtifactError(f"{named}={out}: is a folder; name a file in it")
        there = place.parent if is_file else place
        there = next(p for p in (there, *there.parents) if os.path.lexists(p))
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            kind = "a folder that you may not write to" if there.is_dir() else "no folder"
            raise ArtifactError(f"{named}={out}: {there} is {kind}; name another place")
    return out


@contextmanager
def reaching(place: str) -> Iterator[None]:
    """Whatever a file system raises, that of a store of objects too, says which place it was."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        reason = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
        raise ArtifactError(
            f"{place}: cannot be written ({reason}); check the address and "
            "its credentials, or name a path on this machine"
        ) from None


def there_already(place: str) -> bool:
    """Whether there is something at a path or an address."""
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(place)
    return bool(filesystem.exists(path))


def finite(param: typer.CallbackParam, value: float | None) -> float | None:
    """Refuse NaN and infinity, which pass every bound or none."""
    if value is not None and not math.isfinite(value):
        raise SpecError(f"{max(param.opts, key=len)}={value}; allowed is a finite number")
    return value


def number(help: str, *, min: float | None = None, max: float | None = None) -> Any:
    return typer.Option(help=help, callback=finite, min=min, max=max)


def out_folder(help: str) -> Any:
    return typer.Option(help=help, callback=writable)


_BOTH: Final = frozenset({"out", "recipe", "memory", "as_json"})
_RENAMED: Final = (
    ("any_model", "check_model"), ("probe", "probes"), ("max_mib", "max_bytes"), ("role", "roles"),
)  # fmt: skip
"""Parameters of commands whose argument in Python has another name."""
_RECIPE: Final = frozenset({"work", "model", "base_url", "model_arg"})


def check_recipe_options(context: typer.Context, *, with_recipe: bool) -> None:
    """Refuse options that would be ignored: a recipe says what is made, and needs its own."""
    typed = [(p.name, p.opts[0]) for p in _typed(context)]
    wrong = [o for n, o in typed if n not in _BOTH and (n in _RECIPE) != with_recipe]
    if wrong:
        how = "not used with --recipe" if with_recipe else "used with --recipe only"
        raise SpecError(
            f"{', '.join(wrong)}: {how}; a recipe says what is trained and on what, and --work, "
            "--model, --base-url and -M say where; edit the recipe, or leave the option out"
        )


_CONTROL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal acts on or turns round, and halves of characters, which no stream takes."""


def printable(text: str) -> str:
    """A text for a terminal; names and notes in it may be a stranger's, and paths no UTF-8."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def check_options_of(context: typer.Context, kind: str) -> None:
    """Refuse options whose help says that they are of another kind only."""
    for parameter in _typed(context):
        of, only, _ = str(getattr(parameter, "help", "")).partition(" only: ")
        if only and of != kind:
            raise SpecError(f"{parameter.opts[0]}: is of {of} only, not of {kind}; leave it out")


def check_read_with(context: typer.Context, flag: str, given: object, *names: str) -> None:
    """Refuse options that nothing reads where the one of `flag` is not given."""
    wrong = [] if given else [p.opts[0] for p in _typed(context) if p.name in names]
    if wrong:
        raise SpecError(f"{', '.join(wrong)}: read with {flag} only; add it, or leave these out")


def _typed(context: typer.Context) -> list[Any]:
    """Parameters that stand on the command line."""
    sources = ((p, context.get_parameter_source(p.name or "")) for p in context.command.params)
    return [p for p, source in sources if getattr(source, "name", "") == "COMMANDLINE"]


def emit(result: Mapping[str, Any], lines: Iterable[str], *, as_json: bool) -> None:
    """Write a result to standard output."""
    if as_json:
        # Strict parsers take no NaN; numbers of numpy are numbers, and what else is left is a text.
        plain = json.dumps(result, default=lambda one: getattr(one, "tolist", one.__str__)())
        plain = json.loads(plain, parse_constant=lambda _: None)
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
    else:
        sys.stdout.writelines(f"{printable(line)}\n" for line in lines)


def examples(*lines: str) -> str:
    """The end of a command's help: what one types, as it stands."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class _Held(logging.Handler):
    """Keeps what is logged, each text once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.texts[record.getMessage()] = None


@contextmanager
def libraries_last() -> Iterator[None]:
    """Have our own words reach standard error first, and what libraries warn of behind them.

    An error says itself what is wrong, so nothing stands in front of it then. That the hub does
    not answer is said at once, as it is asked for more than a minute.
    """
    said: list[str] = []

    def say_wait(record: logging.LogRecord) -> bool:
        is_wait = "retry" in record.getMessage().lower()
        if is_wait and not said and "--json" not in sys.argv:
            said.append(
                "note: the Hugging Face hub does not answer and is asked again, which may take "
                "minutes; HF_HUB_OFFLINE=1 takes what is on this machine\n"
            )
            sys.stderr.write(said[0])
        return not is_wait

    hub, held = logging.getLogger("huggingface_hub.utils._http"), _Held()
    loggers = [logging.getLogger(name) for name in ("huggingface_hub.utils", "inspect_ai")]
    hub.addFilter(say_wait)
    for one in loggers:
        one.addHandler(held)
        one.propagate = False
    try:
        yield
    finally:
        hub.removeFilter(say_wait)
        for one in loggers:
            one.removeHandler(held)
            one.propagate = True
    sys.stderr.writelines(f"note: {printable(text)}\n" for text in held.texts)


class Interrupted(Exception):
    """Ctrl-C, and what is there of the command's work."""


@contextmanager
def on_interrupt(left: Callable[[], str]) -> Iterator[None]:
    """Say where a command that Ctrl-C ends in this block leaves off."""
    try:
        yield
    except KeyboardInterrupt:
        going_on = "and the same command goes on from there"
        raise Interrupted(f"Ctrl-C ended it; {left()}, {going_on}") from None


def kept_fits(folder: str) -> AbstractContextManager[None]:
    """As `on_interrupt`, for a command that keeps its finished fits where a folder is named."""
    return on_interrupt(lambda: f"finished fits are in {folder}") if folder else nullcontext()


def found(app: typer.Typer) -> tuple[list[str], Any]:
    """The words that name the command that runs, and the command."""
    command: Any = typer.main.get_command(app)
    words = []
    for word in sys.argv[1:]:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
            words.append(word)
    return words, command


class CommandGroup(typer.core.TyperGroup):
    """A group whose help has the whole summary of each command, over several lines if need be."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=_NO_LIMIT))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


_NO_LIMIT: Final = 1000


def running(app: typer.Typer) -> str:
    """The command that runs, as it is typed."""
    return " ".join(["inspect-lens", *found(app)[0]])


_SECRET: Final = re.compile(
    r"""((?:api[-_]?keys?|token|secrets?|passwords?|authorization)(?:=|["']\s*:)|[?&]key=).+""",
    re.IGNORECASE | re.DOTALL,
)
"""Names in settings, in the JSON of a setting and in addresses, and all that follows."""
_USER_OF_URL: Final = re.compile(r"(?<=://)[^/?#\s]*@")


def typed_command() -> str:
    """The command that runs, as a card keeps it: every word, but no key and no password."""
    words = (_USER_OF_URL.sub("***@", word) for word in sys.argv[1:])
    typed = shlex.join(["inspect-lens", *(_SECRET.sub(r"\1***", word) for word in words)])
    # A name of a file may be no UTF-8, and a card is.
    return typed.encode("utf-8", "backslashreplace").decode("utf-8")


def in_shell_words(message: str, command: Any) -> str:
    """A message of the library with the flags of a command, not Python's arguments."""
    flags: dict[str, str] = {
        str(p.name): max(p.opts, key=len) for p in command.params if p.opts[0].startswith("-")
    }
    if "api_key" in flags:  # the key that was refused may be of either
        flags["api_key"] += " or VLLM_API_KEY"
    flags |= {name: flags[ours] for ours, name in _RENAMED if ours in flags}

    if "base_url" in flags:
        message = message.replace("--model-base-url", "--base-url")  # Inspect's flag
    pairs = _pairs(flags)

    def in_words(found: re.Match[str]) -> str:
        name, value = found.groups()
        if re.search(r"--[a-z-]+ $", message[: found.start()]):  # what a flag takes
            return found[0]
        if name in pairs:  # whose values are JSON
            switches = {"True": "true", "False": "false", "None": "null"}
            return f"--{pairs[name]} {name}={switches.get(value, value)}"
        if name not in flags:
            return found[0]
        if value.startswith(("[", "(")):
            value = value.strip("[()],").replace(" ", "")
        # Of a switch the flag alone; else the value, where one stands there.
        return flags[name] + (f"={value}" if value not in ("", "True", "False", "None") else "")

    if (first := re.match(r"([a-z]\w*): ", message)) and first[1] in flags:
        message = flags[first[1]] + message[first.end(1) :]
    value = r"\[[^\]]*\]|\([^)]*\)|True|False|None|[^\s;,.()]*"
    # Where a word begins: in a path or an address such a pair is a part of a name.
    return re.sub(rf"(?<![^\s(\[,;`])([a-z]\w*)=({value})", in_words, message)


def _pairs(flags: Mapping[str, str]) -> dict[str, str]:
    """By name what the command takes as `--option name=…` or `--setting name=…`."""
    # Whose words these are has been imported, if it is the one that speaks.
    if "option" in flags and (data := sys.modules.get("inspect_lens.data")):
        readers = [info.read for info in data.DATASETS.values()]
        names = {name for read in readers for name in inspect.signature(read).parameters}
        names |= set(sys.modules["inspect_lens.data._table"].Columns.model_fields)
        return dict.fromkeys(names - set(flags), "option")
    if "setting" in flags and (train := sys.modules.get("inspect_lens.train")):
        kinds = [kind for kind, _ in train.FAMILIES.values()]
        names = {name for kind in kinds for name in inspect.signature(kind).parameters}
        return dict.fromkeys(names - set(flags), "setting")
    return {}


def fail(error: Exception, code: int, message: str = "", kind: str = "") -> NoReturn:
    """Write an error to standard error, as JSON where JSON was asked for, and end."""
    message, kind = " ".join((message or str(error)).split()), kind or type(error).__name__
    if "--json" in sys.argv:
        sys.stderr.write(json.dumps({"error": kind, "message": message}) + "\n")
    else:
        sys.stderr.write(f"{kind}: {printable(message)}\n")
    sys.exit(code)


def parse_layers(value: str, *, none: bool = False) -> Any:
    """`all`, or layer numbers and ranges such as `8,10-14`; `none` says whether it may be that."""
    if value == "all":
        return value
    layers: list[int] = []
    for part in value.split(","):
        told = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        found = range(int(told[1]), int(told[2] or told[1]) + 1) if told else ()
        if not found:
            words = "'all', 'none'" if none else "'all'"
            raise SpecError(f"layers={value!r}; allowed are {words} and numbers such as 8,10-14")
        layers += found
    return layers


def parse_settings(
    values: Iterable[str], flag: str = "--setting", example: str = "C=0.01"
) -> dict[str, Any]:
    """`key=value` pairs; values that are JSON are read as such."""
    made: dict[str, Any] = {}
    for pair in values:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise SpecError(f"{flag} {pair!r}: is no key=value; allowed is one such as {example}")
        if key in made:
            raise SpecError(f"{flag} {pair!r}: {key} was given before; allowed is one value for it")
        try:
            made[key] = json.loads(text)
        except ValueError:
            made[key] = text
    return made


def parse_model_args(values: Iterable[str] | None, base_url: str) -> dict[str, Any]:
    """Arguments of the provider, as `-M` and `--base-url` give them."""
    return parse_settings(values or (), "-M", "max_model_len=4096") | (
        {"base_url": base_url} if base_url else {}
    )


CHOSEN_HERE: Final = (
    "* was chosen on the samples that its row is measured on, so its figures are too high: measure "
    "it on held-out ones."
)
TIED_HERE: Final = (
    "~ is not shown to be worse than the best: these samples do not tell which of them is better."
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A probe, and what a command has to say of it."""

    probe: AnyProbe
    folder: str
    evaluations: tuple[Evaluation, ...]
    transfers: tuple[Transfer, ...] = ()
    """Whether what was learned on the training set holds on each of the others."""
    report: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the card, with `evaluations` in the place of its own."""
        shown = self.probe.card
        if self.evaluations:
            shown = shown.model_copy(update={"evaluations": self.evaluations})
        unmeasured = (
            "Nothing was measured: there is no held-out set, so what the probe finds in new "
            "samples is not known; name one with --held-out, or run probe evaluate."
        )
        return (*shown.warnings, *(() if shown.evaluations else (unmeasured,)))

    def result(self) -> dict[str, Any]:
        """The facts as a dict for JSON."""
        card = self.probe.card
        return {
            "probe": self.probe.name,
            "folder": self.folder,
            "sha256": self.probe.sha256,
            "layers": list(card.layers),
            "thresholds": [t.model_dump(mode="json") for t in card.thresholds],
            "calibration": card.calibration.model_dump(mode="json") if card.calibration else None,
            "evaluations": [e.model_dump(mode="json") for e in self.evaluations],
            "transfers": [t.model_dump(mode="json") for t in self.transfers],
            "warnings": list(self.warnings),
            "report": self.report,
        }

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.probe.name}: layer {', '.join(map(str, self.probe.layers))}, {self.folder}"
        for text in self.warnings:
            yield f"  WARNING: {text}"
        if self.probe.card.training and (ties := self.probe.card.training.ties):
            yield f"  {ties}"
        for t in self.probe.card.thresholds:
            few = f", {t.few_groups}" if t.few_groups else ""
            rest = f" ({t.n_left_out} positive ones left out)" if t.n_left_out else ""
            of = "tokens of " if t.unit == "tokens" else ""
            above = t.claim or f"{t.n_above} of {t.n_control} {of}{t.control}{rest} above it"
            few += f", set with {differs}" if (differs := self.probe.card.set_with(t)) else ""
            yield f"  threshold {t.value:.5g} for {t.holds_for}, set for {t.fpr:g}: {above}{few}"
        for e in self.evaluations:
            yield from self._of_set(e)
        for verdict in self.transfers:
            yield f"  {verdict.statement}"
        if self.report:
            yield f"  report: {self.report}"

    def _of_set(self, e: Evaluation) -> Iterator[str]:
        """What was measured on one set."""
        area = with_interval(e.auroc, e.auroc_interval, ".4f")
        said = "one class" if e.auroc is None else f"AUROC {area}"
        if e.recall is not None:
            said += f", recall {with_interval(e.recall, e.recall_interval)}"
        yield f"  {e.name}: {said}"
        yield f"    beside it: {Validity.of(e).beside_baselines()}"
        answer = str(self.probe.card.answer)
        told = next((r for r in e.rates if r.statistic == answer), None)  # which has `fpr`
        for r in e.rates:
            if r is not told and r.rate is not None and r.interval is not None:
                share = f"{with_interval(r.rate, r.interval)} of {r.honest}"
                yield f"    threshold for {r.statistic}, set for {r.nominal:g}: {share} above it"
        if e.recalls:
            at = ", ".join(f"{r.recall:.3f} for a rate of {r.fpr:g}" for r in e.recalls)
            yield f"    recall with thresholds set on {e.recalls[0].control}: {at}"
        for b in e.baselines:
            area = with_interval(b.auroc, ends=".4f")
            test = f", {b.test}" if b.test and b.p_value is None else ""
            if b.p_value is not None:
                test = f", p {format_p_value(b.p_value)} that the probe is no better"
            yield f"    {'best ' if b is e.best_baseline else ''}baseline {b.name}: {area}{test}"
        if e.control_shift is not None and e.control_shift.statement:
            yield f"    {e.control_shift.statement}"
        if e.too_few:
            yield f"    {e.too_few}: no verdict can rest on it"
        if e.n_seen != 0:
            yield f"    {seen(self.probe, e.n_seen)}"


def seen(made: AnyProbe | Vector, n: int | None) -> str:
    """How many samples of a set took part in making something, in words."""
    if n is not None:
        return f"{n} of these samples took part in making it"
    return "whether these samples took part in making it cannot be told: " + (
        "its card does not list its own"
        if made.card.seen is None
        else "the store does not say what they are; collect it anew"
    )
