"""tests/gpu/_isolated.py: one bad call is one failure, and the next one runs in a fresh child."""

import os
import time

import pytest

from tests.gpu._isolated import Isolated


def note_process(path) -> None:
    path.write_text(str(os.getpid()))


def fail() -> None:
    raise ValueError("as it should")


@pytest.fixture
def isolated(monkeypatch):
    monkeypatch.delenv("MOK_TESTS_IN_PROCESS", raising=False)
    child = Isolated()
    yield child
    child.close()


def test_calls_share_a_child_until_one_fails(isolated, tmp_path):
    path = tmp_path / "process"
    processes = []
    for function, arguments, seconds, message in [
        (fail, (), 30, "ValueError: as it should"),
        (os._exit, (3,), 30, "died with exit code 3"),
        (time.sleep, (60,), 1, "no answer within 1 seconds"),
    ]:
        for _ in range(2):
            isolated.run(note_process, path)
            processes.append(int(path.read_text()))
        with pytest.raises(pytest.fail.Exception, match=message):
            isolated.run(function, *arguments, seconds=seconds)
    assert processes[::2] == processes[1::2]
    assert len(set(processes)) == 3
    assert os.getpid() not in processes


def test_in_process_where_a_tool_watches_one(isolated, monkeypatch, tmp_path):
    monkeypatch.setenv("MOK_TESTS_IN_PROCESS", "1")
    isolated.run(note_process, tmp_path / "process")
    assert (tmp_path / "process").read_text() == str(os.getpid())
    with pytest.raises(ValueError, match="as it should"):
        isolated.run(fail)
