from types import SimpleNamespace

import pytest

from lehr.training import compile_times


@pytest.fixture
def folder(tmp_path, monkeypatch):
    given = SimpleNamespace(jax_compilation_cache_dir=str(tmp_path / "cache"))
    monkeypatch.setattr(compile_times.jax, "config", given)
    return tmp_path / "cache"


def test_the_last_time_counts_and_the_oldest_is_forgotten(folder, monkeypatch):
    monkeypatch.setattr(compile_times, "_MOST", 2)
    assert compile_times.last_time("a") is None
    for key, seconds in (("a", 12.34), ("b", 1.0), ("a", 2.04), ("c", 3.0)):
        compile_times.remember(key, seconds)
    assert [compile_times.last_time(key) for key in "abc"] == [2.0, None, 3.0]


@pytest.mark.parametrize("content", ["", "[]", '{"a": "x"}', '{"a": NaN}', "\0" * 9])
def test_a_damaged_file_is_as_good_as_none(folder, content):
    folder.mkdir()
    (folder / "compile_times.json").write_text(content)
    assert compile_times.last_time("a") is None
    compile_times.remember("a", 4.0)
    assert compile_times.last_time("a") == 4.0


@pytest.mark.parametrize("place", [None, "gs://bucket/cache"])
def test_without_a_folder_nothing_is_remembered(monkeypatch, place):
    monkeypatch.setattr(compile_times.jax, "config", SimpleNamespace(jax_compilation_cache_dir=place))
    compile_times.remember("a", 4.0)
    assert compile_times.last_time("a") is None
