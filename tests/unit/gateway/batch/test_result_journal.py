"""Tests of a batch's journal (file of its results), which must be readable after any crash."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.batch.result_journal import JournalEntry, JournalReader, KeptAnswer, encode_entry

TOTAL = 6
KEPT = KeptAnswer([1, 2], [3], "a", msgspec.Raw(b'{"id":"x"}'), 2)
entries = st.builds(
    JournalEntry,
    number=st.integers(0, TOTAL - 1),
    is_good=st.booleans(),
    result=st.sampled_from(["", '{"custom_id":"a"}']),
    kept=st.sampled_from([None, KEPT]),
)


def read(data: bytes) -> tuple[JournalReader, list[JournalEntry]]:
    # Read a journal as its owner does, up to the first incomplete line.
    #
    # Returns the reader and the entries.
    reader, results = JournalReader(TOTAL), []
    for line in data.splitlines(keepends=True):
        size = reader.size
        entry = reader.feed(line)
        if reader.size == size:
            break
        if entry is not None:
            results.append(entry)
    return reader, results


@given(st.lists(entries, max_size=12), st.integers(0, 200))
def test_a_journal_cut_anywhere_reads_as_its_complete_entries(
    written: list[JournalEntry], lost: int
) -> None:
    lines = [encode_entry(entry) for entry in written]
    data = b"".join(lines)
    cut = data[: max(0, len(data) - lost)]
    whole = cut[: cut.rfind(b"\n") + 1]
    reader, results = read(cut)
    assert reader.size == len(whole)
    assert results == read(whole)[1]


@given(st.lists(entries, max_size=8), st.lists(entries, max_size=8), st.integers(1, 60))
def test_a_damaged_line_loses_no_entry_before_or_after_it(
    before: list[JournalEntry], after: list[JournalEntry], length: int
) -> None:
    partial = encode_entry(JournalEntry(0, True, "x" * 80))[:length]
    first, second = (b"".join(map(encode_entry, written)) for written in (before, after))
    reader, results = read(first + partial + b"\n" + second)
    expected, expected_results = read(first + second)
    assert results == expected_results
    assert reader.has_result == expected.has_result
    assert reader.size == len(first + partial + b"\n" + second)


@given(st.lists(entries, max_size=24))
def test_each_request_has_one_result_and_only_the_others_are_missing(
    written: list[JournalEntry],
) -> None:
    reader, results = read(b"".join(map(encode_entry, written)))
    numbers = [entry.number for entry in results]
    assert len(set(numbers)) == len(numbers)
    assert set(numbers) == {entry.number for entry in written if entry.result}
    assert set(reader.missing()) == set(range(TOTAL)) - set(numbers)
    assert (reader.completed, reader.failed) == (
        sum(entry.is_good for entry in results),
        sum(not entry.is_good for entry in results),
    )
    assert not reader.kept.keys() & set(numbers)


def test_the_newest_kept_part_counts_until_it_is_withdrawn() -> None:
    longer = msgspec.structs.replace(KEPT, tokens=[3, 4])
    journal = [JournalEntry(1, kept=KEPT), JournalEntry(1, kept=longer), JournalEntry(2, kept=KEPT)]
    reader, _ = read(b"".join(map(encode_entry, [*journal, JournalEntry(2)])))
    assert reader.kept == {1: longer}
