"""Tests of the workloads with which fetching of stored prefixes is measured."""

from __future__ import annotations

from math import log
from random import Random

from bench.shared_prefixes import FEWEST, MOST, STRATA, _document_count, requests


def test_six_consecutive_seeds_have_a_number_of_documents_in_each_sixth_of_the_range() -> None:
    counts = [_document_count(seed, Random(seed)) for seed in range(31, 37)]
    places = sorted(log((count + 1) / FEWEST) / log(MOST / FEWEST) * STRATA for count in counts)
    assert all(stratum < place < stratum + 1.2 for stratum, place in enumerate(places))


def test_the_first_requests_read_every_document_once() -> None:
    made = requests(3, 1.0, are_shared=True)
    documents = _document_count(3, Random(3))
    assert len({request.blocks[0] for request in made.arrivals[:documents]}) == documents
    assert len({request.blocks[0] for request in made.arrivals}) == documents
    assert made.cold > documents


def test_without_sharing_no_two_requests_have_a_block_in_common() -> None:
    made = requests(3, 1.0, are_shared=False)
    blocks = [block for request in made.arrivals for block in request.blocks]
    assert len(blocks) == len(set(blocks))
