"""NEURON_RT_* variables and log lines."""

from __future__ import annotations

import re
from datetime import datetime

import pytest

from neuron_runtime import env, rtlog
from neuron_runtime.errors import NRT_STATUS, NrtError
from neuron_runtime.rtlog import Level


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0,2,4-5", (0, 2, 4, 5)), (" 3 , 1 ", (3, 1))],
)
def test_core_lists(text: str, cores: tuple[int, ...]) -> None:
    assert env.parse_core_list(text) == cores


@pytest.mark.parametrize(
    "text", ["", "x", "0-", "-1", "3-1", "0,,1", "0-3,2", "0 1", "\u0661", "1.5", "0-9999999"]
)
def test_malformed_core_lists_are_refused(text: str) -> None:
    with pytest.raises(NrtError, match="NEURON_RT_VISIBLE_CORES") as caught:
        env.parse_core_list(text)
    assert caught.value.status is NRT_STATUS.NRT_INVALID


def test_defaults() -> None:
    config = env.read({})
    assert config.visible_cores is None
    assert config.num_cores == 0
    assert config.exec_timeout_s == 30
    assert not config.validate_hash
    assert not config.report_numerical_errors
    assert config.root_comm_id is None


def test_everything_set() -> None:
    config = env.read(
        {
            "NEURON_RT_VISIBLE_CORES": "4-5",
            "NEURON_RT_NUM_CORES": "2",
            "NEURON_RT_EXEC_TIMEOUT": "600",
            "NEURON_RT_VALIDATE_HASH": "TRUE",
            "NEURON_RT_NUMERICAL_ERRORS_VERBOSITY": "critical",
            "NEURON_RT_ROOT_COMM_ID": "node1:63423",
            "NEURON_RT_VIRTUAL_CORE_SIZE": "2",
        }
    )
    assert config.visible_cores == (4, 5)
    assert config.num_cores == 2
    assert config.exec_timeout_s == 600
    assert config.validate_hash
    assert config.report_numerical_errors
    assert config.root_comm_id == ("node1", 63423)
    assert config.lnc == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NEURON_RT_NUM_CORES", "two"),
        ("NEURON_RT_NUM_CORES", "-1"),
        ("NEURON_RT_EXEC_TIMEOUT", "0"),
        ("NEURON_RT_EXEC_TIMEOUT", "1e3"),
        ("NEURON_RT_VALIDATE_HASH", "maybe"),
        ("NEURON_LOGICAL_NC_CONFIG", "0"),
        ("NEURON_RT_ROOT_COMM_ID", "10.0.0.1"),
        ("NEURON_RT_ROOT_COMM_ID", "10.0.0.1:0"),
        ("NEURON_RT_ROOT_COMM_ID", "10.0.0.256:44000"),
        ("NEURON_RT_ROOT_COMM_ID", "a b:44000"),
        ("NEURON_RT_ROOT_COMM_ID", "[::zz]:44000"),
        ("NEURON_RT_ROOT_COMM_ID", ":44000"),
    ],
)
def test_bad_values_name_the_variable(name: str, text: str) -> None:
    with pytest.raises(NrtError, match=name) as caught:
        env.read({name: text})
    assert caught.value.status is NRT_STATUS.NRT_INVALID
    assert repr(text) in str(caught.value)


def test_root_comm_id_forms() -> None:
    assert env.parse_root_comm_id("10.1.2.3:44000") == ("10.1.2.3", 44000)
    assert env.parse_root_comm_id("[fe80::1]:1") == ("fe80::1", 1)


def test_log_line_has_the_runtimes_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    when = datetime(2025, 9, 19, 18, 57, 20, 782962)
    line = rtlog.format_line(when, Level.ERROR, "TDRV", "function_name", "text")
    assert re.fullmatch(
        r"2025-Sep-19 18:57:20\.782962  \d+:\d+  ERROR  TDRV:function_name      text", line
    )
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "WARN")
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL_NRT", "debug")
    rtlog.log(Level.INFO, "TDRV", "f", "hidden")
    rtlog.log(Level.WARNING, "TDRV", "f", "shown")
    rtlog.log(Level.DEBUG, "NRT", "f", "detail")
    written = capsys.readouterr().err.splitlines()
    assert [text.rsplit(" ", 1)[1] for text in written] == ["shown", "detail"]
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "QUIET")
    rtlog.log(Level.ERROR, "TDRV", "f", "hidden")
    assert capsys.readouterr().err == ""
