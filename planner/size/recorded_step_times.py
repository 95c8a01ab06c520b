"""Finds measurements of prefills and decodes in an access log, to calibrate step times.

A prefill is used if its endpoint had no other prompt at that time, or if its prompt was the only
one that waited for another prefill to end. The decoding of an answer is used together with all
sequences and prompts that ran beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar

import msgspec

from planner.size.plan_draft import SizingError
from planner.traces import TraceError
from planner.traces.access_log import LoggedRequest, arrived_s
from planner.traces.trace_lines import parse_lines
from policies.sizing.model_shapes import Llm

LEAST_OUTPUT = 16  # minimum tokens of a used answer; shorter ones show the network, not the steps
# Maximum numbers of used phases, spread over the log. Decode phases overlap, so fewer are enough.
MOST_PREFILLS, MOST_DECODES = 5_000, 2_000
STEP_TOKENS = 8_192  # vLLM's max_num_batched_tokens
# First tokens that are less than this apart are of one step, which computed all their prompts.
SAME_STEP_S = 0.002
# Time after which a sent request is surely in the engine's queue, if it waits for another prompt.
QUEUED_AFTER_S = 0.05


class MeasuredAnswer(msgspec.Struct, frozen=True):
    """One recorded answer.

    endpoint  name of the endpoint
    sent_s    when the request was sent, in seconds
    first_s   time of the first token, in seconds
    last_s    time of the last token, in seconds
    prompt    number of prompt tokens
    cached    number of them that were cached
    output    number of generated tokens
    """

    endpoint: str
    sent_s: float
    first_s: float
    last_s: float
    prompt: int
    cached: int
    output: int


class PrefillPhase(msgspec.Struct, frozen=True):
    """One prefill that an access log shows, with the work that the engine did beside it.

    seconds     its duration
    chunks      (tokens, attention area) of each step that computed a part of the prompt; the area
                is the number of query-key pairs
    seqs        mean number of sequences that decoded beside it
    context     tokens of KV that these sequences read per step, in total
    was_queued  whether `seconds` begins at the end of the preceding step, for which the prompt
                waited; otherwise, it begins when the request was sent
    """

    seconds: float
    chunks: tuple[tuple[int, float], ...]
    seqs: int
    context: int
    was_queued: bool = False


class DecodePhase(msgspec.Struct, frozen=True):
    """The generation of one recorded answer after its first token, with the work beside it.

    seconds  duration of the generation
    steps    number of steps, one per token
    chunks   (tokens, attention area) of each step that computed other prompts meanwhile
    seqs     mean number of sequences of a step, including this answer
    context  mean tokens of KV that a step reads
    overlap  mean number of used phases that are in progress at the same time, at least 1
    """

    seconds: float
    steps: int
    chunks: tuple[tuple[int, float], ...]
    seqs: float
    context: float
    overlap: float = 1.0


_Phase = TypeVar("_Phase", PrefillPhase, DecodePhase)


class _TimedLine(LoggedRequest):
    endpoint: str = ""
    sent_us: int | None = None
    first_token_us: int | None = None
    last_us: int | None = None
    cached_tokens: int | None = None
    prefill: str = ""
    retries: tuple[str, ...] = ()
    resumes: int = 0


def read_answers(log: Path, last_s: float) -> list[MeasuredAnswer]:
    """Return the complete streamed answers of the log's last `last_s` seconds.

    Raises SizingError if the log is not readable, or has several models.
    """
    try:
        with log.open("rb") as file:
            rows = [row for _, row in parse_lines(_TimedLine, file, str(log))]
    except TraceError as error:
        raise SizingError(str(error)) from None
    begin_s = max(map(arrived_s, rows), default=0.0) - last_s
    rows = [row for row in rows if row.status == 200 and arrived_s(row) >= begin_s]
    models = sorted({row.model for row in rows})
    if len(models) > 1:
        raise SizingError(
            f"--calibrate needs a log of one model, but this log has {', '.join(models)}"
        )
    return [answer for row in rows for answer in _answer(row)]


def _answer(row: _TimedLine) -> Iterator[MeasuredAnswer]:
    times = row.sent_us, row.first_token_us, row.last_us
    tokens = row.prompt_tokens, row.completion_tokens
    if row.prefill or row.retries or row.resumes or None in times or None in tokens:
        return
    sent_s, first_s, last_s = (row.time + (us or 0) / 1e6 for us in times)
    prompt, output = (count or 0 for count in tokens)
    if sent_s < first_s <= last_s and prompt > 0 and output > 0:
        cached = min(prompt - 1, row.cached_tokens or 0)
        yield MeasuredAnswer(row.endpoint, sent_s, first_s, last_s, prompt, cached, output)


def phases_of(answers: Sequence[MeasuredAnswer], model: Llm) -> list[PrefillPhase | DecodePhase]:
    """Return the prefill and decode phases of the answers that are usable as measurements.

    At most MOST_PREFILLS and MOST_DECODES are returned.
    """
    by_endpoint: dict[str, list[MeasuredAnswer]] = defaultdict(list)
    for answer in answers:
        by_endpoint[answer.endpoint].append(answer)
    prefills: list[PrefillPhase] = []
    decodes: list[DecodePhase] = []
    for own in by_endpoint.values():
        own.sort(key=lambda answer: answer.first_s)
        for answer, others in _with_others(own):
            prefills += _prefill(answer, others, model)
            decodes += _decode(answer, others, model)
    decodes = _spread(decodes, MOST_DECODES)
    span_s = sum(map(_span_s, by_endpoint.values()))
    overlap = sum(phase.seconds for phase in decodes) / span_s if decodes else 1.0
    return [
        *_spread(prefills, MOST_PREFILLS),
        *(msgspec.structs.replace(phase, overlap=max(1.0, overlap)) for phase in decodes),
    ]


def _span_s(answers: Sequence[MeasuredAnswer]) -> float:
    # Return the seconds from the first request that was sent to the last token.
    sent_s = min(answer.sent_s for answer in answers)
    return max(answer.last_s for answer in answers) - sent_s


def _spread(phases: Sequence[_Phase], most: int) -> list[_Phase]:
    count = min(len(phases), most)
    return [phases[place * len(phases) // count] for place in range(count)]


def _with_others(
    answers: Sequence[MeasuredAnswer],
) -> Iterator[tuple[MeasuredAnswer, list[MeasuredAnswer]]]:
    # Yield each answer with those that were in progress at some time during it.
    longest_s = max(answer.last_s - answer.sent_s for answer in answers)
    firsts = [answer.first_s for answer in answers]
    for answer in answers:
        low = bisect_left(firsts, answer.sent_s - longest_s)
        high = bisect_left(firsts, answer.last_s + longest_s)
        yield (
            answer,
            [
                other
                for other in answers[low:high]
                if other is not answer
                and other.sent_s < answer.last_s
                and other.last_s > answer.sent_s
            ],
        )


def _prefill(
    answer: MeasuredAnswer, others: Sequence[MeasuredAnswer], model: Llm
) -> Iterator[PrefillPhase]:
    begin_s, end_s = answer.sent_s, answer.first_s
    beside = [other for other in others if other.sent_s < end_s and other.first_s > begin_s]
    if beside:
        ends_s = [other.first_s for other in beside if other.first_s < end_s - SAME_STEP_S]
        begin_s = max(ends_s, default=0.0)
        if not _is_next(answer, beside, begin_s):
            return
    seqs, context = _batch(others, begin_s, end_s, model)
    yield PrefillPhase(
        *(end_s - begin_s, _chunks(answer), round(seqs), round(context), bool(beside))
    )


def _is_next(answer: MeasuredAnswer, beside: Sequence[MeasuredAnswer], begin_s: float) -> bool:
    # Return whether the step that began at `begin_s` computed the whole prompt and no other one.
    #
    # If the prompts beside it fit into one step together with it, none of it was computed earlier.
    is_alone = not any(other.sent_s < begin_s < other.first_s for other in beside)
    tokens = sum(each.prompt - each.cached for each in (answer, *beside))
    is_queued = answer.sent_s + QUEUED_AFTER_S < begin_s
    return is_queued and is_alone and tokens <= STEP_TOKENS


def _decode(
    answer: MeasuredAnswer, others: Sequence[MeasuredAnswer], model: Llm
) -> Iterator[DecodePhase]:
    if answer.output < LEAST_OUTPUT or answer.last_s <= answer.first_s:
        return
    begin_s, end_s = answer.first_s, answer.last_s
    seqs, context = _batch([answer, *others], begin_s, end_s, model)
    inside = [other for other in others if begin_s + SAME_STEP_S < other.first_s <= end_s]
    chunks = tuple(_chunks_of_steps(inside))
    yield DecodePhase(end_s - begin_s, answer.output - 1, chunks, seqs, context)


def _chunks_of_steps(answers: Sequence[MeasuredAnswer]) -> Iterator[tuple[int, float]]:
    # Yield (tokens, attention area) of each step that computed prompts; the answers are sorted by
    # their first tokens. Prompts that wait together are computed in one step.
    tokens, area, last_s = 0, 0.0, -inf
    for answer in answers:
        for size, part in _chunks(answer):
            is_next = answer.first_s >= last_s + SAME_STEP_S or tokens + size > STEP_TOKENS
            if tokens and is_next:
                yield tokens, area
                tokens, area = 0, 0.0
            tokens, area, last_s = tokens + size, area + part, answer.first_s
    if tokens:
        yield tokens, area


def _chunks(answer: MeasuredAnswer) -> tuple[tuple[int, float], ...]:
    # Return each chunk of a prompt as (tokens, attention area).
    starts = range(answer.cached, answer.prompt, STEP_TOKENS)
    sizes = [(start, min(STEP_TOKENS, answer.prompt - start)) for start in starts]
    return tuple((size, size * (start + size / 2)) for start, size in sizes)


def _batch(
    answers: Sequence[MeasuredAnswer], begin_s: float, end_s: float, model: Llm
) -> tuple[float, float]:
    # Return two means over the time between `begin_s` and `end_s`: the number of decoding
    # sequences, and the number of tokens whose KV they read.
    seqs = context = 0.0
    for answer in answers:
        low, high = max(begin_s, answer.first_s), min(end_s, answer.last_s)
        if low >= high:
            continue
        share = (high - low) / (end_s - begin_s)
        done = ((low + high) / 2 - answer.first_s) / (answer.last_s - answer.first_s)
        seqs += share
        context += share * model.read_tokens(round(answer.prompt + answer.output * done))
    return seqs, context
