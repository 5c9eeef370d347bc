"""Host lists against recorded output of scontrol and as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.api.hostlist import HostlistError, expand, fold, fold_ordered, fold_sorted

# text, hostnames, hostlist, hostlistsorted (scontrol show ... of Slurm 22.05)
CASES = [
    ("n[001-004]", "n001 n002 n003 n004", "n[001-004]", "n[001-004]"),
    ("n[08-11]", "n08 n09 n10 n11", "n[08-11]", "n[08-11]"),
    ("n[3,1,2]", "n3 n1 n2", "n[3,1-2]", "n[1-3]"),
    ("n1,n1,n2", "n1 n1 n2", "n[1,1-2]", "n[1,1-2]"),
    ("n[1-3],n[2-4]", "n1 n2 n3 n2 n3 n4", "n[1-3,2-4]", "n[1-2,2-3,3-4]"),
    ("n[1-2]-ib[0-1]", "n1-ib0 n1-ib1 n2-ib0 n2-ib1", "n1-ib[0-1],n2-ib[0-1]", None),
    ("n001,n1,n01", "n001 n1 n01", "n[001,1,01]", "n[1,01,001]"),
    ("n1,m1,n2", "n1 m1 n2", "n1,m1,n2", "m1,n[1-2]"),
    ("r2n1,r10n1,r1n1", "r2n1 r10n1 r1n1", "r2n1,r10n1,r1n1", "r1n1,r2n1,r10n1"),
    ("n[1-", "n]", "n]", "n]"),
    ("n1]", "n1]", "n1]", "n1]"),
    (",,a,,b", "a b", "a,b", "a,b"),
    ("", "", "", ""),
]


@pytest.mark.parametrize(("text", "names", "ordered", "by_name"), CASES)
def test_recorded(text: str, names: str, ordered: str, by_name: str | None) -> None:
    assert expand(text) == names.split()
    assert fold_ordered(expand(text)) == ordered
    assert fold_sorted(expand(text)) == (ordered if by_name is None else by_name)


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("n[5-3]", "_parse_single_range: Invalid range: `5-3'"),
        ("n[]", "_parse_single_range: Invalid range: `'"),
        ("n[1-2-3]", "_parse_single_range: Invalid range: `1-2-3'"),
        ("n[0-70000]", "_parse_single_range: Too many hosts in range `0-70000'"),
        ("n[1-3]x", ""),
    ],
)
def test_errors(text: str, detail: str) -> None:
    with pytest.raises(HostlistError) as info:
        expand(text)
    assert str(info.value) == f"Invalid hostlist: {text}"
    assert info.value.detail == detail


def test_product_is_bounded() -> None:
    with pytest.raises(HostlistError):
        expand("n[0-60000][0-60000]")


_NAMES = st.lists(st.from_regex(r"[a-z]{1,2}(-[a-z])?[0-9]{0,4}", fullmatch=True), max_size=30)


@given(_NAMES)
def test_ordered_round_trip(names: list[str]) -> None:
    assert expand(fold_ordered(names)) == names


@given(_NAMES)
def test_fold_is_a_set(names: list[str]) -> None:
    text = fold(names)
    assert sorted(expand(text)) == sorted(set(names))
    assert fold(reversed(expand(text))) == text


@given(st.text(alphabet="n0129[]-, x", max_size=20))
def test_any_text_is_a_list_or_a_clear_error(text: str) -> None:
    message = ""
    names: list[str] = []
    try:
        names = expand(text)
    except HostlistError as error:
        message = str(error)
    assert message.endswith(text) if message else all(names)


@given(st.integers(0, 2000), st.integers(0, 300), st.integers(1, 5))
def test_one_range_folds_to_one_range(first: int, count: int, width: int) -> None:
    names = [f"n{i:0{width}}" for i in range(first, first + count + 1)]
    assert len(expand(fold(names))) == count + 1
    assert fold(names).count(",") == 0
