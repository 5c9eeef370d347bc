"""Text, split and the order of the data."""

from __future__ import annotations

import numpy as np
import pytest

from jobs import train_data
from jobs.train_data import DataError
from jobs.train_spec import TrainSpec, initial_parameters, parameter_shapes


def test_the_library_text_is_source_and_stable() -> None:
    text = train_data.load_text(None, 200_000)
    assert text.size == 200_000
    assert b"import" in text.tobytes()
    assert train_data.digest(text) == train_data.digest(train_data.load_text(None, 200_000))


def test_folder_in_name_order_without_hidden_files(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("text")
    (folder / "b.txt").write_text("bb")
    (folder / "a").mkdir()
    (folder / "a" / "z.txt").write_text("az")
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_text("no")
    assert train_data.load_text(folder, 100).tobytes() == b"azbb"
    assert train_data.load_text(folder, 3).tobytes() == b"azb"
    assert train_data.load_text(folder / "b.txt", 100).tobytes() == b"bb"
    with pytest.raises(DataError, match="no such file"):
        train_data.load_text(folder / "missing", 100)


def test_split_holds_out_a_tenth_and_loses_nothing() -> None:
    text = np.arange(100_000, dtype=np.uint32).astype(np.uint8)
    training, validation = train_data.split(text, 16)
    assert training.size + validation.size == text.size
    assert 0.08 < validation.size / text.size < 0.12
    with pytest.raises(DataError, match="too few"):
        train_data.split(text[:300], 128)


def test_ranks_share_the_global_batch() -> None:
    text = train_data.load_text(None, 50_000)
    whole = train_data.train_batch(text, 5, 17, 8, 16, 0, 1)
    assert whole.shape == (8, 17)
    for ranks in (2, 4):
        parts = [train_data.train_batch(text, 5, 17, 8, 16, r, ranks) for r in range(ranks)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(whole, train_data.train_batch(text, 5, 18, 8, 16, 0, 1))
    assert not np.array_equal(whole, train_data.train_batch(text, 6, 17, 8, 16, 0, 1))


def test_windows_are_text() -> None:
    text = train_data.load_text(None, 50_000)
    starts = train_data.validation_starts(text, 4, 16)
    batch = train_data.validation_batch(text, starts, 16)
    assert bytes(batch[2].astype(np.uint8)) == text[starts[2] : starts[2] + 17].tobytes()
    assert starts[0] == 0
    assert starts[-1] + 17 <= text.size


def test_unigram_entropy_of_known_texts() -> None:
    assert train_data.unigram_entropy(np.zeros(10, np.uint8)) == 0
    assert train_data.unigram_entropy(np.arange(256, dtype=np.uint8)) == 8
    half = np.array([1, 1, 2, 3], np.uint8)
    assert train_data.unigram_entropy(half) == 1.5


def test_spec_refuses_what_cannot_be() -> None:
    TrainSpec().check(4)
    for change, words in (
        ({"layers": 0}, "layers"),
        ({"width": 100, "heads": 3}, "multiple of 3 heads"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(ValueError, match=words):
            TrainSpec(**change).check(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shared evenly by 3 ranks"):
        TrainSpec().check(3)


def test_fingerprint_tells_runs_apart() -> None:
    one = TrainSpec().fingerprint("text")
    assert one == TrainSpec().fingerprint("text")
    assert one != TrainSpec(seed=1).fingerprint("text")
    assert one != TrainSpec().fingerprint("other")


def test_initial_parameters_follow_from_the_seed() -> None:
    spec = TrainSpec(width=16, ff_width=32, heads=2, seq_len=8)
    one, two = initial_parameters(spec), initial_parameters(spec)
    assert list(one) == sorted(one)
    assert {name: value.shape for name, value in one.items()} == parameter_shapes(spec)
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name])
