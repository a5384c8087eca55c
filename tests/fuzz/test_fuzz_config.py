"""Whatever a configuration says, it becomes a config or an error that is told in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiomooncake import ConfigError, ReplicateConfig, StoreConfig, WarmupPolicy
from aiomooncake._dialects import RULES
from aiomooncake._settings import KEYS, SETTINGS
from aiomooncake.config import parse_size, parse_target, split_address
from tests.fuzz.strategies import (
    anything,
    chosen,
    examples,
    extreme_numbers,
    odd_text,
    only_typed_errors,
)

DIALECTS = st.one_of(st.none(), st.sampled_from(sorted(RULES)), anything)
FOREIGN = sorted({name for rules in RULES.values() for key in rules.keys for name in key.names})
VARIABLES = sorted(
    {name for setting in SETTINGS.values() for name in setting.env}
    | {name for rules in RULES.values() for key in rules.keys for name in key.variables}
    | {"MOONCAKE_CONFIG_PATH", "LMCACHE_CONFIG_FILE", "LMCACHE_EXTRA_CONFIG", "MOONCAKE_MASTR"}
    | {"MOONCAKE_STANDALONE_STORAGE", "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"}
)
# What is nearly right gets farther.
NEARLY: list[Any] = [
    "10.0.0.1:50051", "localhost:1", "[::1]:2", "etcd://a:1,b:2", "redis://u:p@h:1", "h:0", "4gb",
    "512MiB", "0", "tcp", "rdma", "mlx5_0,mlx5_1", "on", '{"0":"mlx5_0"}', "plugin://x",
    "mooncakestore://h:1/?device=m", "P2PHANDSHAKE", 0, 1024, 2**40, True, None,
    {"0": "mlx5_0", "x": None},
]  # fmt: skip
values = st.one_of(anything, chosen(NEARLY))
place = st.fixed_dictionaries(
    {},
    optional={
        name: st.one_of(st.none(), st.integers(0, 9), extreme_numbers, odd_text)
        for name in ("rank", "tp_size", "pp_size", "gpu")
    },
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), odd_text, values),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(FOREIGN), inner, max_size=3)
    ),
    max_leaves=8,
)


def check(config: StoreConfig) -> None:
    """What was accepted can be shown, copied, hashed and compared."""
    assert repr(config)
    assert config.replace() == config
    assert hash(config) == hash(config.replace())


@examples(250)
@given(
    st.one_of(st.just("10.0.0.1:1"), values),
    st.dictionaries(st.one_of(st.sampled_from(sorted(SETTINGS)), odd_text), values, max_size=4),
)
def test_fields(master: Any, fields: dict[str, Any]) -> None:
    with only_typed_errors():
        check(StoreConfig(master, **fields))
    with only_typed_errors():
        check(StoreConfig("10.0.0.1:1").replace(**fields))


@examples(200)
@given(
    st.one_of(
        anything,
        st.dictionaries(
            st.one_of(st.sampled_from([*KEYS, *FOREIGN, "extra_config", "remote_url"]), odd_text),
            st.one_of(values, st.dictionaries(st.sampled_from(FOREIGN), values, max_size=4)),
            max_size=6,
        ),
    ),
    DIALECTS,
    place,
)
def test_mappings(mapping: Any, dialect: Any, where: dict[str, Any]) -> None:
    with only_typed_errors():
        check(StoreConfig.from_mapping(mapping, dialect=dialect, **where))


@examples(250)
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(VARIABLES), odd_text),
        st.one_of(odd_text, values.filter(lambda value: isinstance(value, str))),
        max_size=6,
    ),
    DIALECTS,
    place,
)
def test_environments(environ: dict[str, str], dialect: Any, where: dict[str, Any]) -> None:
    with only_typed_errors():
        check(StoreConfig.from_env(environ, dialect=dialect, **where))


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Draw what stands in a file: JSON, JSON that was damaged, or anything."""
    kind = draw(st.sampled_from(["json", "json", "damaged", "bytes", "deep", "number"]))
    if kind == "bytes":
        return draw(st.binary(max_size=40))
    if kind == "deep":
        return b'{"a":' * draw(st.sampled_from([10, 5000])) + b"1" + b"}" * 10
    if kind == "number":
        return b'{"global_segment_size": %s}' % (b"9" * draw(st.sampled_from([20, 5000])))
    keys = st.sampled_from([*KEYS, *FOREIGN, "extra_config"])
    given = draw(st.dictionaries(keys, json_values, max_size=5))
    text = json.dumps(given, default=str).encode("utf-8", "surrogatepass")
    if kind == "damaged":
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=3)) + text[at + 1 :]
    return text


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"

    @examples(200)
    @given(contents(), DIALECTS, place)
    def any_file(content: bytes, dialect: Any, where: dict[str, Any]) -> None:
        path.write_bytes(content)
        with only_typed_errors():
            check(StoreConfig.from_file(path, dialect=dialect, **where))
        sglang = isinstance(dialect, str) and dialect == "sglang"
        variable = RULES["sglang"].path_variable if sglang else "MOONCAKE_CONFIG_PATH"
        with only_typed_errors():
            check(StoreConfig.from_env({variable: str(path)}, dialect=dialect, **where))

    any_file()


