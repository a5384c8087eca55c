"""What is shipped beside the library holds to the metrics: dashboard, rules, page."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from aiomooncake.observe import HealthState
from aiomooncake.observe.counters import LAG, LATENCY
from aiomooncake.prometheus import METRICS

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "aiomooncake.json").read_text())
PAGE = (ROOT / "docs" / "observability.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

# What a scrape adds.
TARGET = {"job", "instance"}
FUNCTIONS = {
    "sum", "avg", "min", "max", "count", "quantile", "topk", "rate", "increase", "time", "vector",
    "histogram_quantile", "label_values",
}  # fmt: skip
GROUPING = {"by", "without", "on", "ignoring"}
OPERATORS = {"and", "or", "unless"}
TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*) | (?P<string>"[^"]*")
    | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\]) | (?P<number>\d+(?:\.\d+)?)
    | (?P<name>[a-zA-Z_:][\w:]*)
    | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/(){},=<>])""",
    re.VERBOSE,
)


@dataclass
class Query:
    """What a query asks for: metrics, the labels it matches, and those it groups by."""

    metrics: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)
    aggregated: bool = False


def tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        assert found, f"no PromQL at {text[at:]!r}"
        at = found.end()
        kind = found.lastgroup or ""
        if kind != "space":
            yield kind, found[0]


def parse(text: str) -> Query:
    """Read as much of PromQL as the rules and the dashboard use; the rest fails."""
    query = Query()
    rest = [*tokens(text), ("end", "")]
    opened = 0
    place = 0

    def names_until(closing: str) -> list[str]:
        nonlocal place
        names = []
        while rest[place][1] != closing:
            kind, word = rest[place]
            if kind == "name":
                names.append(word)
            place += 1
        place += 1
        return names

    while rest[place][0] != "end":
        (kind, word), following = rest[place], rest[place + 1][1]
        place += 1
        if kind == "sign":
            opened += {"(": 1, ")": -1}.get(word, 0)
            assert opened >= 0, text
        elif kind == "name" and word in GROUPING:
            assert following == "(", text
            place += 1
            labels = names_until(")")
            query.grouped.update(labels)
            query.aggregated |= word == "by"
        elif kind == "name" and word not in OPERATORS:
            if following == "(" or rest[place][1] in GROUPING:
                assert word in FUNCTIONS, f"{word} is no function known here"
            else:
                labels = []
                if following == "{":
                    place += 1
                    labels = names_until("}")
                query.metrics.setdefault(word, set()).update(labels)
    assert not opened, text
    return query


def exported() -> dict[str, set[str]]:
    """Name the samples of a scrape, and the labels of each."""
    samples: dict[str, set[str]] = {}
    for spec in METRICS:
        labels = {*spec.labels, *TARGET}
        samples[spec.exported] = labels
        if spec.kind == "histogram":
            del samples[spec.exported]
            samples |= {f"{spec.name}_{part}": labels for part in ("sum", "count")}
            samples[f"{spec.name}_bucket"] = {*labels, "le"}
    return samples


