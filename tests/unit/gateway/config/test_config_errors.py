"""Tests of invalid configuration files: each mistake is reported with its place."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import ConfigError, load_config
from gateway.config.file_reader import read_file
from gateway.config.loader import _build
from gateway.config.yaml_source import MAX_FILE_BYTES, YamlSource, parse_yaml

CORPUS = Path(__file__).parents[3] / "data" / "config"
ENV = {"PENSTOCK_SECRET": "hunter2-hunter2"}
EXPECT = re.compile(r"# expect (\d+):(\d+) (.+)")


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, ENV)
    return caught.value


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_mistake_of_a_file_is_reported_at_its_line_and_column(path: Path) -> None:
    expected = [
        (int(line), int(column), text) for line, column, text in EXPECT.findall(path.read_text())
    ]
    problems = refusal(path).problems
    assert [(problem.line, problem.col) for problem in problems] == [
        (line, column) for line, column, _ in expected
    ], problems
    for problem, (_, _, text) in zip(problems, expected, strict=True):
        assert text in str(problem)
        assert str(problem).startswith(f"{path}:{problem.line}:{problem.col} ")


def test_the_corpus_has_not_shrunk() -> None:
    assert len(list(CORPUS.glob("*.yaml"))) >= 55


def test_no_error_shows_the_value_of_a_reference() -> None:
    for path in CORPUS.glob("*.yaml"):
        assert ENV["PENSTOCK_SECRET"] not in str(refusal(path))


@pytest.mark.parametrize(
    ("raw", "place", "message"),
    [
        (b"", (1, 1), "is empty"),
        (b"# only a comment\n", (1, 1), "is empty"),
        (b"version: 1\nname: \xff\n", (2, 7), "the configuration is not UTF-8 text"),
        (b"version: 1\nname: a\x00b\n", (2, 8), "a character that YAML does not allow"),
        (b"- " * 3000, (1, 1), "the configuration is nested too deeply"),
        (b"[" * 100_000, (1, 1), "the configuration is nested too deeply"),
        (b"#" * (MAX_FILE_BYTES + 1), (1, 1), "is larger than 1 MiB"),
        (b"a: &x [*x]\n", (1, 4), "an alias contains itself"),
    ],
)
def test_invalid_yaml_is_rejected_at_the_place_of_the_error(
    raw: bytes, place: tuple[int, int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(raw, "f.yaml", {}, read_file)
    (problem,) = caught.value.problems
    assert ((problem.line, problem.col), message in problem.message) == (place, True), problem


def test_an_alias_bomb_is_rejected_quickly() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases expand to more than"):
        parse_yaml("\n".join(lines).encode(), "f.yaml", {}, read_file)


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    assert (
        f"{tmp_path / 'none.yaml'}:1:1 the configuration file cannot be read: No such file"
        in str(refusal(tmp_path / "none.yaml"))
    )


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_rejected_with_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_yaml(text.encode("utf-8", "surrogatepass"), "f.yaml", {}, read_file)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "1s", "1MiB", "http://h:1", "a"])
)
KEYS = st.sampled_from(["url", "name", "key", "tp", "endpoints", "policy", "pool"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["version", "pools", "models", "listeners", "limits", "tenants"]), VALUES
    )
)
def test_any_values_are_accepted_or_rejected_with_config_error(data: dict[str, object]) -> None:
    source = YamlSource("f.yaml")
    source.data = data
    with contextlib.suppress(ConfigError):
        _build(source)