@examples(200)
@given(st.one_of(anything, odd_text))
def test_paths(path: Any) -> None:
    with only_typed_errors():
        StoreConfig.from_file(path)
    if isinstance(path, str):
        for dialect in (None, "vllm", "lmcache"):
            with only_typed_errors():
                StoreConfig.from_env(
                    {"MOONCAKE_CONFIG_PATH": path, "LMCACHE_CONFIG_FILE": path},
                    dialect=dialect,
                )


@st.composite
def urls(draw: st.DrawFn) -> Any:
    """Draw a target, or something that looks like one."""
    if not draw(st.integers(0, 5)):
        return draw(anything)
    schemes = ["", "mooncake://", "mooncakestore://", "local://", "memory://", "etcd://"]
    scheme = draw(st.sampled_from([*schemes, "redis://", "k8s://", "http://", "MOONCAKE://", "x:"]))
    place = draw(st.one_of(odd_text, st.sampled_from(["", "h:1", "h", "u:p@h:1", "[::1]:1", "n"])))
    pairs = draw(
        st.lists(st.tuples(st.one_of(st.sampled_from(list(KEYS)), odd_text), odd_text), max_size=3)
    )
    query = "&".join(f"{name}={value}" for name, value in pairs)
    return f"{scheme}{place}{draw(st.sampled_from(['', '/', '?', '/?', '#']))}{query}"


@examples(350)
@given(urls())
def test_targets(url: Any) -> None:
    with only_typed_errors():
        target = parse_target(url)
        assert repr(target)
        check(target.to_config("127.0.0.1:1" if target.kind == "local" else None))
    with only_typed_errors():
        check(StoreConfig.from_url(url))


@examples(250)
@given(anything)
def test_sizes_and_addresses(value: Any) -> None:
    with only_typed_errors():
        size = parse_size(value, field="size")
        assert type(size) is int
        assert 0 <= size < 2**63
    with only_typed_errors():
        host, port = split_address(value, field="address")
        assert host
        assert 0 < port < 65536


@examples(200)
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(list(ReplicateConfig.__dataclass_fields__)), odd_text),
        values,
        max_size=3,
    ),
    st.dictionaries(
        st.one_of(st.sampled_from(list(WarmupPolicy.__dataclass_fields__)), odd_text),
        st.one_of(extreme_numbers, values),
        max_size=3,
    ),
)
def test_options(placement: dict[str, Any], policy: dict[str, Any]) -> None:
    with only_typed_errors():
        assert repr(ReplicateConfig(**placement))
    with only_typed_errors():
        assert repr(WarmupPolicy(**policy))


def test_a_config_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