def rules(name: str) -> list[dict[str, Any]]:
    document = yaml.safe_load((RULES / name).read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def recorded() -> dict[str, set[str]]:
    """Name what the recording rules make, and the labels of each."""
    known = exported()
    made: dict[str, set[str]] = {}
    for rule in rules("recording.yml"):
        query = check(rule["expr"], known | made)
        labels = query.grouped
        if not query.aggregated:
            labels = set().union(*(made[name] for name in query.metrics))
        made[rule["record"]] = labels
    return made


def check(text: str, known: dict[str, set[str]]) -> Query:
    """Check that a query asks only for metrics and labels that there are."""
    query = parse(text)
    there: set[str] = set()
    for name, labels in query.metrics.items():
        assert name in known, f"there is no {name}: {text}"
        assert labels <= known[name], f"{name} has no {labels - known[name]}: {text}"
        there |= known[name]
    assert query.grouped <= there, f"no {query.grouped - there}: {text}"
    return query


# --- the reader of queries itself -------------------------------------------------------------


def test_a_wrong_query_is_found() -> None:
    known = {"a_total": {"job", "code"}}
    assert check('sum by (job) (rate(a_total{code!="X"}[5m])) > 0', known).grouped == {"job"}
    for wrong in (
        "b_total", "a_total{rank=1}", "sum by (rank) (a_total)", "rote(a_total[5m])",
        "sum(a_total", "a_total @ 5",
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            check(wrong, known)


# --- rules ------------------------------------------------------------------------------------


def test_recording_rules_ask_for_what_there_is() -> None:
    made = recorded()
    assert len(made) == len(rules("recording.yml"))
    for name, labels in made.items():
        assert re.fullmatch(r"job:[a-z_]+:\w+", name)
        assert "job" in labels
        assert not labels & {"rank", "instance"}, f"{name} does not add up"


def test_alerts_ask_for_what_there_is() -> None:
    names = [rule["alert"] for rule in rules("alerts.yml")]
    assert len(set(names)) == len(names) >= 10
    known = exported()
    for rule in rules("alerts.yml"):
        query = check(rule["expr"], known)
        labels = query.grouped
        if not query.aggregated:
            labels = set().union(*(known[name] for name in query.metrics))
        assert rule["labels"]["severity"] in {"warning", "critical"}
        texts = rule["annotations"]["summary"] + rule["annotations"]["description"]
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels, rule["alert"]
        for metric in re.findall(r"aiomooncake_\w+", texts):
            assert metric in known, rule["alert"]


def test_the_buckets_that_rules_name_are_there() -> None:
    text = (RULES / "alerts.yml").read_text()
    assert set(re.findall(r'loop_lag_seconds_bucket{le="([^"]+)"', text)) <= set(map(str, LAG))
    dropped = re.search(r"bucket;0\\\.\(([\d|]+)\)", (RULES / "prometheus.yml").read_text())
    assert dropped
    assert {f"0.{digits}" for digits in dropped[1].split("|")} <= set(map(str, LATENCY))


def test_states_and_outcomes_that_rules_name_are_there() -> None:
    text = (RULES / "alerts.yml").read_text()
    for states in re.findall(r'state=~?"([^"]+)"', text):
        assert set(states.split("|")) <= set(get_args(HealthState))


def test_the_example_loads_the_rules() -> None:
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    assert {RULES / name for name in config["rule_files"]} == set(RULES.glob("[ar]*.yml"))


# --- dashboard --------------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_there_is() -> None:
    known = exported()
    used: set[str] = set()
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = check(target["expr"], known)
            used |= query.metrics.keys()
            assert all({"job", "instance"} <= labels for labels in query.metrics.values())
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in query.grouped, (panel["title"], label)
    for variable in DASHBOARD["templating"]["list"][1:]:
        check(variable["definition"].replace(", job)", ")").replace(", instance)", ")"), known)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    shown = {spec.exported for spec in METRICS}
    assert shown - families <= {
        "aiomooncake_connect_attempts_total",
        "aiomooncake_connect_waiting_seconds",
        "aiomooncake_warmups_running",
        "aiomooncake_warmup_duration_seconds",
    }


def test_panels_do_not_lie_on_each_other() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


# --- the page ---------------------------------------------------------------------------------


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_metrics_is_up_to_date() -> None:
    assert script("metrics_table").page(PAGE) == PAGE, "run scripts/metrics_table.py"
    for spec in METRICS:
        assert f"| `{spec.exported}` |" in PAGE


def test_what_the_page_names_is_there() -> None:
    alerts = {rule["alert"] for rule in rules("alerts.yml")}
    assert set(re.findall(r"`(Aiomooncake\w+)`", PAGE)) <= alerts
    known = exported() | recorded()
    (queries, *others) = re.findall(r"^```promql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in "".join([queries, *others]).splitlines():
        check(line, known)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program_runs(program: str) -> None:
    program = program.replace("9108", "0")  # any port that is free
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "JsonFormatter" in program:
        (line,) = done.stderr.splitlines()
        shown = json.loads(re.search(r"^```text\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)[1])  # type: ignore[index]
        assert json.loads(line).keys() == shown.keys()


def test_there_are_programs() -> None:
    assert len(PROGRAMS) == 4
